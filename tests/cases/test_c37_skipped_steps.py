"""C37: training_step gives None, or a loss without a graph: skipped as one process skips it, on all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.nn import functional as F

from lightning_spindle.strategy import SpindleStrategy
from tests.strategy.ending import assert_all_ended, watch_fit
from tests.support.fitting import assert_same_fit, fit_once, plain_fit, spindle_fit, without_gradients
from tests.support.ranks import run_ranks
from tests.support.small import Given, Layer, Sample, Small, forced_fit, multi, random_samples, together

pytestmark = pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")
STEPS = 5


class Headed(Small):
    """A trunk that all tasks share, and a head."""

    def __init__(self, trunk: Layer) -> None:
        super().__init__()
        self.trunk, self.head = trunk, Layer(4, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor | None:
        loss = F.mse_loss(self.head(self.trunk(batch["x"])), batch["y"])
        self.log("loss", loss)
        return loss


class Careful(Headed):
    """Leaves out what is not a number, and has no loss where there is no label; it looks at values."""

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor | None:
        labelled = batch["y"] != UNLABELLED
        if not bool(labelled.any()):
            return torch.tensor(0.0, requires_grad=True)
        loss = F.mse_loss(self.head(self.trunk(batch["x"])), batch["y"])
        if bool(torch.isnan(loss)):
            return None
        self.log("loss", loss)
        return loss


def model(careful: str, optimizer: str) -> Any:
    torch.manual_seed(0)
    trunk = Layer(3, 4)
    kinds = {name: Careful if name in careful else Headed for name in "abc"}
    return multi({name: kind(trunk) for name, kind in kinds.items()}, optimizer)


def spoilt(seed: int, batches: dict[int, float]) -> Given:
    """Batches of two rows, of which some have labels of one value."""
    samples = random_samples(2 * STEPS, seed, x=(3,), y=(1,))
    for at, label in batches.items():
        for sample in samples[2 * at : 2 * at + 2]:
            sample["y"].fill_(label)
    return Given(samples, [2] * STEPS)


def data(spoil: dict[str, dict[int, float]]) -> Any:
    return together(**{name: spoilt(seed, spoil.get(name, {})) for seed, name in enumerate("abc")})


NAN, UNLABELLED = float("nan"), -100.0


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_c37_one_task_skips(devices: int) -> None:
    """None in the second iteration, a constant in the third; the others go on, B rests in both."""
    groups = {"a/": (0, devices - 1), "b/": (devices - 1,), "c/": (devices // 2,)}
    groups = {name: tuple(dict.fromkeys(ranks)) for name, ranks in groups.items()}
    make, given = partial(model, "b", "adamw"), partial(data, {"b": {1: NAN, 2: UNLABELLED}})
    ours = forced_fit(make, given, devices, groups, max_steps=STEPS)
    reference = plain_fit(make, given, max_steps=STEPS)
    assert_same_fit(ours, reference)
    name = "tasks.b.head.linear.weight"
    rests = [reference.steps[at]["gradients"][name] is None for at in range(STEPS)]
    assert rests == [False, True, True, False, False]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("devices", [1, 2])
def test_c37_all_tasks_skip(devices: int, window: int) -> None:
    """The iteration has no loss on any rank; where it ends a window, the others' gradients count."""
    spoil = {name: {1: NAN, 2: NAN if window == 1 else 0.0} for name in "abc"}
    make, given = partial(model, "abc", "adamw"), partial(data, spoil)
    groups = {"a/": (0,), "b/": (devices - 1,), "c/": (0,)}
    options: dict[str, Any] = {"max_epochs": 1, "max_steps": -1, "accumulate_grad_batches": window}
    ours = forced_fit(make, given, devices, groups, **options)
    reference = plain_fit(make, given, **options)
    assert_same_fit(without_gradients(ours), *without_gradients([reference]))


class Alone(LightningModule):
    """A module of its own that skips; it logs all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Layer(3, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor | None:
        loss = F.mse_loss(self.head(batch["x"]), batch["y"])
        self.log("skipped", float(torch.isnan(loss)))
        return None if torch.isnan(loss) else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def test_c37_a_module_of_its_own_skips() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return Alone()

    given = partial(spoilt, 1, {1: NAN})
    ours = spindle_fit(make, given, 2, strategy={"planner": "seq"}, max_steps=STEPS)
    reference = plain_fit(make, given, max_steps=STEPS)
    assert_same_fit(ours, reference)
    assert [step["logged"]["skipped"] for step in reference.steps] == [0, 1, 0, 0, 0]


class Empty(Alone):
    def training_step(self, batch: Sample, batch_idx: int) -> Any:
        return {"loss": None if torch.isnan(batch["y"]).any() else super().training_step(batch, batch_idx)}


def test_c37_a_dict_without_a_loss_is_refused() -> None:
    outcomes = watch_fit(2, lambda rank: Empty(), lambda rank: spoilt(1, {1: NAN}))
    assert_all_ended(outcomes, "a dict with the key 'loss', or None to be skipped")


def test_c37_lightning_is_left_as_it_was() -> None:
    """After the fit a Trainer refuses what it refused before."""
    trainer = None

    def fit(rank: int, size: int) -> bool:
        class Keeps(Headed):
            def on_fit_start(self) -> None:
                nonlocal trainer
                trainer = self.trainer

        fit_once(
            lambda: multi({"a": Keeps(Layer(3, 4))}),
            lambda: together(a=spoilt(1, {})),
            SpindleStrategy(),
            max_steps=1,
        )
        loop = trainer.fit_loop.epoch_loop.automatic_optimization  # type: ignore[attr-defined]
        return "output_result_cls" not in vars(loop)

    assert run_ranks(fit, 1, init_group=False) == [True]
