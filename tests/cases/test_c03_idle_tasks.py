"""C03: a task without a batch keeps its parameters, momentum and step counts, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn import functional as F

from lightning_spindle import MultiTaskDataModule
from tests.support.fitting import assert_same_fit, plain_fit
from tests.support.small import Given, Layer, Sample, Small, forced_fit, multi, random_samples

LIVE, ALL = 3, 6
"""Iterations in which both tasks have a batch, and all iterations."""


class Headed(Small):
    """A trunk that both tasks share, and a head of its own."""

    def __init__(self, trunk: Layer) -> None:
        super().__init__()
        self.trunk, self.head = trunk, Layer(4, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.head(self.trunk(batch["x"])), batch["y"])
        self.log("loss", loss)
        return loss


class IdleHeadRests(Callback):
    """From its last batch on nothing of B's head changes; A's goes on."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = trainer.optimizers[0].state
        now: dict[str, torch.Tensor] = {}
        for name, parameter in module.tasks["b"].head.named_parameters():
            if parameter.device.type != "meta":
                now[name] = parameter.detach().clone()
                now |= {f"{name} {key}": torch.as_tensor(v).clone() for key, v in state[parameter].items()}
                assert (parameter.grad is None) == (batch_idx >= LIVE)
        if batch_idx == LIVE - 1:
            self.kept = now
            assert not now or len(now) > 2, "the optimizer has a state"
        if batch_idx >= LIVE:
            assert now.keys() == self.kept.keys()
            assert all(torch.equal(now[name], self.kept[name]) for name in now), batch_idx


def model(optimizer: str) -> Any:
    torch.manual_seed(0)
    trunk = Layer(3, 4)
    return multi({name: Headed(trunk) for name in "ab"}, optimizer)


def data() -> Any:
    parts = {
        name: Given(random_samples(4 * count, seed, x=(3,), y=(1,)), [4] * count)
        for seed, (name, count) in enumerate({"a": ALL, "b": LIVE}.items())
    }
    return MultiTaskDataModule(parts, "max_size")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(
    "groups",
    [{"a/": (0, 1), "b/": (1, 0)}, {"a/": (0,), "b/": (1,), "a/trunk": (1, 0)}],
)
def test_c03_an_idle_task_keeps_parameters_momentum_and_steps(
    groups: dict[str, tuple[int, ...]], optimizer: str
) -> None:
    options: dict[str, Any] = {"max_epochs": 1, "max_steps": -1}
    ours = forced_fit(lambda: model(optimizer), data, 2, groups, callbacks=[IdleHeadRests()], **options)
    reference = plain_fit(lambda: model(optimizer), data, callbacks=[IdleHeadRests()], **options)
    assert len(reference.steps) == ALL
    assert_same_fit(ours, reference)
