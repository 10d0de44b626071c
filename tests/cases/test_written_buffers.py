"""Buffers that a step writes on one rank are the same everywhere where others read or save them."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.support.fitting import assert_same_fit, plain_fit, spindle_fit
from tests.support.small import (
    Layer,
    Part,
    Sample,
    Samples,
    Small,
    Validated,
    forced_fit,
    multi,
    random_samples,
    together,
)


class Scale(nn.Module):
    """Divides by a mean that it follows; its buffer is all it has."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_buffer(name, torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = getattr(self, self.name)
        if self.training:
            mean.mul_(0.5).add_(0.5 * x.detach().abs().mean())
        return x / mean


class Twice(Part):
    """One operator that writes the buffers of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scale("a"), Scale("b")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) + 1)


class Scaled(Small):
    """Counts in validation what it has seen, in a buffer of its own that no operator's module has."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.scale, self.head = Layer(3, 4), Twice(), Layer(4, 1, last=True)
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, batch: Sample) -> torch.Tensor:
        return F.mse_loss(self.head(self.scale(self.tower(batch["x"]))), batch["y"])

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * (1 + 0.01 * self.seen)

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.seen.add_(loss.detach())
        self.log("val_loss", loss)


def samples(count: int, seed: int) -> list[Sample]:
    return random_samples(count, seed, x=(3,), y=(1,))


def model() -> Any:
    torch.manual_seed(0)
    return multi({"a": Scaled(), "b": Scaled()})


def data() -> Any:
    return together(
        a=Validated(samples(8, 1), [5, 3], validation=samples(3, 11)),
        b=Validated(samples(8, 2), [4, 4], validation=samples(4, 12)),
    )


@pytest.mark.parametrize("scale", [1, 2])
def test_buffers_written_by_training_and_by_validation(scale: int) -> None:
    """Two epochs with validation; one operator writes two modules' buffers, away from its readers."""
    groups = {"a/": (0, 1, 2), "b/": (2, 1), "a/scale": (scale,), "b/scale": (0,), "a/loss": (2,)}
    options = {"max_epochs": 2, "max_steps": -1}
    ours = forced_fit(model, data, 3, groups, **options)
    assert_same_fit(ours, plain_fit(model, data, **options))


class Rooted(LightningModule):
    """Of the third way in, with a buffer of its own that its step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 1), nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch: dict[str, Sample], batch_idx: int) -> torch.Tensor:
        x = self.one(batch["a"]["x"])
        self.mean.mul_(0.5).add_(x.detach().mean())
        first = F.mse_loss(x - self.mean, batch["a"]["y"])
        return first + F.mse_loss(self.two(batch["b"]["x"]), batch["b"]["y"])

    def train_dataloader(self) -> dict[str, DataLoader[Any]]:
        return {k: DataLoader(Samples(samples(8, s)), 4) for s, k in enumerate("ab")}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rooted() -> Rooted:
    torch.manual_seed(0)
    return Rooted()


def test_a_buffer_of_the_model_itself() -> None:
    options = {"max_steps": 3}
    ours = spindle_fit(rooted, lambda: None, 2, **options)
    assert_same_fit(ours, plain_fit(rooted, lambda: None, **options))
