"""Changes of what the plain attributes of a model's modules hold, done to another copy of the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn


class Kind(Enum):
    """What a change did."""

    ASSIGN = "assign"  # an attribute of a module, or an entry of a dict
    REMOVE = "remove"  # an attribute
    FILL = "fill"  # a container, in place
    WRITE = "write"  # to a tensor or array, in place


@dataclass(frozen=True, slots=True)
class Change:
    """What was changed in ``target``: a module, a container, a tensor or an array.

    ``name``: where that is found. ``key``: the attribute or entry that has ``value`` now. A container has
    ``value`` after its first ``kept`` entries now; it had ``count``. ``fresh``: an attribute was None before,
    or absent. ``hidden``: it was written to in a way that nothing counts, which is seen only sometimes.
    """

    name: str
    target: Any
    kind: Kind
    key: Any = None
    value: Any = None
    count: int = 0
    kept: int = 0
    fresh: bool = False
    hidden: bool = False


def apply(changes: Iterable[Change]) -> None:
    """Does changes whose targets are this model's.

    Raises:
        ValueError: a container was not as it was where the changes were seen.
    """
    for change in changes:
        if change.kind is Kind.ASSIGN:
            _slots(change.target)[change.key] = change.value
        elif change.kind is Kind.REMOVE:
            _slots(change.target).pop(change.key, None)
        elif change.kind is Kind.WRITE:
            write(change.target, change.value)
        elif len(change.target) != change.count:
            raise ValueError(unlike(change.name, f"{len(change.target)} entries, not {change.count}"))
        else:
            fill(change.target, change.value, change.kept)


def unlike(name: str, what: str) -> str:
    """The message for something that ranks do not have alike."""
    return (
        f"{name} was not the same on all ranks before a step changed it ({what}): every rank has to do alike "
        "what hooks do with it"
    )


def write(target: Any, value: Any) -> None:
    """Gives a tensor or an array the contents of another."""
    if isinstance(target, np.ndarray):
        target[...] = value
        return
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        if target.shape == value.shape:
            target.detach().copy_(value)
        else:
            target.set_(value.to(target.device, copy=True))  # it was resized


def fill(container: Any, entries: Any, kept: int = 0) -> None:
    """Puts entries into a container after the first ``kept``."""
    if isinstance(container, list):
        container[kept:] = entries
        return
    container.clear()
    if isinstance(container, deque):
        container.extend(entries)
    else:
        container.update(entries)


def _slots(target: Any) -> Any:
    return vars(target) if isinstance(target, nn.Module) else target
