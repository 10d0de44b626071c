"""C04 and C05: every task's logs and hooks are one process's, on every rank, wherever the task runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import functional as F

from lightning_spindle import MultiTaskModule, SpindleStrategy
from tests import test_module as plain
from tests.support.fitting import assert_same_fit, captured, plain_fit, spindle_fit
from tests.support.ranks import run_ranks
from tests.support.small import (
    Given,
    Layer,
    Sample,
    Small,
    Validated,
    forced_fit,
    multi,
    random_samples,
    together,
)


class Logging(Small):
    """Logs a constant, its loss and a value of its own key, at the step and over the epoch."""

    def __init__(self, constant: float, key: str, reverse: bool = False) -> None:
        super().__init__()
        self.layer, self.constant, self.key, self.reverse = Layer(3, 1, last=True), constant, key, reverse

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        prediction = self.layer(batch["x"])
        loss = F.mse_loss(prediction, batch["y"])
        values = {"value": loss * 0 + self.constant, "loss": loss, self.key: prediction.abs().sum()}
        for key in reversed(values) if self.reverse else values:
            self.log(key, values[key], on_step=True, on_epoch=True, sync_dist=True)
        return loss


class Sometimes(Logging):
    """Logs one key in every third step only, and needs the trainer's state: it cannot be taken apart."""

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 3 == 0:
            self.log("third", loss * 3, on_step=True, on_epoch=True)
        if self.trainer.global_step > 1:
            self.log("late", float(batch_idx))
        return loss


def data() -> Any:
    """Batches of 3 and 2 rows, the last ones of 1 and 4."""
    a, b = random_samples(13, 1, x=(3,), y=(1,)), random_samples(12, 2, x=(3,), y=(1,))
    return together(a=Given(a, [3, 3, 3, 3, 1]), b=Given(b, [2, 2, 2, 2, 4]))


def two_tasks(reverse: bool) -> Any:
    torch.manual_seed(0)
    tasks = {"a": Logging(1.0, "of_a", reverse), "b": Logging(2.0, "of_b")}
    return multi(dict(reversed(tasks.items())) if reverse else tasks)


def some_steps(both: bool) -> Any:
    torch.manual_seed(0)
    return multi({"a": Sometimes(1.0, "of_a"), "b": (Sometimes if both else Logging)(2.0, "of_b")})


GROUPS = [{"a/": (0,), "b/": (1,)}, {"a/": (1,), "b/": (0,)}, {"a/": (0, 1), "b/": (1, 0)}]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("reverse", [False, True])
def test_c04_each_rank_knows_each_tasks_values(reverse: bool, groups: dict[str, tuple[int, ...]]) -> None:
    """Different keys on ranks, in either order: A is 1 and B is 2 on both, in steps and over the epoch."""
    options = {"max_epochs": 2, "max_steps": -1}
    ours = forced_fit(lambda: two_tasks(reverse), data, 2, groups, **options)
    for fit in ours:
        for key in ("value", "value_step", "value_epoch"):
            assert (fit.metrics[f"a/{key}"], fit.metrics[f"b/{key}"]) == (1.0, 2.0)
        assert {"a/of_a_epoch", "b/of_b_epoch"} <= fit.metrics.keys()
    assert_same_fit(ours, plain_fit(lambda: two_tasks(reverse), data, **options))


@pytest.mark.filterwarnings("ignore:.*cannot be taken apart")
@pytest.mark.parametrize(("both", "devices"), [(False, 2), (True, 3)])
def test_c04_a_key_logged_in_every_third_step(both: bool, devices: int) -> None:
    """The step depends on batch_idx and on the trainer: it runs whole on one rank, its logs reach all."""
    options = {"max_epochs": 2, "max_steps": -1}
    groups = {"a/": (0,), "b/": (1,)} if not both else {"a/": (2,), "b/": (0,)}
    ours = forced_fit(lambda: some_steps(both), data, devices, groups, **options)
    reference = plain_fit(lambda: some_steps(both), data, **options)
    assert "a/third_step" in reference.steps[0]["logged"]
    assert "a/late" not in reference.steps[0]["logged"]
    assert "a/late" in reference.metrics
    assert_same_fit(ours, reference)


class Seen(plain.Recording):
    """Records hooks; steps themselves run only where the plan says, and not as user code each time."""

    training_step = plain.Linear.training_step

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.shared(batch[0]).mean())
        self.log("rows", batch[0].sum() * 0 + len(batch[0]))

    def test_step(self, batch: Any) -> None:
        self.log("test", self.shared(batch[0]).mean())


def only_in_the_run(hook: Any) -> Any:
    """Leaves out the transfers of the example batch, before the run's own."""

    def heard(self: Seen, *args: Any) -> Any:
        known = len(self.trace)
        result = hook(self, *args)
        if getattr(self.trainer.strategy, "_session", True) is None:
            del self.trace[known:]
        return result

    return heard


