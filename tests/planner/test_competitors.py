from __future__ import annotations

import pytest
from hypothesis import given, settings

from lightning_spindle.planner import PLANNERS, plan
from tests.planner.checking import check, op, problem, problems

COMPETITORS = ["seq", "uniform", "optimus", "stmm"]
LINEAR = {1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0}


def test_registry():
    assert list(PLANNERS) == ["spindle", *COMPETITORS, "search"]
    with pytest.raises(ValueError, match="unknown planner 'spidle'; there are spindle, seq, uniform"):
        plan(problem(op("a")), "spidle")


@settings(max_examples=80)
@given(problems())
def test_plans_are_valid(p):
    for name in ["spindle", *COMPETITORS]:
        found = plan(p, name)
        assert found.planner == name
        assert check(found, p) == pytest.approx(found.makespan_ms)


def test_seq_runs_one_metaop_at_a_time_on_all_devices():
    p = problem(op("a.x", 2, times=LINEAR), op("b.x", 3, times=LINEAR), devices=8)
    runs = plan(p, "seq").runs
    assert [(r.metaop, r.start_ms, r.end_ms, len(r.devices)) for r in runs] == [
        ("a.x", 0.0, 2.0, 8),
        ("b.x", 2.0, 5.0, 8),
    ]


def test_uniform_ignores_the_workload():
    p = problem(op("a.x", 1, times=LINEAR), op("b.x", 9, times=LINEAR), devices=8)
    assert [r.devices for r in plan(p, "uniform").runs] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_optimus_goes_by_marginal_gain():
    """a gains 4 ms for one device more; b 0.5 ms, then nothing."""
    p = problem(op("a.x", 1, times=LINEAR), op("b.x", 1, times={1: 1.0, 2: 0.5}), devices=4)
    widths = {r.metaop: len(r.devices) for r in plan(p, "optimus").runs}
    assert widths == {"a.x": 2, "b.x": 2}
    p = problem(op("a.x", 1, times=LINEAR), op("b.x", 1, times={1: 1.0, 2: 0.5}), devices=5)
    widths = {r.metaop: len(r.devices) for r in plan(p, "optimus").runs}
    assert widths == {"a.x": 4, "b.x": 1}


def test_stmm_divides_the_devices_inside_a_task():
    ops = (
        op("t.vision", 3, times={1: 12.0, 2: 6.0, 4: 4.0}),
        op("t.text", 1, times={1: 12.0, 2: 9.0, 4: 8.0}),
        op("t.loss", 1, ["t.vision", "t.text"], {1: 1.0}),
        op("u.text", 1, times={1: 12.0, 2: 9.0, 4: 8.0}),
    )
    runs = {r.metaop: r for r in plan(problem(*ops, devices=4), "stmm").runs}
    # vision, the slower one, is widened as long as text (12 ms on 1) is not in its way
    assert {m: len(runs[m].devices) for m in ("t.vision", "t.text")} == {"t.vision": 2, "t.text": 1}
    assert runs["t.vision"].start_ms == runs["t.text"].start_ms == 0.0
    assert runs["u.text"].start_ms >= runs["t.loss"].start_ms


def test_more_tasks_than_devices_take_turns():
    p = problem(*(op(f"t{i}.m", 2, times={1: 1.0, 2: 0.6}) for i in range(7)), devices=2)
    for name in COMPETITORS:
        check(plan(p, name), p)
    assert plan(p, "optimus").makespan_ms == pytest.approx(7.2)
