"""What a step remembers in the model, where it runs as one operator on one rank: hooks of every rank see it.

Lightning's own guide collects outputs in a list of the module's and reads it at the end of the epoch.
"""

import csv
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.nn import functional as F
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score, BinaryPrecision

from tests.strategy.ending import assert_all_ended, watch_fit
from tests.support.fitting import assert_same_fit, plain_fit
from tests.support.small import (
    Layer,
    Part,
    Sample,
    Small,
    Validated,
    forced_fit,
    metagraph,
    multi,
    placement,
    random_samples,
    together,
)

pytestmark = pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")
EPOCHS = {"max_epochs": 2, "max_steps": -1}


def samples(count: int, seed: int) -> list[Sample]:
    return random_samples(count, seed, x=(3,), y=(1,))


def data() -> Any:
    return together(
        a=Validated(samples(13, 1), [5, 3, 4, 1], validation=samples(5, 3)),
        b=Validated(samples(12, 2), [4, 4, 4], validation=samples(4, 4)),
    )


class Plain(Small):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Layer(3, 1)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.tower(batch["x"]), batch["y"])


class Branching(Plain):
    """Cannot be taken apart: a branch on numbers."""

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
        self.remember("validation", y, F.mse_loss(y, batch["y"]))

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        raise NotImplementedError


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


def model(kind: type[Small]) -> Any:
    torch.manual_seed(0)
    return multi({"a": kind(), "b": Plain()})


@pytest.mark.parametrize(
    ("devices", "groups"),
    [(1, {"": (0,)}), (2, {"a/": (1,), "b/": (0, 1)}), (3, {"a/": (2,), "b/": (0, 1, 2)})],
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
    ours = forced_fit(lambda: model(Linked), data, 2, {"a/": (1,), "b/": (0, 1)}, **EPOCHS)
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
    ours = forced_fit(lambda: model(Measuring), data, 2, {"a/": (1,), "b/": (0, 1)}, **EPOCHS)
    assert_same_fit(ours, reference)


class Sealed(Branching):
    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.kept = {"text": lambda: "cannot be sent"}


class Unlike(Branching):
    """Its hook does not do the same on every rank."""

    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach())

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == self.rank:
            self.losses.clear()


class UnlikeToo(Unlike):
    rank = 1


class Loose(Branching):
    """Logs a metric that the model does not have."""

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        metric = CatMetric()
        metric.update(loss)
        self.log("loose", metric)


class Late(Branching):
    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.act = torch.nn.Tanh()


class Hidden(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.average = {"loss": torch.zeros(())}

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.average["loss"].data.mul_(0.9).add_(loss)


class HiddenInFits(Hidden):
    """Capture cannot run it."""

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        if self.trainer.global_step >= 0:
            super().remember(when, y, loss)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Sealed, r"task a: its step keeps in tasks\.a\.kept what cannot be sent"),
        (Unlike, r"tasks\.a\.losses was not the same on all ranks"),
        (UnlikeToo, r"tasks\.a\.losses was not the same on all ranks"),
        (Late, r"adds, replaces or removes tasks\.a\.act"),
        (Hidden, r"writes to tasks\.a\.average through \.data"),
        (HiddenInFits, r"writes to tasks\.a\.average through \.data"),
        (Loose, r"logs under 'loose' a torchmetrics object that is no attribute of the model"),
    ],
    ids=["Sealed", "Unlike", "UnlikeToo", "Late", "Hidden", "HiddenInFits", "Loose"],
)
def test_what_other_ranks_cannot_have_is_refused(kind: type[Small], message: str) -> None:
    outcomes = watch_fit(2, lambda rank: model(kind), lambda rank: data())
    assert_all_ended(outcomes, message)


