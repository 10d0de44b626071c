"""AdamW with weight decay on matrices only, warm-up and cosine."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(step: int, warmup: int, total: int) -> float:
    """Share of the peak rate at ``step``: linear up to 1 over ``warmup`` steps, then half a cosine to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


@dataclass(frozen=True, slots=True)
class AdamWSchedule:
    """How a task is optimised.

    Args:
        lr: the peak learning rate.
        weight_decay: for parameters with two dimensions or more; biases, norms and scalars have none.
        warmup: steps of rising rate.
        total: steps until the rate is 0.
    """

    lr: float
    weight_decay: float
    warmup: int
    total: int

    def configure(self, parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
        """The optimizer and its per-step scheduler, as ``configure_optimizers`` returns them."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, lr=self.lr)
        scheduler = LambdaLR(optimizer, partial(warmup_cosine, warmup=self.warmup, total=self.total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