for _hook in ("on_train_batch_end", "on_validation_batch_end"):
    setattr(Seen, _hook, plain.recording(_hook, 1))
for _hook in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
    setattr(Seen, _hook, only_in_the_run(getattr(Seen, _hook)))


@pytest.mark.parametrize("size", [1, 2])
def test_c05_hooks_and_logs_under_spindle(size: int) -> None:
    """On every rank each task hears, and logs, what a task fitted alone by a plain Trainer does."""

    def alone(rank: int, world: int) -> Any:
        torch.manual_seed(0)
        task = Seen()
        metrics = plain.fit_and_test(task, lambda mode: plain.loader(10, 4), devices=1)
        return task.trace, metrics

    def tasks(rank: int, world: int) -> Any:
        torch.manual_seed(0)
        both = {"a": Seen(), "b": Seen()}
        metrics = plain.fit_and_test(
            MultiTaskModule(both),
            lambda mode: CombinedLoader({"a": plain.loader(10, 4), "b": plain.loader(9, 3)}, mode),
            strategy=SpindleStrategy(profile_budget_s=0.5, timeline=False),
            devices=world,
        )
        return {name: task.trace for name, task in both.items()}, metrics

    trace, metrics = run_ranks(alone, 1, init_group=False)[0]
    for rank, (traces, logged) in enumerate(run_ranks(tasks, size, init_group=size > 1)):
        expected = [entry for entry in trace if rank == 0 or entry[0] != "prepare_data"]
        assert traces["a"] == expected
        assert [entry[0] for entry in traces["b"]] == [entry[0] for entry in expected]
        ours = {key.removeprefix("a/"): value for key, value in logged.items() if key.startswith("a/")}
        assert ours == pytest.approx(metrics, rel=1e-5)


class Weighing(Small):
    """Says how much a batch weighs in the epoch's mean, as ``weigh`` has it of ``x`` and ``batch_idx``."""

    def __init__(self, weigh: Callable[[torch.Tensor, int], Any]) -> None:
        super().__init__()
        self.layer, self.weigh = Layer(3, 1, last=True), weigh

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.layer(batch["x"]), batch["y"])
        self.log("loss", loss, on_epoch=True, batch_size=self.weigh(batch["x"], batch_idx))
        return loss

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        loss = F.mse_loss(self.layer(batch["x"]), batch["y"])
        self.log("val_loss", loss, batch_size=self.weigh(batch["x"], batch_idx))


WEIGHTS = {
    "constant": lambda x, batch_idx: 1,
    "rows": lambda x, batch_idx: x.shape[0],
    "width": lambda x, batch_idx: x.shape[1],
    "index": lambda x, batch_idx: batch_idx % 2,
}


def weighing(weight: str) -> Any:
    torch.manual_seed(0)
    return multi({"a": Weighing(WEIGHTS[weight]), "b": Weighing(WEIGHTS["rows"])})


def validated() -> Any:
    """Training batches of 3 and 1 rows, validation batches of 2 and 1."""
    samples = random_samples(13, 1, x=(3,), y=(1,))
    return together(**{n: Validated(samples, [3, 3, 3, 3, 1], None, samples[:5]) for n in "ab"})


@pytest.mark.filterwarnings("ignore:.*cannot be taken apart")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_c04_batches_weigh_what_the_task_says(weight: str, devices: int) -> None:
    """A constant, rows, a size that is no number of rows, now and then nothing; in steps of both kinds."""
    assert bool(captured(weighing(weight), validated()).coarse) == (weight in ("width", "index"))
    groups = {"a/": (devices - 1,), "b/": (0,)}
    ours = forced_fit(lambda: weighing(weight), validated, devices, groups, max_epochs=1, max_steps=-1)
    reference = plain_fit(lambda: weighing(weight), validated, max_epochs=1, max_steps=-1)
    assert {"a/loss_epoch", "a/val_loss"} <= reference.metrics.keys()
    assert_same_fit(ours, reference)


@pytest.mark.filterwarnings("ignore:.*cannot be taken apart")
@pytest.mark.parametrize("weight", ["constant", "index"])
def test_c04_batches_of_a_module_of_its_own_weigh_what_it_says(weight: str) -> None:
    """A batch that weighs nothing does not weigh its rows."""

    def model() -> Any:
        torch.manual_seed(0)
        return Weighing(WEIGHTS[weight])

    def one() -> Any:
        return validated().datamodules["a"]

    options = {"max_epochs": 1, "max_steps": -1}
    assert_same_fit(spindle_fit(model, one, 2, **options), plain_fit(model, one, **options))