class Counting(Layer):
    """Counts its calls; has a cache that is made once."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.calls, self.cache = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.ones(1)
        return super().forward(x) * self.cache


class Sharing(Branching):
    def __init__(self, shared: Counting, counts: bool) -> None:
        super().__init__()
        self.tower, self.counts = shared, counts

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.tower.calls += self.counts


def sharing(counts: bool) -> Any:
    torch.manual_seed(0)
    shared = Counting()
    return multi({"a": Sharing(shared, counts), "b": Sharing(shared, False)})


def test_changes_in_a_module_of_two_tasks_are_refused() -> None:
    outcomes = watch_fit(2, lambda rank: sharing(True), lambda rank: data())
    assert_all_ended(
        outcomes, r"task 'a': training_step changes tasks\.a\.tower\.calls, which another task has"
    )


class Pooling(Branching):
    """Counts in an object that another task has too."""

    def __init__(self, pool: dict[str, Any]) -> None:
        super().__init__()
        self.pool = {"inner": pool}

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.pool["inner"]["sum"] += loss.detach()


def test_changes_in_what_two_tasks_hold_are_refused() -> None:
    def pooling() -> Any:
        torch.manual_seed(0)
        pool = {"sum": torch.zeros(())}
        return multi({"a": Pooling(pool), "b": Pooling(pool)})

    outcomes = watch_fit(2, lambda rank: pooling(), lambda rank: data())
    assert_all_ended(outcomes, r"task 'a': training_step changes tasks\.a\.pool, which another task has")


class Setting(Branching):
    """The first one sets what both read."""

    def __init__(self, shared: Counting) -> None:
        super().__init__()
        self.shared = shared

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        if self.shared.cache is None:
            self.shared.cache = loss.detach()


def test_what_two_tasks_set_differently_is_refused() -> None:
    def setting() -> Any:
        torch.manual_seed(0)
        shared = Counting()
        return multi({"a": Setting(shared), "b": Setting(shared)})

    plan = placement(metagraph(setting(), data()), 2, {"a/": (1,), "b/": (0,)})
    strategy = {"plan": plan, "operators": (Part,)}
    outcomes = watch_fit(2, lambda rank: setting(), lambda rank: data(), lambda rank: strategy)
    assert_all_ended(
        outcomes, r"tasks\.a\.shared\.cache was None, and two steps .* to other values: a/step, b/step"
    )


def test_a_cache_in_a_module_of_two_tasks_is_filled() -> None:
    reference = plain_fit(lambda: sharing(False), data, **EPOCHS)
    ours = forced_fit(lambda: sharing(False), data, 2, {"a/": (1,), "b/": (0,)}, **EPOCHS)
    assert_same_fit(ours, reference)


class Writing(Branching):
    """Writes to loggers itself, as one does who asks whether it is rank 0 that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = {"steps": 0.0}

    def setup(self, stage: str) -> None:
        self.kept, self.written = self.logger, self.logger.experiment

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        assert isinstance(self.logger, CSVLogger)
        assert self.logger.version == "one"
        assert str(self.trainer.log_dir).endswith("one")
        self.kept.log_metrics({f"{when}/kept": loss}, step=self.global_step)
        self.written.log_metrics({f"{when}/written": float(loss)}, step=self.global_step)
        self.logger.log_metrics(self.steps, step=self.global_step)
        self.steps["steps"] += 1
        self.logger.log_metrics({f"{when}/direct": loss}, step=self.global_step)
        if self.trainer.is_global_zero and self.global_rank == 0:
            for logger in self.trainer.loggers:
                logger.experiment.log_metrics({f"{when}/rows": float(len(y))}, step=self.global_step)
        self.write_on_rank_zero(when, float(y.sum()))

    @rank_zero_only
    def write_on_rank_zero(self, when: str, value: float) -> None:
        self.loggers[0].log_metrics({f"{when}/sum": value}, step=self.global_step)

    def on_train_batch_end(self, *args: Any) -> None:
        self.logger.log_metrics({"hook": 1.0}, step=self.global_step)


def test_what_a_step_writes_to_loggers_is_written_by_rank_0(tmp_path: Path) -> None:
    """Not by the estimate, which runs steps too, nor by other ranks, nor twice."""

    def written(fit: Callable[..., Any], folder: Path) -> list[dict[str, Any]]:
        fit(logger=CSVLogger(folder, name=None, version="one"), log_every_n_steps=1, **EPOCHS)
        with (folder / "one" / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        return [{k: round(float(v), 7) for k, v in sorted(row.items()) if v} for row in rows]

    expected = written(partial(plain_fit, lambda: model(Writing), data), tmp_path / "plain")
    keys = {key for row in expected for key in row}
    assert {
        "train/direct",
        "train/rows",
        "validation/sum",
        "hook",
        "train/kept",
        "train/written",
        "steps",
    } <= keys
    for devices, groups in ((1, {"": (0,)}), (2, {"a/": (1,), "b/": (0, 1)})):
        ours = partial(forced_fit, lambda: model(Writing), data, devices, groups)
        assert written(ours, tmp_path / str(devices)) == expected


class Keeping(Branching):
    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.writer = self.logger.experiment


class Unwritable(Branching):
    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.logger.experiment.log_metrics({"text": lambda: "cannot be sent"})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Unwritable, r"task a: its step gives to logger\.experiment\.log_metrics what cannot be sent"),
        (Keeping, r"task a: its step keeps in tasks\.a\.writer what cannot be sent .*\(it is a logger\)"),
    ],
    ids=["Unwritable", "Keeping"],
)
def test_what_cannot_be_sent_to_a_logger_is_refused(kind: type[Small], message: str, tmp_path: Path) -> None:
    plan = placement(metagraph(model(kind), data()), 2, {"a/": (1,), "b/": (0,)})
    outcomes = watch_fit(
        2,
        lambda rank: model(kind),
        lambda rank: data(),
        lambda rank: {"plan": plan, "operators": (Part,)},
        lambda rank: {"logger": CSVLogger(tmp_path)},
    )
    assert_all_ended(outcomes, message)
