"""PARITY of fits in which callbacks freeze and unfreeze modules, and add to the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from torch.nn import functional as F

from lightning_spindle.strategy import SpindleStrategy
from tests.strategy.ending import assert_all_ended, watch_fit
from tests.support import ways
from tests.support.fitting import assert_same_fit, fit_once, plain_fit, spindle_fit
from tests.support.ranks import run_ranks
from tests.support.small import (
    Given,
    Layer,
    Part,
    Sample,
    Small,
    forced_fit,
    metagraph,
    multi,
    placement,
    random_samples,
    together,
)


class Towers(Small):
    """A tower that two tasks share, one of its own, and a head."""

    def __init__(self, shared: Layer) -> None:
        super().__init__()
        self.shared, self.own, self.head = shared, Layer(4, 4), Layer(4, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.head(self.own(self.shared(batch["x"]))), batch["y"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return type(super().configure_optimizers())(
            [p for p in self.parameters() if p.requires_grad], lr=0.05
        )


class AllListed(Towers):
    """The optimizer lists frozen parameters too."""

    def configure_optimizers(self) -> Any:
        return Small.configure_optimizers(self)


def model(kind: type[Towers], optimizer: str, frozen: bool) -> Any:
    torch.manual_seed(0)
    shared = Layer(3, 4).requires_grad_(not frozen)
    return multi({name: kind(shared) for name in "ab"}, optimizer)


def data() -> Any:
    return together(
        a=Given(random_samples(9, 1, x=(3,), y=(1,)), [5, 4]),
        b=Given(random_samples(5, 2, x=(3,), y=(1,)), [3, 2]),
    )


class Sets(Callback):
    """Freezes or unfreezes the shared tower, and ``a``'s own, at the start of given epochs."""

    def __init__(self, **trains: dict[int, bool]) -> None:
        self.trains = trains

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        for tower, by_epoch in self.trains.items():
            if trainer.current_epoch in by_epoch:
                getattr(module.tasks["a"], tower).requires_grad_(by_epoch[trainer.current_epoch])


class Finetunes(BaseFinetuning):
    """Lightning's own way: the tower is frozen at first, and joins the optimizer in epoch 1."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.tasks["a"].shared)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.tasks["a"].shared, optimizer)


class Adds(Callback):
    """Unfreezes the tower, and gives it a group of its own, in the middle of an epoch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            tower = module.tasks["a"].shared.requires_grad_()
            trainer.optimizers[0].add_param_group({"params": list(tower.parameters()), "lr": 0.02})


PLACES: dict[int, dict[str, tuple[int, ...]]] = {
    1: {"a/": (0,), "b/": (0,)},
    2: {"a/": (1,), "a/shared": (0,), "b/": (0,), "b/shared": (1,)},
    3: {"a/": (1, 0), "a/shared": (2,), "b/": (0,), "b/shared": (1, 2)},
}
EPOCHS: dict[str, Any] = {"max_epochs": 3, "max_steps": -1}


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(
    ("frozen", "callback"),
    [
        (True, lambda: Sets(shared={1: True})),
        (False, lambda: Sets(shared={1: False, 2: True}, own={2: False})),
        (True, Adds),
        (False, Finetunes),
    ],
    ids=["unfrozen", "frozen and back", "group added", "BaseFinetuning"],
)
def test_freezing_and_unfreezing_in_the_fit(frozen: bool, callback: Callable[[], Any], devices: int) -> None:
    listed = callback not in (Adds, Finetunes)
    make = lambda: model(AllListed if listed else Towers, "adamw", frozen)  # noqa: E731
    ours = forced_fit(make, data, devices, PLACES[devices], callbacks=[callback()], **EPOCHS)
    reference = plain_fit(make, data, callbacks=[callback()], **EPOCHS)
    assert_same_fit(ours, reference)
    name = "tasks.a.shared.linear.weight"
    first = dict(make().named_parameters())[name].detach().double()
    tower = [first, *(step["parameters"][name] for step in reference.steps)]
    assert any(not torch.equal(now, before) for now, before in pairwise(tower)), "it trains"
    assert any(torch.equal(now, before) for now, before in pairwise(tower)), "it rests"


