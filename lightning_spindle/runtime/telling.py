"""What a step that one rank ran as one operator did beside its loss, told to all ranks and done there too."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_spindle.capture import each_tensor
from lightning_spindle.capture.alone import LoggerCall, make_calls
from lightning_spindle.capture.changes import Change, apply, unlike
from lightning_spindle.capture.coarse import CoarseRun, MetricName
from lightning_spindle.capture.places import Place, packed, unpacked
from lightning_spindle.runtime.objects import broadcast_object
from lightning_spindle.runtime.transport import Transport

_UNSENDABLE = (
    "task {task}: its step {what} what cannot be sent to the other ranks ({error}); use tensors, numbers and "
    "strings, in dicts, lists and tuples, or do it in a hook, which runs on every rank"
)
_TWICE = (
    "{name} was None, and two steps that run as one operator each have set it in the same iteration, to "
    "other values: {operators}. In one process the second would have seen what the first had set; set it in "
    "a hook, which runs on every rank"
)


@dataclass(frozen=True, slots=True)
class Told:
    """What every rank knows of such a step; values have no gradient.

    ``logs``: key, value and options; ``returned``: what hooks see; ``calls``: of loggers. ``changes`` of
    attributes, packed: empty where the step ran. ``fresh``: attributes that were None, with values' digests.
    ``dtype``: the loss's, None where it is no tensor.
    """

    logs: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)
    returned: Any = None
    calls: list[LoggerCall] = field(default_factory=list)
    changes: bytes = b""
    fresh: dict[str, str] = field(default_factory=dict)
    dtype: torch.dtype | None = None


def tell(did: CoarseRun | None, task: str, transport: Transport, device: torch.device, source: int) -> Told:
    """What rank ``source`` did, on every rank (collective); nothing where it had no rows.

    Raises:
        ValueError: on ``source``, something in it cannot be sent.
    """
    if did is None:
        message = broadcast_object(b"", transport, device, source)
        return _unpacked(message, device) if message else Told()
    fresh: dict[str, str] = {}
    if transport.size > 1:
        message, fresh = _message(did, task, source)
        broadcast_object(message, transport, device, source)
    logs = [(key, each_tensor(torch.Tensor.detach, value), options) for key, value, options in did.logs]
    returned = each_tensor(torch.Tensor.detach, did.returned)
    return Told(logs, returned, did.calls, fresh=fresh, dtype=did.dtype)


def take_over(model: LightningModule, told: Mapping[str, Told], device: torch.device) -> None:
    """What steps of other ranks did to the model is done here too, and on rank 0 what they called of loggers.

    Raises:
        ValueError: the model's attributes were not the same on all ranks before, or two steps set one.
    """
    _refuse_twice(told)
    for did in told.values():
        if did.changes:
            try:
                changes = unpacked(did.changes, model, device)
            except (LookupError, AttributeError) as e:
                raise ValueError(unlike("what a step changed", str(e))) from e
            apply(changes)
        make_calls(model._trainer, did.calls)


def logged(model: nn.Module, value: Any) -> Any:
    """A logged value, or this rank's metric of that name."""
    return model.get_submodule(value.name) if isinstance(value, MetricName) else value


def _message(did: CoarseRun, task: str, source: int) -> tuple[bytes, dict[str, str]]:
    """What the other ranks are sent, and what is fresh in it; rank 0 alone needs the calls of loggers."""
    effects, calls = did.effects, [] if source == 0 else did.calls
    places = effects.contents.places() if effects.changes and effects.contents is not None else {}
    try:
        changes = packed(effects.changes, places) if effects.changes else b""
        fresh = {c.name: _digest(packed(c.value, places)) for c in effects.changes if c.fresh}
        return packed(Told(did.logs, did.returned, calls, changes, fresh, did.dtype), {}), fresh
    except Exception as e:  # an object's own pickling may raise anything
        what = _culprit(effects.changes, calls, places)
        raise ValueError(_UNSENDABLE.format(task=task, what=what, error=e)) from e


def _culprit(changes: Sequence[Change], calls: Sequence[LoggerCall], places: Mapping[int, Place]) -> str:
    """What cannot be packed, as the message says it."""
    sent = {f"keeps in {change.name}": change for change in changes}
    given = {f"gives to {'.'.join(('logger', *call.path))}": call for call in calls}
    for what, value in {**sent, **given}.items():
        try:
            packed(value, places)
        except Exception:
            return what
    return "returns or logs"


def _unpacked(message: bytes, device: torch.device) -> Told:
    told = unpacked(message, nn.Module(), device)
    assert isinstance(told, Told)
    return told


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _refuse_twice(told: Mapping[str, Told]) -> None:
    by_name: dict[str, dict[str, str]] = {}
    for operator, did in told.items():
        for name, digest in did.fresh.items():
            by_name.setdefault(name, {})[operator] = digest
    for name, digests in by_name.items():
        if len(set(digests.values())) > 1:
            raise ValueError(_TWICE.format(name=name, operators=", ".join(digests)))
