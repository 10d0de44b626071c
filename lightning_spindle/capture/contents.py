"""What the plain attributes of a model's modules hold: remembered, compared, put back.

Attributes are compared by identity; tensors and arrays also by what was written to them; lists, dicts, sets,
deques and tuples by their entries, at any depth. What other objects hold is not seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lightning_spindle.capture.changes import Change, Kind, fill, write
from lightning_spindle.capture.places import At, Place
from lightning_spindle.capture.writes import Writes, memory

INTERNAL = frozenset(nn.Module().__dict__)
_CONTAINERS = (list, dict, set, deque, tuple)
_WATCHED = (torch.Tensor, nn.Parameter, np.ndarray)
_PLAIN = (str, int, float, bool, type(None))
_ABSENT = object()


class _Mark(NamedTuple):
    """What a tensor or an array held: how often it was written to (None: not counted), a copy or None."""

    version: int | None
    copy: Any


@dataclass(slots=True)
class _Known:
    """A container, tensor or array: the place where it was found first, and the modules that reach it.

    ``entries`` of a container; ``tensors`` among them, with their keys.
    """

    value: Any
    place: Place
    mark: _Mark | None = None
    entries: Any = None
    tensors: list[tuple[Any, Any, _Mark]] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)


class _Own(NamedTuple):
    """A module's attributes, but those skipped."""

    path: str
    module: nn.Module
    skipped: Collection[str]
    before: dict[str, Any]

    def changes(self) -> Iterator[Change]:
        """Attributes that are other objects now, or are gone."""
        now = vars(self.module)
        for key in self.before:
            if key not in now:
                yield Change(Place.attribute(self.path, key).name, self.module, Kind.REMOVE, key)
        for key, value in now.items():
            if key not in self.skipped and not _is_same(self.before.get(key, _ABSENT), value):
                name, fresh = Place.attribute(self.path, key).name, self.before.get(key) is None
                yield Change(name, self.module, Kind.ASSIGN, key, value, fresh=fresh)

    def put_back(self) -> None:
        now = vars(self.module)
        for key in [k for k in now if k not in self.skipped and k not in self.before]:
            del now[key]
        now.update(self.before)


class Contents:
    """What the attributes of ``model``'s modules hold now.

    Args:
        clones: keep copies of tensors too, so that all can be put back.
        skipped: names of a module's attributes that are left out.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        clones: bool,
        skipped: Callable[[nn.Module], Collection[str]] = lambda module: INTERNAL,
    ) -> None:
        self._model, self._clones = model, clones
        self._modules = [_own(path, m, skipped(m)) for path, m in model.named_modules()]
        self._known: dict[int, _Known] = {}
        self._registered = {id(p) for p in model.parameters()}
        self._written: set[int] = set()
        self._reached: dict[int, set[str]] | None = None
        for own in self._modules:
            self._walk(own.path, own.before)

    def _walk(self, path: str, attributes: dict[str, Any]) -> None:
        """Remembers what a module's attributes reach."""
        seen: set[int] = set()
        found = [(value, Place.attribute(path, key)) for key, value in attributes.items()]
        while found:
            value, place = found.pop()
            if id(value) in seen or not (self._watches(value) or isinstance(value, _CONTAINERS)):
                continue
            seen.add(id(value))
            known = self._known.get(id(value))
            if known is None:
                known = self._known[id(value)] = self._remembered(value, place)
            known.modules.add(path)
            if known.mark is None:
                found += [(v, place.below(key)) for key, v in _items(value, _is_container)]

    def _remembered(self, value: Any, place: Place) -> _Known:
        if self._watches(value):
            return _Known(value, place, _mark(value, self._clones))
        tensors = [
            (key, v, _mark(v, self._clones))
            for key, v in _items(value, _WATCHED.__contains__)
            if self._watches(v)
        ]
        return _Known(value, place, None, _entries(value), tensors)

    def _watches(self, value: Any) -> bool:
        return id(value) not in self._registered and _is_watched(value)

    # --------------------------------------------------------------------------------------- compared
    @contextmanager
    def watched(self, thoroughly: bool) -> Iterator[None]:
        """Around what may change the contents: sees writes that tensors do not count.

        Those of tensors of inference mode, which count none; ``thoroughly``: also those through ``.data``.
        """
        wanted = {
            memory(tensor)
            for _, tensor, mark in self._marked()
            if isinstance(tensor, torch.Tensor) and (thoroughly or mark.version is None)
        }
        if self._clones or not wanted:
            yield
            return

        def note(tensor: torch.Tensor) -> None:
            if memory(tensor) in wanted:
                self._written.add(memory(tensor))

        with Writes(note):
            yield

    def changes(self) -> list[Change]:
        """What is not as it was; each container and tensor by itself, whatever holds it now."""
        found: list[Change] = []
        for own in self._modules:
            found += own.changes()
        for known in self._known.values():
            if known.mark is None and not isinstance(known.value, tuple):
                found += _of_container(known)
        for place, value, mark in self._marked():
            found += self._of_tensor(place, value, mark)
        return found

    def reaching(self, change: Change) -> set[str]:
        """The modules whose attributes reached what was changed."""
        if isinstance(change.target, nn.Module):
            return {own.path for own in self._modules if own.module is change.target}
        if self._reached is None:
            self._reached = {}
            for i, known in self._known.items():
                for one in (i, *(id(tensor) for _, tensor, _ in known.tensors)):
                    self._reached.setdefault(one, set()).update(known.modules)
        return self._reached.get(id(change.target), set())

    def places(self) -> dict[int, Place]:
        """Where everything was that other copies of the model have too, by id."""
        found = {id(tensor): place for place, tensor, _ in self._marked()}
        found |= {i: known.place for i, known in self._known.items() if not isinstance(known.value, tuple)}
        found |= {id(m): Place("module", path) for path, m in self._model.named_modules()}
        found |= {id(b): Place("buffer", path) for path, b in self._model.named_buffers()}
        return found | {id(p): Place("parameter", path) for path, p in self._model.named_parameters()}

    def _marked(self) -> Iterator[tuple[Place, Any, _Mark]]:
        """All tensors and arrays."""
        for known in self._known.values():
            if known.mark is not None:
                yield known.place, known.value, known.mark
            for key, tensor, mark in known.tensors:
                yield known.place.below(key), tensor, mark

    def _of_tensor(self, place: Place, value: Any, mark: _Mark) -> Iterator[Change]:
        counted = mark.version is not None and value._version != mark.version
        if not counted:
            if mark.copy is not None:
                written = not _equal(value, mark.copy)
            else:
                written = memory(value) in self._written
            if not written:
                return
        hidden = not counted and mark.version is not None
        copy = value.copy() if isinstance(value, np.ndarray) else value.detach().clone()
        yield Change(place.name, value, Kind.WRITE, value=copy, hidden=hidden)

    # --------------------------------------------------------------------------------------- put back
    def put_back(self) -> None:
        """Makes all as it was."""
        assert self._clones
        for own in self._modules:
            own.put_back()
        for known in self._known.values():
            if known.mark is None and not _same_entries(known.value, known.entries):
                fill(known.value, known.entries)
        for _, value, mark in self._marked():
            if not _equal(value, mark.copy):
                write(value, mark.copy)


