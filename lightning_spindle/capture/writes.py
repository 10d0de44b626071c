"""Which tensors operations write to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Writes(TorchDispatchMode):
    """Inside, ``before`` is called with each tensor just before an operation writes to it."""

    supports_higher_order_operators = True

    def __init__(self, before: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._before = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)  # higher-order operators have none
        if schema is not None and schema.is_mutable:
            for at, argument in enumerate(schema.arguments):
                given = args[at] if at < len(args) else kwargs.get(argument.name)
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in given if isinstance(given, (list, tuple)) else [given]:
                        if tensor is not None:
                            self._before(tensor)
        return func(*args, **kwargs)


def memory(tensor: torch.Tensor) -> int:
    """Of the memory behind a tensor that is alive."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
