"""C45: dropout differs by rows and by step, is the same wherever an operator runs twice, and repeats.

The documented rule: an operator draws from a generator of its own, seeded by the run's seed, the step, the
operator and the first row of its shard. Masks therefore depend on how rows are split, and on nothing else.
"""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_spindle.runtime.randomness import operator_randomness
from tests.support import toys
from tests.support.fitting import (
    Fit,
    assert_replicas,
    assert_same_fit,
    metagraph_of,
    plain_fit,
    random_plan,
    spindle_fit,
)
from tests.support.small import Given, Part, Sample, Small, forced_fit, multi, together

ROWS, WIDTH = 4, 64


class Masked(Part):
    """Ones are dropped, and a row's own weights multiply what is left: their gradient is the row's mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Embedding(ROWS, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        own = self.weights(ids)
        return self.dropout(torch.ones_like(own)) * own


class Drops(Small):
    def __init__(self) -> None:
        super().__init__()
        self.masked = Masked()

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        loss = self.masked(batch["id"]).sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def numbered() -> list[Sample]:
    return [{"id": torch.tensor(row)} for row in range(ROWS)]


def masks(
    groups: dict[str, tuple[int, ...]], devices: int, tasks: str = "a", seed: int = 7
) -> list[torch.Tensor]:
    """The masks [steps, rows, width] of each task's dropout, two steps."""
    ours = forced_fit(
        lambda: multi({t: Drops() for t in tasks}),
        lambda: together(**{t: Given(numbered() * 2, [ROWS, ROWS]) for t in tasks}),
        devices,
        groups,
        max_steps=2,
        seed=seed,
    )
    assert_replicas(ours)
    found = []
    for task in tasks:
        holder = ours[groups[f"{task}/"][0]]
        name = f"tasks.{task}.masked.weights.weight"
        found.append(torch.stack([s["gradients"][name] for s in holder.steps]) / 2)
    return found


def differ(rows: torch.Tensor) -> bool:
    return all(not torch.equal(a, b) for k, a in enumerate(rows) for b in rows[:k])


@pytest.mark.parametrize("group", [(0,), (0, 1), (1, 0, 2), (3, 1, 0, 2)])
def test_c45_masks_of_rows_differ(group: tuple[int, ...]) -> None:
    """p=0.5 on ones: every row has a mask of its own, on one shard or several, another in each step."""
    (found,) = masks({"a/": group}, max(group) + 1)
    assert set(found.unique().tolist()) == {0.0, 1.0}
    assert 0.35 < float(found.mean()) < 0.65
    for step in found:
        assert differ(step)
    assert not torch.equal(found[0], found[1])


def test_c45_masks_do_not_depend_on_the_devices() -> None:
    """The same split on other ranks draws the same; another seed, or another task, draws otherwise."""
    (first,) = masks({"a/": (0, 1)}, 2)
    (other,) = masks({"a/": (2, 0)}, 3)
    (again,) = masks({"a/": (0, 1)}, 2, seed=8)
    assert torch.equal(first, other)
    assert not torch.equal(first, again)
    one, two = masks({"a/": (0, 1), "b/": (1, 0)}, 2, tasks="ab")
    assert not torch.equal(one, two)


def dropping(p: float) -> Any:
    return toys.model("sgd", dropout=p)


def fit(plan: Any, p: float, steps: int) -> list[Fit]:
    return spindle_fit(lambda: dropping(p), toys.data, 2, strategy={"plan": plan}, max_steps=steps)


def test_c45_the_same_run_twice_has_equal_loss_curves() -> None:
    """Bit for bit, with shuffled loaders beside the dropout; holders stay equal; p=0 is PARITY."""
    plan = random_plan(metagraph_of(dropping(0.5), toys.data()), 2, seed=5)
    once, twice = fit(plan, 0.5, 2), fit(plan, 0.5, 2)
    curves = [[step["loss"] for step in run[0].steps] for run in (once, twice)]
    assert curves[0] == curves[1]
    assert_replicas(once)
    none = fit(plan, 0.0, 2)
    assert [step["loss"] for step in none[0].steps] != curves[0]
    assert_same_fit(none, plain_fit(lambda: dropping(0.0), toys.data, max_steps=2))


def test_c45_an_operator_draws_from_a_generator_of_its_own() -> None:
    """Ranks that run unlike operators go on drawing the same numbers."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    draws = []
    for step, name, row in [(0, "a", 0), (0, "a", 2), (0, "b", 0), (1, "a", 0), (0, "a", 0)]:
        with operator_randomness(torch.device("cpu"), 1, step, name, row):
            draws.append(torch.rand(4))
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(draws[0], draws[-1])
    assert differ(torch.stack(draws[:-1]))
