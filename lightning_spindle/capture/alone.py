"""A step that runs as one operator sees itself as the only process, wherever it runs.

Its code asks whether it is rank 0, and writes to loggers, which write there alone. What it calls of loggers
is noted, for rank 0 to call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only


@dataclass(frozen=True, slots=True)
class LoggerCall:
    """A call of what is at ``path`` (names of attributes) of the trainer's logger number ``logger``."""

    logger: int
    path: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def alone(trainer: Any) -> Iterator[list[LoggerCall]]:
    """Inside, this process is rank 0, and what is called of loggers is noted in the list instead.

    Args:
        trainer: None where the model has none; then nothing is done.
    """
    if trainer is None:
        yield []
        return
    notes = _Notes(trainer.global_rank)
    loggers = [_Noted(logger, at, (), notes) for at, logger in enumerate(trainer.loggers)]
    seen = {"loggers": loggers, "logger": loggers[0] if loggers else None, "is_global_zero": True}
    with ExitStack() as stack:
        for name, value in {**seen, "global_rank": 0, "local_rank": 0}.items():
            stack.enter_context(mock.patch.object(Trainer, name, _always(value)))
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

    Where the step keeps it, it is ``real`` afterwards.
    """

    def __init__(self, real: Any, logger: int, path: tuple[str, ...], notes: _Notes) -> None:
        self._real, self._logger, self._path, self._notes = real, logger, path, notes

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For isinstance."""
        return type(self._real)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("it is a logger")

    def __getattr__(self, name: str) -> Any:
        with _as_rank(self._notes.rank):  # else an experiment would be made on every rank
            real = getattr(self._real, name)
        if name != "experiment" and not callable(real):
            return real
        return _Noted(real, self._logger, (*self._path, name), self._notes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._notes.closed:
            return self._real(*args, **kwargs)
        self._notes.calls.append(LoggerCall(self._logger, self._path, args, kwargs))
        return None
