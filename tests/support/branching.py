"""A task whose steps cannot be taken apart, and run as one operator, beside one whose steps can."""

from typing import Any

import torch
from torch.nn import functional as F

from tests.support.small import Layer, Sample, Small, Validated, multi, pairs, together

EPOCHS = {"max_epochs": 2, "max_steps": -1}
APART = {"a/": (1,), "b/": (0, 1)}
"""Groups for two ranks: the step that stays whole is not on the first one."""


def data() -> Any:
    """For tasks ``a`` and ``b``: batches of unlike sizes, and validation."""
    return together(
        a=Validated(pairs(13, 1), [5, 3, 4, 1], validation=pairs(5, 3)),
        b=Validated(pairs(12, 2), [4, 4, 4], validation=pairs(4, 4)),
    )


class Plain(Small):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Layer(3, 1)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.tower(batch["x"]), batch["y"])


class Branching(Plain):
    """Cannot be taken apart, for a branch on numbers; ``remember`` is what its steps do beside their loss."""

    def predicted(self, batch: Sample) -> torch.Tensor:
        y = self.tower(batch["x"])
        return -y if float(y.detach().sum()) > 1e9 else y

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        y = self.predicted(batch)
        loss = F.mse_loss(y, batch["y"])
        self.remember("train", y.detach(), loss)
        return loss

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        y = self.predicted(batch)
        loss = F.mse_loss(y, batch["y"])
        self.log("val_loss", loss)
        self.remember("validation", y, loss)

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        """After each step ("train" or "validation")."""


def model(kind: type[Small]) -> Any:
    """Task ``a`` is of that kind."""
    torch.manual_seed(0)
    return multi({"a": kind(), "b": Plain()})
