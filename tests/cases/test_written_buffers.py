"""Buffers that a step writes on one rank are the same everywhere where others read or save them."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_spindle import inspect
from tests.strategy.ending import assert_all_ended, watch_fit
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
    pairs,
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


def model() -> Any:
    torch.manual_seed(0)
    return multi({"a": Scaled(), "b": Scaled()})


def data() -> Any:
    return together(
        a=Validated(pairs(8, 1), [5, 3], validation=pairs(3, 11)),
        b=Validated(pairs(8, 2), [4, 4], validation=pairs(4, 12)),
    )


@pytest.mark.parametrize("scale", [1, 2])
def test_buffers_written_by_training_and_by_validation(scale: int) -> None:
    """Two epochs with validation; one operator writes two modules' buffers, away from its readers."""
    groups = {"a/": (0, 1, 2), "b/": (2, 1), "a/scale": (scale,), "b/scale": (0,), "a/loss": (2,)}
    options = {"max_epochs": 2, "max_steps": -1}
    ours = forced_fit(model, data, 3, groups, **options)
    assert_same_fit(ours, plain_fit(model, data, **options))


class Assigned(Small):
    """Buffers of the task's own that its step assigns, writes by index, and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Layer(3, 4), Layer(4, 1, last=True)
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("queue", torch.zeros(8, 4))
        self.register_buffer("last", torch.zeros(2, 4))

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        z = self.tower(batch["x"])
        loss = F.mse_loss(self.head(z - self.center - self.queue.mean(0) - self.last[1]), batch["y"])
        with torch.no_grad():
            self.write(z)
        return loss

    def write(self, z: torch.Tensor) -> None:
        raise NotImplementedError


class Bound(Assigned):
    def write(self, z: torch.Tensor) -> None:
        self.center = 0.9 * self.center + 0.1 * z.mean(0)


class Indexed(Assigned):
    def write(self, z: torch.Tensor) -> None:
        self.queue[: len(z)] = z


class Viewed(Assigned):
    def write(self, z: torch.Tensor) -> None:
        self.last[1].copy_(z.mean(0))


@pytest.mark.parametrize("kind", [Bound, Indexed, Viewed])
def test_buffers_assigned_by_a_step_are_written(kind: type[Assigned]) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        return multi({"a": kind(), "b": Scaled()})

    ours = forced_fit(model, data, 2, {"a/": (1,), "b/": (0, 1)}, max_epochs=2, max_steps=-1)
    assert_same_fit(ours, plain_fit(model, data, max_epochs=2, max_steps=-1))


class Momentum(Small):
    """A teacher that follows the tower, inside of the step."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.tower, self.teacher = Layer(3, 1), Layer(3, 1)
        self.teacher.requires_grad_(False)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            for own, followed in zip(self.teacher.parameters(), self.tower.parameters(), strict=True):
                if self.way == "bound":
                    own.data = 0.9 * own.data + 0.1 * followed.data
                elif self.way == "data":
                    own.data.mul_(0.9).add_(followed.data, alpha=0.1)
                else:
                    own.mul_(0.9).add_(followed, alpha=0.1)
        return F.mse_loss(self.tower(batch["x"]), self.teacher(batch["x"]))


@pytest.mark.parametrize("way", ["bound", "data", "plain"])
def test_parameters_changed_by_a_step_are_refused_and_left_as_they_were(way: str) -> None:
    momentum = Momentum(way)
    before = {name: p.detach().clone() for name, p in momentum.named_parameters()}
    with pytest.raises(ValueError, match=r"task 'a'.*changes parameters itself \(tasks.a.teacher.*hook"):
        inspect(multi({"a": momentum}), together(a=Validated(pairs(8, 1), [5, 3])))
    for name, parameter in momentum.named_parameters():
        assert torch.equal(parameter, before[name]), name


class Asking(Small):
    """Asks the trainer, so that capture cannot run the step: only real iterations show what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.teacher = Layer(3, 1), Layer(3, 1)
        self.teacher.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.tower(batch["x"]) - self.teacher(batch["x"]) - self.seen, batch["y"])
        if self.trainer.global_step >= 0:
            self.effect(loss.detach())
        return loss

    def effect(self, loss: torch.Tensor) -> None:
        raise NotImplementedError


class Counting(Asking):
    """Assigns a buffer, in the second epoch."""

    def effect(self, loss: torch.Tensor) -> None:
        if self.current_epoch == 1:
            self.seen = 0.5 * self.seen + loss


class Following(Asking):
    def effect(self, loss: torch.Tensor) -> None:
        self.teacher.linear.weight.data.mul_(0.9)


class Replacing(Asking):
    def effect(self, loss: torch.Tensor) -> None:
        if self.current_epoch == 1:
            self.teacher.linear.weight.data = 0.9 * self.teacher.linear.weight.data


@pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Following, r"task 'a'.*changes parameters itself \(tasks.a.teacher.linear.weight\).*hook"),
        (Replacing, r"task 'a'.*changes parameters itself \(tasks.a.teacher.linear.weight\).*hook"),
    ],
    ids=["Following", "Replacing"],
)
def test_what_only_a_real_iteration_shows_is_refused(kind: type[Asking], message: str) -> None:
    outcomes = watch_fit(
        2,
        lambda rank: multi({"a": kind(), "b": Scaled()}),
        lambda rank: data(),
        options=lambda rank: {"max_epochs": 2, "max_steps": -1},
    )
    assert_all_ended(outcomes, message)


@pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")
def test_buffers_that_only_a_real_iteration_shows_are_shared() -> None:
    def model() -> Any:
        torch.manual_seed(0)
        return multi({"a": Counting(), "b": Scaled()})

    options = {"max_epochs": 2, "max_steps": -1}
    ours = forced_fit(model, data, 2, {"a/": (1,), "b/": (0, 1)}, **options)
    assert_same_fit(ours, plain_fit(model, data, **options))


class Floating(Small):
    def training_step(self, batch: Sample, batch_idx: int) -> float:
        return 0.5


def test_a_loss_that_is_a_number_is_refused_as_in_one_process() -> None:
    with pytest.raises(ValueError, match=r"task 'a': training_step returns a loss tensor.*got float"):
        inspect(multi({"a": Floating()}), together(a=Validated(pairs(8, 1), [5, 3])))


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
        return {k: DataLoader(Samples(pairs(8, s)), 4) for s, k in enumerate("ab")}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rooted() -> Rooted:
    torch.manual_seed(0)
    return Rooted()


def test_a_buffer_of_the_model_itself() -> None:
    options = {"max_steps": 3}
    ours = spindle_fit(rooted, lambda: None, 2, **options)
    assert_same_fit(ours, plain_fit(rooted, lambda: None, **options))
