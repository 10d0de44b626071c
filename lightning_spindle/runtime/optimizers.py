"""Optimizers like the user's, on other parameters: to check and to time them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch


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
