"""Whether what a module gives can depend on the values of the tensors that it is given.

Numbers alone do not show it: that some tensor exceeds a limit may be false on every part of an example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_METADATA = {
    "__get__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement", "stride",
    "is_floating_point", "is_complex", "is_contiguous", "element_size", "get_device",
}  # fmt: skip


def independent(call: Callable[[], Any], sources: Iterable[torch.Tensor]) -> list[bool]:
    """For each leaf of ``call()`` whether it comes neither from the values of ``sources`` nor from chance.

    Shapes may be read. What an operation gives or writes comes from all that it is given, also through
    views of the same memory. Where a value leaves the tensors (``item``, ``tolist``, ``numpy``) or an
    operation cannot be followed, everything may come from it. Numbers that Python draws are not seen.
    """
    origins = _Origins()
    origins.add(sources)
    with _Escapes(origins), _Operations(origins):
        value = call()
    return [not (origins.escaped or origins.among([leaf])) for leaf in tree_leaves(value)]


class _Origins:
    """The memory that holds what comes from the sources."""

    def __init__(self) -> None:
        self.escaped = False
        self._memory: set[int] = set()
        self._alive: list[torch.Tensor] = []  # else other tensors could get their memory

    def add(self, leaves: Iterable[Any]) -> None:
        """Marks the tensors of ``leaves``."""
        for tensor in _tensors(leaves):
            if tensor.layout is torch.strided:
                self._memory.add(tensor.untyped_storage()._cdata)
                self._alive.append(tensor)
            else:
                self.escaped = True

    def among(self, leaves: Iterable[Any]) -> bool:
        """Whether a tensor of ``leaves`` is marked."""
        return any(
            t.layout is torch.strided and t.untyped_storage()._cdata in self._memory for t in _tensors(leaves)
        )


class _Operations(TorchDispatchMode):
    def __init__(self, origins: _Origins) -> None:
        super().__init__()
        self.origins = origins

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs))
        if self.origins.among(given) or torch.Tag.nondeterministic_seeded in func.tags:
            self.origins.add(tree_leaves(result))
            if func._schema.is_mutable:
                self.origins.add(given)
            self.origins.escaped |= func is torch.ops.aten._local_scalar_dense.default
        return result


class _Escapes(TorchFunctionMode):
    def __init__(self, origins: _Origins) -> None:
        super().__init__()
        self.origins = origins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        plain = result is not None and not _tensors(tree_leaves(result))
        if plain and getattr(func, "__name__", "") not in _METADATA:
            self.origins.escaped |= self.origins.among(tree_leaves((args, kwargs)))
        return result


def _tensors(leaves: Iterable[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
