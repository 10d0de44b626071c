"""PARITY and REPLICA of fits that clip gradients by norm, of which each rank holds a part."""

from __future__ import annotations

import functools
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision

from lightning_spindle import MultiTaskModule, SpindleStrategy
from lightning_spindle.graph import MetaGraph
from tests.cases import test_c03_idle_tasks as idle
from tests.cases import test_freezing as freezing
from tests.strategy.ending import LIMIT_S, assert_all_ended, assert_refused, watch_fit
from tests.support import toys
from tests.support.fitting import (
    Fit,
    assert_same_fit,
    fit_once,
    metagraph_of,
    plain_fit,
    random_plan,
    spindle_fit,
    without_gradients,
)
from tests.support.ranks import run_ranks, watch_ranks
from tests.support.small import forced_fit

CLIP = 1.3
FLAG: dict[str, Any] = {"gradient_clip_val": CLIP}
SHARDED = {"shard_optimizer_state": True}


@functools.cache
def toy_graph() -> MetaGraph:
    return metagraph_of(toys.model(), toys.data())


def assert_bites_at_times(reference: Fit) -> None:
    """Gradients of some steps were clipped to ``CLIP``, others were smaller anyway."""
    gradients = [[g for g in step["gradients"].values() if g is not None] for step in reference.steps]
    norms = [float(torch.nn.utils.get_total_norm(g)) for g in gradients]
    assert max(norms) == pytest.approx(CLIP, rel=1e-5)
    assert min(norms) < 0.99 * CLIP


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_trainers_flag(optimizer: str, devices: int) -> None:
    """An encoder shared over overlapping groups; one parameter alone, of all ranks' or of one."""
    make, options = partial(toys.model, optimizer), {"max_steps": 6, **FLAG}
    strategy = {"plan": random_plan(toy_graph(), devices, seed=devices)}
    reference = plain_fit(make, toys.data, **options)
    assert_same_fit(spindle_fit(make, toys.data, devices, strategy=strategy, **options), reference)
    assert_bites_at_times(reference)


class Clips(MultiTaskModule):
    """Clips in a hook, in every step to another norm."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        norm = CLIP / (1 + self.trainer.global_step % 3)
        self.clip_gradients(optimizer, gradient_clip_val=norm, gradient_clip_algorithm="norm")


def clipping_model(optimizer: str) -> MultiTaskModule:
    return Clips(toys.model(optimizer).tasks)


@pytest.mark.parametrize(("optimizer", "devices"), [("sgd", 2), ("adamw", 3)])
def test_a_hook_that_clips(optimizer: str, devices: int) -> None:
    make, options = partial(clipping_model, optimizer), {"max_steps": 6}
    strategy = {"plan": random_plan(toy_graph(), devices, seed=devices)}
    ours = spindle_fit(make, toys.data, devices, strategy=strategy, **options)
    assert_same_fit(ours, plain_fit(make, toys.data, **options))


def test_with_accumulation_and_divided_optimizer_state() -> None:
    """The window's gradients are clipped once, on holders that do not step them too."""
    options = {"accumulate_grad_batches": 2, "max_steps": 3, **FLAG}
    strategy = {"plan": random_plan(toy_graph(), 3, seed=2), **SHARDED}
    ours = spindle_fit(toys.model, toys.data, 3, strategy=strategy, **options)
    reference = plain_fit(toys.model, toys.data, **options)
    assert_same_fit(without_gradients(ours), without_gradients([reference])[0])


def test_a_rank_that_holds_no_gradient() -> None:
    """Rank 1 alone has the task that is idle in the second half; rank 2 has nothing at all."""
    make, groups = partial(idle.model, "adamw"), {"a/": (0,), "b/": (1,)}
    options = {"max_epochs": 1, "max_steps": -1, "gradient_clip_val": CLIP}
    ours = forced_fit(make, idle.data, 3, groups, **options)
    reference = plain_fit(make, idle.data, **options)
    assert_same_fit(ours, reference)
    assert_bites_at_times(reference)


class LeavesOut(freezing.Towers):
    """What trains but is in no optimizer does not count, as in one process."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.shared.parameters(), *self.head.parameters()], lr=0.05)


@pytest.mark.filterwarnings("ignore:parameters that get gradients, but are in no optimizer")
def test_parameters_that_no_optimizer_has() -> None:
    make = partial(freezing.model, LeavesOut, "sgd", False)
    ours = forced_fit(make, freezing.data, 3, freezing.PLACES[3], max_steps=6, **FLAG)
    reference = plain_fit(make, freezing.data, max_steps=6, **FLAG)
    assert_same_fit(without_gradients(ours), without_gradients([reference])[0])


def test_parameters_that_are_frozen_in_the_fit() -> None:
    make = partial(freezing.model, freezing.AllListed, "adamw", False)
    options = {"callbacks": [freezing.Sets(shared={1: False, 2: True}, own={2: False})], **freezing.EPOCHS}
    ours = forced_fit(make, freezing.data, 3, freezing.PLACES[3], **options, **FLAG)
    assert_same_fit(ours, plain_fit(make, freezing.data, **options, **FLAG))


def test_in_float32() -> None:
    options = {"max_steps": 4, "precision": "32-true", **FLAG}
    strategy = {"plan": random_plan(toy_graph(), 2, seed=2)}
    make = partial(toys.model, "sgd")
    ours = spindle_fit(make, toys.data, 2, strategy=strategy, **options)
    assert_same_fit(ours, plain_fit(make, toys.data, **options), tolerance=1e-5)


class ByRank(MultiTaskModule):
    """Clips to a norm of each rank's own; to none where ``only`` says so."""

    only: int | None = None

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.only in (None, self.trainer.global_rank):
            norm = 1.0 + self.trainer.global_rank
            self.clip_gradients(optimizer, gradient_clip_val=norm, gradient_clip_algorithm="norm")


def test_ranks_that_clip_to_different_norms() -> None:
    outcomes = watch_fit(2, lambda rank: ByRank(toys.model().tasks))
    assert_refused(outcomes, "ValueError", r"different norms.*\[1\.0, 2\.0\]")


def test_a_rank_that_clips_alone() -> None:
    def body(rank: int, size: int) -> None:
        made = ByRank(toys.model().tasks)
        made.only = 1
        plan = random_plan(toy_graph(), 2, seed=2)
        strategy = SpindleStrategy(plan=plan, timeout=timedelta(seconds=2), timeline=False)
        fit_once(lambda: made, toys.data, strategy, devices=size, max_steps=4)

    outcomes = watch_ranks(body, 2, timeout_s=LIMIT_S + 10, group_timeout_s=2)
    assert_all_ended(outcomes, r"not at the same call.*self\.clip_gradients")


class Own(DoublePrecision):
    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        raise AssertionError("the user's own way")


def test_a_plugin_with_a_way_of_its_own_is_refused() -> None:
    outcomes = watch_fit(2, options=lambda rank: {"precision": None, "plugins": Own()})
    assert_refused(outcomes, "ValueError", "Own clips gradients by norm in its own way")


def test_the_plugin_is_its_own_again_after_the_fit() -> None:
    def body(rank: int, size: int) -> bool:
        plugin = DoublePrecision()
        plugin.clip_grad_by_norm = own = partial(plugin.clip_grad_by_norm)
        strategy = SpindleStrategy(plan=random_plan(toy_graph(), 2, seed=2), timeline=False)
        options = {"precision": None, "plugins": plugin, "max_steps": 1, "devices": size}
        fit_once(toys.model, toys.data, strategy, **options)
        return plugin.clip_grad_by_norm is own

    assert run_ranks(body, 2) == [True, True]
