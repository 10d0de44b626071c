"""Batches as trees: one function that takes them apart into leaves, and one that puts them together.

A *leaf* is a tensor, a scalar (number, string, None), a list of scalars (captions, ids), a list that has an
entry a row (boxes of each image), or an object that is none of the containers below, whole. Containers are
those that torch's pytree knows (dicts, lists, tuples, named tuples, and what libraries register, such as the
outputs of transformers), dataclasses, frozen ones too, and other mappings (a tokenizer's encoding).
"""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

_SCALARS = (str, bytes, int, float, complex, bool, type(None))

Lists = frozenset[str]
"""Names of the lists in a batch that have an entry a row, and are one leaf each."""


def flatten(batch: Any, lists: Lists = frozenset()) -> tuple[list[Any], TreeSpec]:
    """A batch's leaves and its tree."""
    return pytree.tree_flatten(_marked(batch, lists), is_leaf=_is_scalar_list)


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The inverse of ``flatten``. Dataclasses are made without calling their ``__init__``."""
    return pytree.tree_unflatten(list(leaves), spec)


def each_tensor(
    change: Callable[[torch.Tensor], torch.Tensor], batch: Any, lists: Lists = frozenset()
) -> Any:
    """The batch with its tensors changed, also in containers that pytree does not know."""
    leaves, spec = flatten(batch, lists)
    plain = [list(leaf) if isinstance(leaf, list) else leaf for leaf in leaves]
    return unflatten(pytree.tree_map_only(torch.Tensor, change, plain), spec)


def leaf_names(batch: Any, lists: Lists = frozenset()) -> list[str]:
    """A name for each leaf, as the user would write it: ``['image']`` or ``[0].boxes``."""

    def names(node: Any, name: str) -> list[str]:
        container = _container(node)
        if container is None or (isinstance(node, list) and name in lists):
            return [name or "the batch"]
        return [n for key, child in container.entries for n in names(child, name + key)]

    return names(batch, "")


def list_lengths(batch: Any, name: str = "") -> dict[str, int]:
    """Name to length of the lists that are not leaves by themselves."""
    container = _container(batch)
    if container is None:
        return {}
    found = {name: len(batch)} if isinstance(batch, list) else {}
    for key, child in container.entries:
        found |= list_lengths(child, name + key)
    return found


class RowList(list[Any]):
    """A list with an entry a row. Pytree goes by the exact type, so that it is a leaf."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    """Stands for a dataclass or mapping that pytree does not know, until it is put together again."""

    kind: type
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Strings:
    """Stands for a tuple of strings (torch's ``default_collate`` makes them): one leaf, a list."""

    strings: list[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Container:
    """A container's entries by name, and what makes one like it of other entries."""

    entries: list[tuple[str, Any]]
    like: Callable[[list[Any]], Any]


def _container(node: Any) -> _Container | None:
    """None for a leaf."""
    if _is_scalar_list(node) or _is_strings(node):
        return None
    kind = namedtuple if pytree.is_namedtuple_instance(node) else type(node)
    if kind in pytree.SUPPORTED_NODES:
        handler = pytree.SUPPORTED_NODES[kind]
        values, context = handler.flatten_fn(node)
        return _Container(
            list(zip(_keys(node, len(values)), values, strict=True)),
            lambda given: handler.unflatten_fn(given, context),
        )
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        own = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
        names = [f".{name}" for name in own]
    elif isinstance(node, (dict, UserDict)):
        own = dict(node)
        names = [f"[{key!r}]" for key in own]
    else:
        return None
    return _Container(
        list(zip(names, own.values(), strict=True)),
        lambda given: _Record(type(node), dict(zip(own, given, strict=True))),
    )


def _keys(node: Any, count: int) -> list[str]:
    if isinstance(node, Mapping):
        keys = [f"[{key!r}]" for key in node]
        if len(keys) == count:
            return keys
    fields = getattr(node, "_fields", None)  # of a named tuple
    return [f".{field}" for field in fields] if fields else [f"[{i}]" for i in range(count)]


def _marked(node: Any, lists: Lists, name: str = "") -> Any:
    """``node`` with row lists marked, and stand-ins for what pytree does not know."""
    if isinstance(node, list) and name in lists:
        return RowList(node)
    if _is_strings(node):
        return _Strings(list(node))
    container = _container(node)
    if container is None:
        return node
    return container.like([_marked(child, lists, name + key) for key, child in container.entries])


def _is_scalar_list(node: Any) -> bool:
    return type(node) is list and bool(node) and all(isinstance(entry, _SCALARS) for entry in node)


def _is_strings(node: Any) -> bool:
    return type(node) is tuple and bool(node) and all(isinstance(entry, (str, bytes)) for entry in node)


def _original(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = context
    own = dict(zip(names, values, strict=True))
    if not dataclasses.is_dataclass(kind):
        return kind(own)
    made = object.__new__(kind)
    for name, value in own.items():
        object.__setattr__(made, name, value)  # frozen ones too
    return made


def _strings(values: Iterable[Any], context: None) -> Any:
    (strings,) = values
    return tuple(strings) if isinstance(strings, list) else strings  # a trace has a proxy there


pytree.register_pytree_node(
    _Record,
    lambda record: (list(record.fields.values()), (record.kind, tuple(record.fields))),
    lambda values, context: _original(values, context),
)
pytree.register_pytree_node(_Strings, lambda given: ([given.strings], None), _strings)
