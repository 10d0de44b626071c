from __future__ import annotations

import pytest
from hypothesis import given, settings

from lightning_spindle.planner import load_cell
from lightning_spindle.planner.bounds import (
    across_levels,
    bound_ms,
    critical_path_ms,
    level_bound_ms,
    lower_bounds,
)
from lightning_spindle.planner.search import plan_search
from tests.planner.checking import CELLS, YARDSTICK, op, problem, problems

QUICK = [name for name in sorted(YARDSTICK) if not name.startswith(("clip10", "random0", "random1"))]


@pytest.mark.parametrize("name", QUICK)
def test_bounds_of_the_cells(name):
    found = lower_bounds(load_cell(CELLS / f"{name}.json"))
    yard = YARDSTICK[name]
    assert found.bound_ms == pytest.approx(yard["bound_ms"], rel=1e-3)
    assert found.level_bound_ms == pytest.approx(yard["level_bound_ms"], rel=1e-3)
    assert found.critical_path_ms <= found.across_levels_ms <= found.bound_ms * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(YARDSTICK.keys() - set(QUICK)))
def test_bounds_of_the_large_cells(name):
    """Stopped after a hundred columns a bound is still a bound."""
    cell = load_cell(CELLS / f"{name}.json")
    found = bound_ms(cell, max_columns=100)
    assert YARDSTICK[name]["bound_ms"] * 0.997 <= found <= YARDSTICK[name]["bound_ms"] * (1 + 1e-6)
    assert found >= across_levels(cell).span_ms * (1 - 1e-9)


@given(problems(most_ops=5, most_devices=8))
@settings(max_examples=40)
def test_no_plan_is_below_a_bound(case):
    makespan_ms = plan_search(case, time_limit_s=None, moves=300).makespan_ms
    found = lower_bounds(case)
    assert makespan_ms >= found.bound_ms * (1 - 1e-6)
    assert found.bound_ms >= max(found.levels_ms) * (1 - 1e-9)
    assert bound_ms(case, max_columns=2) <= found.bound_ms * (1 + 2e-4)


def test_known_optima():
    alone = problem(op("a", 3, times={1: 4.0, 2: 3.0, 4: 2.0}))
    assert bound_ms(alone) == pytest.approx(6.0, rel=1e-3)
    assert critical_path_ms(alone) == 6.0
    # Area alone allows 1.75 ms on 4 devices; two of 3 devices exclude each other.
    wide = problem(op("a", times={3: 1.0}), op("b", times={3: 1.0}), op("c", times={1: 1.0}))
    assert across_levels(wide).span_ms == pytest.approx(1.75)
    assert level_bound_ms(wide.metaops, 4) == pytest.approx(2.0, rel=1e-3)
    assert bound_ms(wide) == pytest.approx(2.0, rel=1e-3)


def test_a_larger_capacity_never_lengthens_the_relaxation():
    cell = load_cell(CELLS / "ofasys4_16_a.json")
    spans = [across_levels(cell, capacity=c).span_ms for c in (0.7, 1.0, 1.35)]
    assert spans == sorted(spans, reverse=True)
    for metaop, layers in zip(cell.metaops, across_levels(cell).layers, strict=True):
        assert sum(layers) == pytest.approx(metaop.layers)
