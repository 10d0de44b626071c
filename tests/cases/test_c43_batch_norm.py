"""C43: BatchNorm on some of the ranks sees the whole batch; SyncBatchNorm is not needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_spindle import MultiTaskDataModule
from tests.strategy.ending import assert_refused, watch_fit
from tests.support.fitting import assert_same_fit, plain_fit
from tests.support.small import (
    Given,
    Layer,
    Sample,
    Small,
    forced_fit,
    multi,
    random_samples,
)


class Normed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.norm, self.head = Layer(3, 4), nn.BatchNorm1d(4), Layer(4, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.head(self.norm(self.tower(batch["x"]))), batch["y"])
        self.log("loss", loss)
        return loss


class Plain(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head = Layer(3, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.head(batch["x"]), batch["y"])


def model() -> Any:
    torch.manual_seed(0)
    return multi({"normed": Normed(), "plain": Plain()}, "adamw")


def data() -> Any:
    """Rows that do not divide; the second task goes on alone."""
    parts = {"normed": [3, 5, 2], "plain": [4, 1, 2, 3]}
    loaders = {
        name: Given(random_samples(sum(sizes), seed, x=(3,), y=(1,)), sizes)
        for seed, (name, sizes) in enumerate(parts.items())
    }
    return MultiTaskDataModule(loaders, "max_size")


@pytest.mark.parametrize("sync", [False, True])
def test_c43_statistics_are_those_of_the_whole_batch(sync: bool) -> None:
    """On two of three ranks, with an idle iteration; the Trainer's ``sync_batchnorm`` changes nothing."""
    groups = {"normed/": (0, 1), "normed/norm": (1,), "plain/": (2,)}
    options: dict[str, Any] = {"max_epochs": 2, "max_steps": -1}
    ours = forced_fit(model, data, 3, groups, sync_batchnorm=sync, **options)
    assert_same_fit(ours, plain_fit(model, data, **options))
    assert all(int(fit.buffers["tasks.normed.norm.num_batches_tracked"]) == 6 for fit in ours)


def test_c43_converted_modules_are_refused() -> None:
    """They would wait for ranks that do not run them."""
    outcomes = watch_fit(
        2,
        lambda rank: nn.SyncBatchNorm.convert_sync_batchnorm(model()),
        lambda rank: data(),
    )
    assert_refused(
        outcomes, "ValueError", "sync_batchnorm is not supported", "BatchNorm already sees the whole"
    )
