"""PARITY and REPLICA of whole fits: every rank against one plain process, step by step."""

import functools
from typing import Any

import pytest

from lightning_spindle.graph import MetaGraph
from tests.support import toys
from tests.support.fitting import Fit, assert_same_fit, metagraph_of, plain_fit, random_plan, spindle_fit

STEPS = 20


@functools.cache
def reference(optimizer: str) -> Fit:
    return plain_fit(lambda: toys.model(optimizer), toys.data, max_steps=STEPS)


@functools.cache
def metagraph() -> MetaGraph:
    return metagraph_of(toys.model(), toys.data())


def fit(devices: int, optimizer: str = "adamw", **strategy: Any) -> list[Fit]:
    make = functools.partial(toys.model, optimizer)
    return spindle_fit(make, toys.data, devices, strategy=strategy, max_steps=STEPS)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("devices", "planner"), [(1, "auto"), (2, "search"), (3, "auto"), (4, "spindle")])
def test_planned(devices: int, planner: str, optimizer: str) -> None:
    """20 steps by a planner's plan; batches of 6, 4 and 5 rows, ragged last ones, one of a single row."""
    assert_same_fit(fit(devices, optimizer, planner=planner), reference(optimizer))


@pytest.mark.parametrize("seed", range(9))
def test_forced(seed: int) -> None:
    """20 steps by forced plans: groups of unlike sizes in any order, layers of one MetaOp apart."""
    devices = 2 + seed % 3
    assert_same_fit(fit(devices, plan=random_plan(metagraph(), devices, seed)), reference("adamw"))
