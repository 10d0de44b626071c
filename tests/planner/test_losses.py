from __future__ import annotations

import pytest
from hypothesis import given, settings

from lightning_spindle.planner import PLANNERS, load_cell, plan
from lightning_spindle.planner.bounds import lower_bounds
from lightning_spindle.planner.losses import allocated_ms, losses, without_transfers_ms, work_ms
from tests.planner.checking import CELLS, op, problem, problems

SIGNED = {"early starts", "transfers"}


def parts(found):
    return {loss.name: loss.ms for loss in found}


def test_steps_of_a_plan_by_hand():
    """Two MetaOps, one after the other, on 2 devices: nothing but dependencies to lose."""
    p = problem(op("a", 2, times={1: 4.0, 2: 3.0}), op("b", 2, ["a"], {1: 4.0, 2: 3.0}), devices=2)
    assert work_ms(p) == 8.0  # 4 layers of 4 device-ms, on 2 devices
    found = parts(losses(plan(p, "spindle"), p))
    assert found["work"] == 8.0
    assert found["divisibility"] == pytest.approx(4.0)  # a cannot run beside b: 12 ms, all on 2 devices
    assert sum(ms for name, ms in found.items() if name not in ("work", "divisibility")) == pytest.approx(0.0)


def test_rounding_is_what_whole_layers_cost():
    """3 equal MetaOps of one layer on 2 devices: 1.5 rounds of work, 2 rounds as whole layers."""
    p = problem(*(op(m, 1, times={1: 2.0, 2: 1.9}) for m in "abc"), devices=2)
    found = parts(losses(plan(p, "seq"), p))
    assert found["work"] == 3.0
    assert found["rounding"] == pytest.approx(3 * 1.9 - 3.0 - found["divisibility"])
    assert found["waiting"] == pytest.approx(0.0)


def test_level_barrier_is_seen():
    """b waits for a; c, in level 0, could fill the idle device during b, but for the barrier."""
    times = {1: 2.0}
    p = problem(op("a", 1, times=times), op("b", 1, ["a"], times), op("c", 2, times=times), devices=2)
    found = parts(losses(plan(p, "spindle"), p))
    assert found["level barrier"] == pytest.approx(2.0)  # 4 + 2 ms by levels, 4 without
    assert found["early starts"] == pytest.approx(-2.0)  # b runs beside c after all


def test_transfers_are_what_links_add():
    ops = (op("a", 1, times={2: 1.0}), op("b", 1, ["a"], {1: 1.0}))
    from lightning_spindle.graph import Flow

    p = problem(*ops, devices=2, island=1, free=False, flows=(Flow("a", "b", 1 << 20),))
    made = plan(p, "spindle")
    found = parts(losses(made, p))
    assert found["transfers"] == pytest.approx(made.makespan_ms - without_transfers_ms(made.runs, p))
    assert found["transfers"] > 0


@settings(max_examples=25)
@given(problems(most_ops=6, most_devices=8))
def test_the_parts_add_up_and_constraints_never_help(p):
    bounds = lower_bounds(p)
    for name in ("spindle", "seq", "stmm", "optimus"):
        made = plan(p, name)
        found = losses(made, p, bounds)
        assert sum(loss.ms for loss in found) == pytest.approx(made.makespan_ms)
        for loss in found:
            if loss.name not in SIGNED:
                assert loss.ms >= -1e-3 * made.makespan_ms, f"{name}: {found}"
        assert parts(found)["transfers"] == pytest.approx(0.0, abs=1e-9)
        assert allocated_ms(p.metaops, made.runs, p) <= made.makespan_ms * (1 + 1e-9)


def test_parts_of_a_cell():
    p = load_cell(CELLS / "ofasys4_16_a.json")
    bounds = lower_bounds(p)
    for name in PLANNERS:
        made = plan(p, name)
        assert sum(loss.ms for loss in losses(made, p, bounds)) == pytest.approx(made.makespan_ms)
