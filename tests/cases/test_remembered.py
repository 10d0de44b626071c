"""What a step remembers in the model, where it runs as one operator on one rank: hooks of every rank see it.

Lightning's own guide collects outputs in a list of the module's and reads it at the end of the epoch.
"""

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score, BinaryPrecision

from tests.support.branching import APART, EPOCHS, Branching, data, model
from tests.support.fitting import assert_same_fit, plain_fit
from tests.support.small import forced_fit

pytestmark = pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")


class Remembering(Branching):
    """In every way there is; its hooks log what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.count, self.total = 0, torch.zeros(())
        self.losses: list[torch.Tensor] = []
        self.outputs: dict[str, list[torch.Tensor]] = {"train": [], "validation": []}
        self.recent: deque[float] = deque(maxlen=3)
        self.sums: dict[str, torch.Tensor] = {}

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.last = loss  # not detached
        self.count += len(y)
        self.total += loss.detach()
        self.losses.append(loss.detach())
        self.outputs[when].append(y)
        self.recent.append(float(loss))
        if when in self.sums:
            self.sums[when] += y.sum().detach()
        else:
            self.sums[when] = y.sum().detach().clone()

    def seen(self) -> torch.Tensor:
        lists = [*self.losses, *self.outputs["train"], *self.outputs["validation"], *self.sums.values()]
        parts = [v.double().sum() for v in [self.last.detach(), self.total, *lists]]
        return torch.stack([*parts, torch.tensor(self.count + sum(self.recent)).double()]).square().sum()

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("seen", self.seen())

    def on_validation_epoch_end(self) -> None:
        outputs = torch.cat(self.outputs["validation"])
        self.log("seen_in_validation", self.seen() + outputs.std())
        self.outputs["validation"].clear()
        self.losses = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = self.count


@pytest.mark.parametrize(
    ("devices", "groups"),
    [(1, {"": (0,)}), (2, APART), (3, {"a/": (2,), "b/": (0, 1, 2)})],
    ids=["1", "2", "3"],
)
def test_what_a_step_remembers_is_seen_by_the_hooks_of_every_rank(
    devices: int, groups: dict[str, tuple[int, ...]]
) -> None:
    reference = plain_fit(lambda: model(Remembering), data, **EPOCHS)
    assert {"a/seen", "a/seen_in_validation"} <= reference.metrics.keys()
    ours = forced_fit(lambda: model(Remembering), data, devices, groups, **EPOCHS)
    assert_same_fit(ours, reference)


class Linked(Branching):
    """What it keeps is in several places; hooks change one and look at another."""

    def __init__(self) -> None:
        super().__init__()
        self.current: Any = torch.zeros(1)
        self.best: Any = None
        self.counts = {"n": 0}
        self.items = [self.counts]
        self.weights: list[torch.Tensor] = []
        self.array = np.zeros(2)
        self.idle = torch.nn.Dropout()
        self.outs: dict[str, list[float]] = {"train": [], "validation": []}

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        if self.best is None:
            self.best = self.current
        if not self.weights:
            self.weights = list(self.tower.parameters())
        self.counts["n"] += 1
        self.array += float(loss)
        self.idle.train(float(loss) > 1)
        self.open = self.outs[when]
        self.open.append(float(loss))
        self.first = self.second = [float(loss)]

    def on_train_batch_end(self, *args: Any) -> None:
        self.current += 1
        self.items[0]["n"] += 10
        self.first.append(1.0)
        self.outs["train"].append(2.0)
        seen = [float(self.best), self.counts["n"], *self.array, *self.second, *self.open, self.idle.training]
        self.log("linked", float(np.square(seen).sum()))
        self.log(
            "own", float(all(a is b for a, b in zip(self.weights, self.tower.parameters(), strict=True)))
        )
        if len(self.open) > 4:
            self.open.clear()


def test_what_is_kept_in_several_places_is_the_same_there() -> None:
    reference = plain_fit(lambda: model(Linked), data, **EPOCHS)
    assert reference.metrics["a/own"] == 1
    ours = forced_fit(lambda: model(Linked), data, 2, APART, **EPOCHS)
    assert_same_fit(ours, reference)


class Measuring(Branching):
    """Metrics with sums, with lists, and a collection whose members share their state."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.values = BinaryAccuracy(), CatMetric()
        self.unlogged = BinaryF1Score()
        self.several = MetricCollection([BinaryPrecision(), BinaryF1Score()], prefix="v/")

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        target = (y > y.mean()).long()
        self.unlogged.update(y.sigmoid(), target)
        if when == "train":
            self.accuracy(y.sigmoid(), target)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        else:
            self.values.update(loss)
            self.several.update(y.sigmoid(), target)
            self.log_dict(self.several)

    def on_validation_epoch_end(self) -> None:
        self.log("values", self.values.compute().std())
        self.log("unlogged", self.unlogged.compute())
        self.values.reset()


def test_metrics_that_a_step_updates_are_those_of_one_process() -> None:
    reference = plain_fit(lambda: model(Measuring), data, **EPOCHS)
    logged = {"a/accuracy_epoch", "a/values", "a/unlogged", "a/v/BinaryPrecision", "a/v/BinaryF1Score"}
    assert logged <= reference.metrics.keys()
    ours = forced_fit(lambda: model(Measuring), data, 2, APART, **EPOCHS)
    assert_same_fit(ours, reference)
