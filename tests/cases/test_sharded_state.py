"""PARITY and REPLICA of fits whose optimizer state is divided among the holders of each parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_spindle import SpindleStrategy
from lightning_spindle.graph import MetaGraph
from lightning_spindle.runtime.session import TRAIN
from tests.cases import test_c03_idle_tasks as idle
from tests.cases import test_c16_missing as missing
from tests.cases import test_freezing as freezing
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
from tests.support.ranks import run_ranks
from tests.support.small import Part, metagraph, placement

STEPS = 5
SHARDED = {"shard_optimizer_state": True}


@dataclass
class KeepsState(Callback):
    """What the optimizer of this process keeps at the end: the elements of each parameter's state."""

    kept: dict[str, dict[str, int]] = field(default_factory=dict)
    stepped: set[str] = field(default_factory=set)
    optimizer: torch.optim.Optimizer | None = None

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        names = {id(p): n for n, p in module.named_parameters()}
        self.optimizer = trainer.optimizers[0]
        state = trainer.optimizers[0].state
        self.kept = {
            names[id(p)]: {k: v.numel() for k, v in s.items() if isinstance(v, torch.Tensor)}
            for p, s in state.items()
        }
        if isinstance(trainer.strategy, SpindleStrategy):
            assert trainer.strategy._session is not None
            program = trainer.strategy._session.steps[TRAIN].program
            self.stepped = set(program.stepped(trainer.global_rank))


@functools.cache
def toy_graph() -> MetaGraph:
    return metagraph_of(toys.model(), toys.data())


def toy_fits(optimizer: str, strategy: Callable[[], Any], devices: int) -> list[tuple[Fit, KeepsState]]:
    def rank(index: int, size: int) -> tuple[Fit, KeepsState]:
        keeps = KeepsState()
        make = functools.partial(toys.model, optimizer)
        fit = fit_once(make, toys.data, strategy(), devices=size, max_steps=STEPS, callbacks=[keeps])
        assert keeps.optimizer is not None
        assert not keeps.optimizer._optimizer_step_pre_hooks, "after the fit the optimizer is as it was"
        keeps.optimizer = None
        return fit, keeps

    return run_ranks(rank, devices, init_group=devices > 1)


@functools.cache
def toy_reference(optimizer: str) -> tuple[Fit, KeepsState]:
    return toy_fits(optimizer, lambda: "auto", 1)[0]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_each_state_is_kept_once(devices: int, optimizer: str) -> None:
    """An encoder shared over overlapping groups, ragged batches; all states together are one process's."""
    plan = random_plan(toy_graph(), devices, seed=devices)
    ranks = toy_fits(optimizer, lambda: SpindleStrategy(plan=plan, timeline=False, **SHARDED), devices)
    reference, whole = toy_reference(optimizer)
    assert_same_fit([fit for fit, _ in ranks], reference)
    assert sum(len(keeps.kept) for _, keeps in ranks) == len(whole.kept)
    assert {name: state for _, keeps in ranks for name, state in keeps.kept.items()} == whole.kept
    for _, keeps in ranks:
        assert keeps.kept.keys() == keeps.stepped & whole.kept.keys()


def test_data_parallel_states_are_of_equal_size() -> None:
    """All parameters on all ranks: each keeps a third of the state, but for the size of whole parameters."""
    everywhere = {m.name: tuple(range(3)) for m in toy_graph().metaops}
    plan = placement(toy_graph(), 3, everywhere)
    ranks = toy_fits("adamw", lambda: SpindleStrategy(plan=plan, timeline=False, **SHARDED), 3)
    reference, whole = toy_reference("adamw")
    assert_same_fit([fit for fit, _ in ranks], reference)
    sizes = [sum(sum(s.values()) for s in keeps.kept.values()) for _, keeps in ranks]
    assert sum(sizes) == sum(sum(s.values()) for s in whole.kept.values())
    largest = max(sum(s.values()) for s in whole.kept.values())
    assert max(sizes) - min(sizes) <= 2 * largest


def sharded_fit(make_model: Any, make_data: Any, devices: int, groups: Any, **options: Any) -> list[Fit]:
    plan = placement(metagraph(make_model(), make_data()), devices, groups)
    strategy = {"plan": plan, "operators": (Part,), **SHARDED}
    return spindle_fit(make_model, make_data, devices, strategy=strategy, **options)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_idle_tasks_rest(optimizer: str) -> None:
    make = functools.partial(idle.model, optimizer)
    options: dict[str, Any] = {"max_epochs": 1, "max_steps": -1}
    ours = sharded_fit(make, idle.data, 2, {"a/": (0, 1), "b/": (1, 0)}, **options)
    assert_same_fit(ours, plain_fit(make, idle.data, **options))


@pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")
def test_ranks_that_come_to_hold_a_parameter_get_its_values() -> None:
    """A batch without an image runs whole on one rank; who stepped the parameters goes on."""
    make = functools.partial(missing.coarse_model, "adamw")
    given = functools.partial(missing.data, missing.WHOLE_ONCE)
    ours = sharded_fit(make, given, 3, missing.ON_THREE, max_steps=5)
    assert_same_fit(ours, plain_fit(make, given, max_steps=5))


@pytest.mark.parametrize(
    ("frozen", "callback"),
    [
        (False, lambda: freezing.Sets(shared={1: False, 2: True}, own={2: False})),
        (True, freezing.Adds),
        (False, freezing.Finetunes),
    ],
    ids=["frozen and back", "group added", "BaseFinetuning"],
)
def test_freezing_and_adding_groups(frozen: bool, callback: Callable[[], Any]) -> None:
    listed = callback not in (freezing.Adds, freezing.Finetunes)
    kind = freezing.AllListed if listed else freezing.Towers
    make = functools.partial(freezing.model, kind, "adamw", frozen)
    options = freezing.EPOCHS
    ours = sharded_fit(make, freezing.data, 3, freezing.PLACES[3], callbacks=[callback()], **options)
    assert_same_fit(ours, plain_fit(make, freezing.data, callbacks=[callback()], **options))


def test_gradients_are_clipped_on_every_holder() -> None:
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "max_steps": STEPS}
    plan = random_plan(toy_graph(), 3, seed=2)
    ours = spindle_fit(toys.model, toys.data, 3, strategy={"plan": plan, **SHARDED}, **options)
    assert_same_fit(ours, plain_fit(toys.model, toys.data, **options))


def test_accumulation() -> None:
    options = {"accumulate_grad_batches": 2, "max_steps": 3}
    plan = random_plan(toy_graph(), 3, seed=2)
    ours = spindle_fit(toys.model, toys.data, 3, strategy={"plan": plan, **SHARDED}, **options)
    reference = plain_fit(toys.model, toys.data, **options)
    assert_same_fit(without_gradients(ours), without_gradients([reference])[0])
