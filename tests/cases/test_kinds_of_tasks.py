"""PARITY of fits with special tasks: BatchNorm, a frozen encoder, no validation, no batch in some steps."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_spindle import MultiTaskDataModule
from tests.support.fitting import assert_same_fit, plain_fit
from tests.support.small import (
    Given,
    Layer,
    Sample,
    Small,
    Validated,
    forced_fit,
    multi,
    pairs,
    together,
)


class Plain(Small):
    """A tower and a head; no validation."""

    def __init__(self, tower: nn.Module | None = None) -> None:
        super().__init__()
        self.tower, self.head = tower or Layer(3, 4), Layer(4, 1, last=True)

    def predict(self, batch: Sample) -> torch.Tensor:
        return self.head(self.tower(batch["x"]))

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.predict(batch), batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Normed(Plain):
    """BatchNorm between tower and head: it couples rows and writes buffers that validation reads."""

    def __init__(self, tower: nn.Module | None = None, norm: nn.BatchNorm1d | None = None) -> None:
        super().__init__(tower)
        self.norm = norm or nn.BatchNorm1d(4)

    def predict(self, batch: Sample) -> torch.Tensor:
        return self.head(self.norm(self.tower(batch["x"])))

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.predict(batch), batch["y"]))


def normed_model(optimizer: str, shared: bool) -> Any:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4) if shared else None
    return multi({"a": Normed(norm=norm), "b": Normed(norm=norm), "c": Plain()}, optimizer)


def normed_data() -> Any:
    return together(
        a=Validated(pairs(14, 1), [6, 5, 3], validation=pairs(3, 11)),
        b=Validated(pairs(9, 2), [4, 3, 2], validation=pairs(4, 12)),
        c=Given(pairs(9, 3), [4, 4, 1]),
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("shared", [False, True])
def test_batch_norm_runs_whole_and_its_buffers_reach_validation(shared: bool, optimizer: str) -> None:
    """Two epochs with validation, which runs where BatchNorm did not; also one BatchNorm in two tasks."""
    groups = {"a/": (0, 1, 2), "b/": (2, 1), "c/": (0,), "a/norm": (1,), "b/norm": (1 if shared else 0,)}
    options = {"max_epochs": 2, "max_steps": -1}
    ours = forced_fit(lambda: normed_model(optimizer, shared), normed_data, 3, groups, **options)
    reference = plain_fit(lambda: normed_model(optimizer, shared), normed_data, **options)
    assert {"a/val_loss", "b/val_loss"} <= reference.metrics.keys()
    assert "c/val_loss" not in reference.metrics
    assert_same_fit(ours, reference)


def frozen_model(optimizer: str) -> Any:
    torch.manual_seed(0)
    tower = Layer(3, 4).requires_grad_(False)
    return multi({"a": Plain(tower), "b": Plain(tower), "c": Plain()}, optimizer)


def frozen_data() -> Any:
    return together(**{t: Given(pairs(12, k), [4, 5, 3]) for k, t in enumerate("abc")})


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_frozen_encoder_stays_and_passes_values_on(optimizer: str) -> None:
    """Shared by two tasks and on other ranks than their heads: no gradient goes back, its weights stay."""
    groups = {"a/": (1,), "a/tower": (0,), "b/": (2, 0), "b/tower": (1, 2), "c/": (0, 1, 2)}
    ours = forced_fit(lambda: frozen_model(optimizer), frozen_data, 3, groups, max_steps=3)
    reference = plain_fit(lambda: frozen_model(optimizer), frozen_data, max_steps=3)
    assert_same_fit(ours, reference)
    name = "tasks.a.tower.linear.weight"
    assert torch.equal(ours[0].parameters[name], frozen_model(optimizer).state_dict()[name].double())


def uneven_data() -> Any:
    """C24's shape: 5, 3 and 2 batches; a task without a batch is idle."""
    sizes = {"a": [3] * 5, "b": [4, 2, 1], "c": [2, 3]}
    parts = {t: Given(pairs(sum(s), k), s) for k, (t, s) in enumerate(sizes.items())}
    return MultiTaskDataModule(parts, "max_size")


def uneven_model(optimizer: str) -> Any:
    torch.manual_seed(0)
    tower = Layer(3, 4)
    return multi({"a": Plain(tower), "b": Plain(tower), "c": Plain()}, optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("devices", "groups"),
    [(3, {"a/": (0, 1), "b/": (1, 2), "c/": (2,)}), (2, {"a/": (0,), "b/": (1,), "c/": (1, 0)})],
)
def test_tasks_without_a_batch_are_idle(
    devices: int, groups: dict[str, tuple[int, ...]], optimizer: str
) -> None:
    """mode="max_size": None for loaders that ended; idle parameters keep gradient None and do not move."""
    options = {"max_epochs": 2, "max_steps": -1}
    ours = forced_fit(lambda: uneven_model(optimizer), uneven_data, devices, groups, **options)
    reference = plain_fit(lambda: uneven_model(optimizer), uneven_data, **options)
    assert_same_fit(ours, reference)
    name = "tasks.c.head.linear.weight"
    last = ours[groups["c/"][0]].steps[4]
    assert last["gradients"][name] is None
    assert torch.equal(last["parameters"][name], ours[groups["c/"][0]].steps[1]["parameters"][name])
