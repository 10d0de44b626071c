"""PARITY where user code changes plain attributes that a step reads: a trace would keep the first values."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn import functional as F

from tests.strategy.ending import assert_all_ended, watch_fit
from tests.support.fitting import assert_same_fit, plain_fit, spindle_fit
from tests.support.small import Given, Layer, Sample, Small, forced_fit, multi, random_samples, together


class Annealed(Small):
    """A weight, a list of weights, and a flag that switches a part of the loss on."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head, self.second = Layer(3, 4), Layer(4, 1, last=True), Layer(4, 1, last=True)
        self.weight, self.weights, self.auxiliary = 1.0, {"main": 1.0}, False

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        x = self.encoder(batch["x"])
        loss = self.weight * self.weights["main"] * F.mse_loss(self.head(x), batch["y"])
        if self.auxiliary:
            loss = loss + self.second(x).square().mean()
            self.log("auxiliary", loss)
        self.log("loss", loss)
        return loss


class Anneals(Callback):
    def __init__(self, task: str | None) -> None:
        self.task = task

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        own = module if self.task is None else module.tasks[self.task]
        step = trainer.global_step
        own.weight = 1.0 if step < 2 else 0.25
        own.weights["main"] = 1.0 if step < 3 else 0.5
        own.auxiliary = step in (1, 4)


def data() -> Any:
    return together(**{t: Given(random_samples(20, k, x=(3,), y=(1,)), [4] * 5) for k, t in enumerate("ab")})


def model() -> Any:
    torch.manual_seed(0)
    return multi({name: Annealed() for name in "ab"}, "adamw")


@pytest.mark.parametrize("devices", [1, 2])
def test_attributes_that_a_callback_changes(devices: int) -> None:
    last = devices - 1
    groups = {"a/": (0,), "a/encoder": tuple(range(devices)), "b/": (last,)}
    ours = forced_fit(model, data, devices, groups, max_steps=5, callbacks=[Anneals("a")])
    reference = plain_fit(model, data, max_steps=5, callbacks=[Anneals("a")])
    assert_same_fit(ours, reference)
    rests = [step["gradients"]["tasks.a.second.linear.weight"] is None for step in reference.steps]
    assert rests == [True, False, True, True, False]


def test_attributes_of_a_module_of_its_own() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return Annealed()

    given = partial(Given, random_samples(20, 1, x=(3,), y=(1,)), [4] * 5)
    options = {"max_steps": 5, "callbacks": [Anneals(None)]}
    ours = spindle_fit(make, given, 2, strategy={"planner": "seq"}, **options)
    assert_same_fit(ours, plain_fit(make, given, **options))


class EachStep(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.tasks["a"].weight = 1.0 / (1 + trainer.global_step)


def test_attributes_that_change_in_every_step_are_refused_by_name() -> None:
    outcomes = watch_fit(
        1,
        lambda rank: model(),
        lambda rank: data(),
        options=lambda rank: {"max_steps": 20, "callbacks": [EachStep()]},
    )
    assert_all_ended(outcomes, r"more than 16 values: tasks\.a\.weight\.", "register_buffer")
