"""A step that runs as one operator sees itself as the only process, wherever it runs.

Its code asks whether it is rank 0, and writes to loggers, which write there alone. What it calls of loggers
is noted, for rank 0 to call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn

_CALLS_ONLY = (
    "{what} of a step that runs as one operator: its calls are noted, to be made on rank 0 after it, and "
    "give nothing back. Do this in a hook, on_train_batch_end say, which runs on every rank"
)


@dataclass(frozen=True, slots=True)
class LoggerCall:
    """A call of what is at ``path`` (names of attributes) of the trainer's logger number ``logger``."""

    logger: int
    path: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def alone(trainer: Any, model: nn.Module) -> Iterator[list[LoggerCall]]:
    """Inside, this process is rank 0, and what is called of loggers is noted in the list instead.

    Args:
        trainer: None where the model has none; then nothing is done.
        model: whose attributes may hold loggers, or what they write to.
    """
    if trainer is None:
        yield []
        return
    notes = _Notes(trainer.global_rank)
    loggers = [_Noted(logger, at, (), notes) for at, logger in enumerate(trainer.loggers)]
    seen = {"loggers": loggers, "logger": loggers[0] if loggers else None, "is_global_zero": True}
    with ExitStack() as stack:
        for place, key, noted in list(_held(model, trainer.loggers, loggers, notes)):
            stack.callback(_give_back, place, key, noted, place[key])
            place[key] = noted
        for name, value in {**seen, "global_rank": 0, "local_rank": 0}.items():
            stack.enter_context(mock.patch.object(Trainer, name, _always(value)))
        stack.enter_context(mock.patch.object(trainer.strategy, "broadcast", _unchanged))
        stack.enter_context(mock.patch.object(trainer.strategy, "barrier"))
        stack.enter_context(_as_rank(0))
        stack.callback(notes.close)
        yield notes.calls


def make_calls(trainer: Any, calls: Iterable[LoggerCall]) -> None:
    """Calls the loggers, on rank 0."""
    if trainer.global_rank == 0:
        for call in calls:
            called: Any = trainer.loggers[call.logger]
            for name in call.path:
                called = getattr(called, name)
            called(*call.args, **call.kwargs)


def _held(
    model: nn.Module, loggers: list[Any], noted: list[_Noted], notes: _Notes
) -> Iterator[tuple[dict[str, Any], str, _Noted]]:
    """Attributes that are a logger, or what one writes to, and what stands in for them."""
    if not loggers:
        return
    known = {id(logger): own for logger, own in zip(loggers, noted, strict=True)}
    for at, logger in enumerate(loggers):
        experiment = vars(logger).get("_experiment")
        if experiment is not None:
            known[id(experiment)] = _Noted(experiment, at, ("experiment",), notes)
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, DummyExperiment):
                if len(loggers) > 1:
                    raise ValueError(
                        f"attribute {key!r} holds what one of several loggers writes to, which a step that "
                        "runs as one operator cannot tell apart; use self.loggers in the step"
                    )
                yield vars(module), key, _Noted(None, 0, ("experiment",), notes)
            elif id(value) in known:
                yield vars(module), key, known[id(value)]


def _give_back(place: dict[str, Any], key: str, noted: _Noted, value: Any) -> None:
    if place.get(key) is noted:
        place[key] = value


def _unchanged(obj: Any, src: int = 0) -> Any:
    return obj


def _always(value: Any) -> property:
    return property(lambda _: value)


@contextmanager
def _as_rank(rank: int) -> Iterator[None]:
    with (
        mock.patch.object(rank_zero_only, "rank", rank),
        mock.patch.object(fabric_rank_zero_only, "rank", rank),
    ):
        yield


@dataclass(slots=True)
class _Notes:
    rank: int
    calls: list[LoggerCall] = field(default_factory=list)
    closed: bool = False

    def close(self) -> None:
        self.closed = True


class _Noted:
    """Stands in for a logger, or for something of it: calls are noted, all else is that of ``real``.

    ``real`` is None where only rank 0 has it. Where the step keeps it, it is ``real`` afterwards.
    """

    __slots__ = ("_logger", "_notes", "_path", "_real")

    def __init__(self, real: Any, logger: int, path: tuple[str, ...], notes: _Notes) -> None:
        for name, value in {"_real": real, "_logger": logger, "_path": path, "_notes": notes}.items():
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For isinstance."""
        return _Noted if self._real is None else type(self._real)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("it is a logger")

    def __getattr__(self, name: str) -> Any:
        path = (*self._path, name)
        if self._real is None or (name == "experiment" and self._notes.rank != 0):
            return _Noted(None, self._logger, path, self._notes)
        with _as_rank(self._notes.rank):  # else an experiment would be made on every rank
            real = getattr(self._real, name)
        if name != "experiment" and not callable(real):
            return real
        return _Noted(real, self._logger, path, self._notes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._notes.closed:
            return None if self._real is None else self._real(*args, **kwargs)
        self._notes.calls.append(LoggerCall(self._logger, self._path, _copied(args), _copied(kwargs)))
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse(f"setting {name}")

    def __getitem__(self, key: Any) -> Any:
        self._refuse(f"reading [{key!r}]")

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse(f"setting [{key!r}]")

    def __fspath__(self) -> str:
        self._refuse("reading a value")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(_CALLS_ONLY.format(what=f"{'.'.join(('logger', *self._path))}, {what}"))


def _copied(value: Any) -> Any:
    """As it is now: what is given to a logger may be changed later in the step."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {k: _copied(v) for k, v in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
