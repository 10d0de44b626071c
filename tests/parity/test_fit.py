"""PARITY and REPLICA of whole fits: every rank against one plain process, step by step."""

import functools
from typing import Any

import pytest

from lightning_spindle.graph import MetaGraph
from tests.support import toys
from tests.support.fitting import Fit, assert_same_fit, metagraph_of, plain_fit, random_plan, spindle_fit


@functools.cache
def reference(optimizer: str) -> Fit:
    return plain_fit(lambda: toys.model(optimizer), toys.data)


@functools.cache
def metagraph() -> MetaGraph:
    return metagraph_of(toys.model(), toys.data())


def fit(devices: int, optimizer: str = "adamw", **strategy: Any) -> list[Fit]:
    return spindle_fit(lambda: toys.model(optimizer), toys.data, devices, strategy=strategy)


@pytest.mark.parametrize(
    ("devices", "optimizer", "planner"),
    [(1, "adamw", "auto"), (2, "sgd", "search"), (3, "adamw", "auto"), (4, "sgd", "spindle")],
)
def test_planned(devices: int, optimizer: str, planner: str) -> None:
    """Nearly three epochs; batches of 6, 4 and 5 rows, ragged last ones, one of a single row."""
    assert_same_fit(fit(devices, optimizer, planner=planner), reference(optimizer))


@pytest.mark.parametrize("seed", range(9))
def test_forced(seed: int) -> None:
    """By forced plans: groups of unlike sizes in any order, layers of one MetaOp apart."""
    devices = 2 + seed % 3
    assert_same_fit(fit(devices, plan=random_plan(metagraph(), devices, seed)), reference("adamw"))
