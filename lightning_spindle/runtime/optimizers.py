"""The user's optimizers, what comes before their steps, and others like them on other parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer itself, where Lightning has wrapped it."""
    found: torch.optim.Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return found


def fresh(optimizer: Any, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the same class and defaults, without state, on other parameters.

    Raises:
        Exception: whatever the class's constructor raises.
    """
    own = plain(optimizer)
    accepted = inspect.signature(type(own)).parameters
    options = {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in own.defaults.items()
        if key in accepted
    }
    return type(own)(list(parameters), **options)


def before_step(optimizer: torch.optim.Optimizer, call: Callable[[], None]) -> RemovableHandle:
    """Calls ``call`` in each step of an optimizer, before it changes anything.

    Lightning computes gradients, and clips them, in the closure that it gives to the step.
    """

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            call()
            return None

        def closed() -> Any:
            result = closure()
            call()
            return result

        return args[:1], {**kwargs, "closure": closed}

    return optimizer.register_step_pre_hook(hook)
