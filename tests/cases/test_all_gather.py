"""``self.all_gather`` in a user's own code: what one process is given, which has everything already.

A step's rows are those of the whole batch, wherever it runs; outside of steps every rank has the same values.
"""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.fitting import assert_same_fit, plain_fit, spindle_fit
from tests.support.ranks import watch_ranks
from tests.support.small import Given, Layer, Sample, Small, forced_fit, multi, random_samples, together


class Gathering(Small):
    """A contrastive loss over what all processes have, as written for data parallelism."""

    def __init__(self, sync_grads: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.sync_grads = Layer(3, 4), Layer(2, 4), sync_grads

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        a, b = F.normalize(self.a(batch["x"]), dim=-1), F.normalize(self.b(batch["y"]), dim=-1)
        a, b = self.all_gather((a, b), sync_grads=self.sync_grads)
        loss = F.cross_entropy(a @ b.t() / 0.1, torch.arange(len(a)))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Untraceable(Gathering):
    """Which cannot be traced: it decides by values."""

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        if float(batch["x"].sum()) > 1e9:
            return batch["x"].sum()
        return super().training_step(batch, batch_idx)


class AfterEpoch(Gathering):
    """Gathers its epoch's loss, which every rank has."""

    def on_train_epoch_end(self) -> None:
        mean = self.all_gather(self.trainer.callback_metrics["pairs/loss_epoch"]).mean()
        self.log("gathered", mean)


class OfThisRank(Gathering):
    """Gathers what differs from rank to rank."""

    def on_train_epoch_end(self) -> None:
        self.all_gather(torch.tensor(float(self.trainer.global_rank)))


def model(task: type[Gathering], **options: Any) -> Any:
    torch.manual_seed(0)
    return multi({"pairs": task(**options)})


def data() -> Any:
    return together(pairs=Given(random_samples(10, 1, x=(3,), y=(2,)), [5, 3, 2]))


@pytest.mark.parametrize("task", [Gathering, AfterEpoch])
@pytest.mark.parametrize("devices", [1, 3])
def test_a_traced_step(task: type[Gathering], devices: int) -> None:
    """The encoders stay split; gradients are those of one process, whatever ``sync_grads`` says."""
    ours = forced_fit(lambda: model(task, sync_grads=False), data, devices, {"pairs/": tuple(range(devices))})
    assert_same_fit(ours, plain_fit(lambda: model(task), data))


def test_a_step_as_one_operator() -> None:
    """It runs on one rank alone: nothing may wait for the others there."""
    ours = spindle_fit(lambda: model(Untraceable), data, 2)
    assert_same_fit(ours, plain_fit(lambda: model(Untraceable), data))


def test_what_ranks_do_not_share_is_refused() -> None:
    """On every rank, in time: one process has no such values."""

    def rank(index: int, size: int) -> None:
        from lightning_spindle.strategy import SpindleStrategy
        from tests.support.fitting import fit_once

        fit_once(
            lambda: model(OfThisRank), data, SpindleStrategy(profile_budget_s=0.5), devices=size, max_epochs=1
        )

    for outcome in watch_ranks(rank, 2):
        assert not outcome.hung
        assert "self.all_gather" in str(outcome.error), outcome