def keeps_its_hook(rank: int, size: int, instrumented: bool) -> bool:
    callback = Finetunes()
    if instrumented:
        callback.on_train_epoch_start = partial(callback.on_train_epoch_start)
    before = vars(callback).get("on_train_epoch_start")
    strategy = SpindleStrategy(profile_budget_s=0.5)
    fit_once(lambda: model(Towers, "adamw", False), data, strategy, callbacks=[callback], max_steps=2)
    return vars(callback).get("on_train_epoch_start") is before


@pytest.mark.parametrize("instrumented", [False, True])
def test_a_callback_is_its_own_again_after_the_fit(instrumented: bool) -> None:
    """The strategy gives it the whole model during the fit, and leaves it what it had."""
    assert run_ranks(keeps_its_hook, 1, instrumented) == [True]


@pytest.mark.parametrize("devices", [1, 3])
def test_freezing_a_weight_of_the_total(devices: int) -> None:
    """All ranks compute the gradient of a learned loss weight; only one may count once it trains again."""

    class SetsWeights(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            module.log_variances.requires_grad_(trainer.global_step % 4 > 1)

    def make() -> Any:
        torch.manual_seed(0)
        module = ways.Tempered()
        module.log_variances.requires_grad_(False)
        return module

    options = {"max_steps": 6, "callbacks": [SetsWeights()]}
    ours = spindle_fit(make, ways.SharedData, devices, strategy={"planner": "uniform"}, **options)
    assert_same_fit(ours, plain_fit(make, ways.SharedData, **options))


class Saves(Callback):
    """The optimizer's state at the end, as it is saved."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.state = trainer.strategy.optimizer_state(trainer.optimizers[0])


def saved(strategy: Callable[[], Any], rank: int, size: int) -> dict[str, Any]:
    saves = Saves()
    make = partial(model, Towers, "adamw", True)
    fit_once(make, data, strategy(), devices=size, callbacks=[Adds(), saves], max_steps=4)
    return saves.state


def test_groups_that_were_added_are_saved() -> None:
    (plain,) = run_ranks(partial(saved, lambda: "auto"), 1, init_group=False)
    plan = placement(metagraph(model(Towers, "adamw", True), data()), 2, PLACES[2])
    strategy = partial(SpindleStrategy, plan=plan, operators=(Part,))
    ours, elsewhere = run_ranks(partial(saved, strategy), 2)
    assert ours["param_groups"] == elsewhere["param_groups"] == plain["param_groups"]
    assert ours["state"].keys() == plain["state"].keys()
    torch.testing.assert_close(ours["state"], plain["state"], rtol=1e-9, atol=1e-9)


class OnOneRank(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1 and trainer.global_rank == 1:
            module.tasks["a"].shared.requires_grad_()


class AddsOnOneRank(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1 and trainer.global_rank == 0:
            trainer.optimizers[0].add_param_group({"params": list(module.tasks["a"].shared.parameters())})


class Exchanges(Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]


class Rewrites(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.optimizers[0].param_groups[0]["params"].extend(module.tasks["a"].shared.parameters())


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (OnOneRank, "ranks do not train the same parameters any more"),
        (AddsOnOneRank, "ranks do not train the same parameters any more"),
        (Exchanges, "optimizers were exchanged during the fit"),
        (Rewrites, "put into a group of the optimizer"),
    ],
)
def test_what_cannot_be_followed_is_refused(callback: Callable[[], Any], message: str) -> None:
    outcomes = watch_fit(
        2,
        lambda rank: model(Towers, "adamw", True),
        lambda rank: data(),
        options=lambda rank: {"callbacks": [callback()]},
    )
    assert_all_ended(outcomes, message)


class Looks(Towers):
    """Saves the work of gradients that nobody needs, as library models do."""

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        with torch.set_grad_enabled(any(p.requires_grad for p in self.shared.parameters())):
            x = self.shared(batch["x"])
        if not self.own.linear.weight.requires_grad:
            x = x.detach()
        loss = F.mse_loss(self.head(self.own(x)), batch["y"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return Small.configure_optimizers(self)


@pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")
@pytest.mark.parametrize("frozen", [True, False])
def test_a_step_that_looks_at_requires_grad(frozen: bool) -> None:
    """Its answer is in the trace, which is made anew when the answer is another one."""
    make = partial(model, Looks, "adamw", frozen)
    options = {"callbacks": [Sets(shared={1: frozen}, own={2: False})], **EPOCHS}
    ours = forced_fit(make, data, 2, PLACES[2], **options)
    assert_same_fit(ours, plain_fit(make, data, **options))