def _own(path: str, module: nn.Module, skipped: Collection[str]) -> _Own:
    return _Own(path, module, skipped, {k: v for k, v in vars(module).items() if k not in skipped})


def _of_container(known: _Known) -> Iterator[Change]:
    now, before, name = known.value, known.entries, known.place.name
    if _same_entries(now, before):
        return
    if isinstance(now, dict) and len(now) >= len(before) and all(map(is_, now, before)):
        for key, value in now.items():
            if not _is_same(before.get(key, _ABSENT), value):
                yield Change(name, now, Kind.ASSIGN, key, value)
        return
    kept = 0
    if isinstance(now, list):
        same = map(is_, now, before)
        kept = next((at for at, alike in enumerate(same) if not alike), min(len(now), len(before)))
    entries = now[kept:] if isinstance(now, list) else _entries(now)
    yield Change(name, now, Kind.FILL, value=entries, count=len(before), kept=kept)


def _is_same(before: Any, now: Any) -> bool:
    """The same object, or a number or string like it."""
    return before is now or (type(before) is type(now) and isinstance(now, _PLAIN) and before == now)


def _is_container(kind: type) -> bool:
    return issubclass(kind, _CONTAINERS)


def _is_watched(value: Any) -> bool:
    """Tensors in plain memory, and arrays; the model's parameters are watched elsewhere."""
    if isinstance(value, np.ndarray):
        return value.dtype != object
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and value.layout is torch.strided
        and value.device.type != "meta"
        and not value.is_nested
        and not _overlaps(value)
    )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether entries share memory (``expand``): nothing can be written to it."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _mark(value: Any, clones: bool) -> _Mark:
    if isinstance(value, np.ndarray):
        return _Mark(None, value.copy())
    version = None if value.is_inference() else value._version
    return _Mark(version, value.detach().clone() if clones else None)


def _equal(value: Any, copy: Any) -> bool:
    """Nan is like nan."""
    if value.shape != copy.shape:
        return False
    if isinstance(value, np.ndarray):
        return value.tobytes() == copy.tobytes()
    return torch.equal(value, copy) or bool(((value == copy) | ((value != value) & (copy != copy))).all())


def _entries(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return set(value) if isinstance(value, set) else list(value)


def _items(value: Any, wanted: Callable[[type], bool]) -> list[tuple[Any, Any]]:
    """The entries of a container that are of wanted types, with their keys."""
    if isinstance(value, set):
        return []
    entries = value.values() if isinstance(value, dict) else value
    kinds = {kind for kind in set(map(type, entries)) if wanted(kind)}
    if not kinds:
        return []
    if not isinstance(value, dict):
        return [(at, v) for at, v in enumerate(value) if type(v) in kinds]
    keys = [key if isinstance(key, _PLAIN) else At(at) for at, key in enumerate(value)]
    return [(key, v) for key, v in zip(keys, value.values(), strict=True) if type(v) in kinds]


def _same_entries(value: Any, entries: Any) -> bool:
    if isinstance(value, set):
        return bool(value == entries)
    if len(value) != len(entries) or not all(map(is_, value, entries)):
        return False
    return not isinstance(value, dict) or all(map(is_, value.values(), entries.values()))
