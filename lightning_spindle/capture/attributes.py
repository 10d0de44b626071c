"""Plain attributes that a step reads (``self.alpha``): a trace has their values in it.

They are noted, so that a step can be captured again where user code changes one (a loss weight that a
callback anneals, a flag that switches an auxiliary loss on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any
from unittest import mock

from lightning.pytorch import LightningModule
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MOST_ENTRIES = 100
# Those of Lightning and torch, which the strategy and the trainer keep; train flags are read live.
_OWN = {*vars(LightningModule()), *vars(nn.Module), "training"}

Attributes = dict[str, Any]
"""Names, such as ``tasks.a.alpha``, with the values that were read; containers are copied.

Also of parameters: ``tasks.a.encoder.weight.requires_grad``.
"""


@contextmanager
def noted(model: nn.Module, attributes: Attributes, active: Callable[[], bool]) -> Iterator[None]:
    """Inside, what is read from ``model``'s modules while ``active()`` is put into ``attributes``."""
    names = {id(module): name for name, module in model.named_modules()}

    def read(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if name not in _OWN and id(module) in names and is_plain(value) and active():
            if not isinstance(getattr(type(module), name, None), property):
                attributes.setdefault(f"{names[id(module)]}.{name}".lstrip("."), copied(value))
        return value

    with mock.patch.object(nn.Module, "__getattribute__", read, create=True):
        yield


def changed(model: nn.Module, attributes: Mapping[str, Any]) -> list[str]:
    """The attributes that are not what they were any more."""
    found = []
    for path, value in attributes.items():
        now = reduce(lambda owner, name: getattr(owner, name, None), path.split("."), model)
        if type(now) is not type(value) or now != value:
            found.append(path)
    return found


def is_plain(value: Any) -> bool:
    """Numbers, strings, None, and lists, tuples and dicts of them, unless they are long."""
    if isinstance(value, _PLAIN):
        return True
    if not isinstance(value, (list, tuple, dict)) or len(value) > _MOST_ENTRIES:
        return False
    return all(isinstance(entry, _PLAIN) for entry in (value.values() if isinstance(value, dict) else value))


def copied(value: Any) -> Any:
    """A value that stays as it is."""
    return value.copy() if isinstance(value, (list, dict)) else value
