"""Warnings at fit start about models that train, but perhaps not as meant."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_spindle.graph import OperatorGraph


def warn_before_fit(model: nn.Module, graph: OperatorGraph, optimizers: Sequence[Optimizer]) -> None:
    """Name modules that are in eval mode yet trainable, and trained parameters that no optimizer has."""
    still = _outermost_in_eval(model)
    if still:
        rank_zero_warn(
            f"in evaluation mode, but trainable: {', '.join(still)}. They train without dropout and with "
            "fixed statistics, as they would in one process; call .train() on them if that is not meant"
        )
    listed = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    own = dict(model.named_parameters())
    left_out = [p.name for p in graph.parameters if p.trainable and id(own[p.name]) not in listed]
    if left_out:
        rank_zero_warn(
            f"parameters that get gradients, but are in no optimizer, so they never change: "
            f"{', '.join(left_out)}. Add them to an optimizer, or set requires_grad=False"
        )


def _outermost_in_eval(model: nn.Module) -> list[str]:
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name == other or name.startswith(f"{other}.") for other in found)
        if not module.training and not inside and any(p.requires_grad for p in module.parameters()):
            found.append(name or type(module).__name__)
    return found
