"""Forward hooks of operators, in a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def observe(module: nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
    """Let forward hooks see an operator's call in the trace: they may collect hidden states.

    What they return is left to the operator's run, as are those that cannot work on proxies;
    whether there are such hooks.
    """
    changes = False
    for key, hook in module._forward_hooks.items():
        given = (args, kwargs) if key in module._forward_hooks_with_kwargs else (args,)
        try:
            changes |= hook(module, *given, output) is not None
        except Exception:
            changes = True
    return changes


@contextmanager
def unhooked(module: nn.Module | None) -> Iterator[None]:
    """Inside, the module's own forward hooks are not called."""
    if module is None:
        yield
        return
    hooks = module._forward_hooks
    module._forward_hooks = type(hooks)()
    try:
        yield
    finally:
        module._forward_hooks = hooks
