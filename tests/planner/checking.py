"""An independent check of a plan against its problem, and problems for tests."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st

from lightning_spindle.cluster import Cluster, Link
from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.planner import LayerTime, PlannedOp, PlanningProblem

CELLS = Path(__file__).parents[1] / "data" / "cells"
YARDSTICK = json.loads((CELLS / "yardstick.json").read_text())
EPS = 1e-3


def check(plan: ExecutionPlan, problem: PlanningProblem) -> float:
    """Asserts that a plan keeps every rule of a cell; returns its makespan from the curves alone."""
    ops = {m.name: m for m in problem.metaops}
    ends: dict[str, float] = {}
    at = dict.fromkeys(ops, 0)
    busy = [0.0] * problem.devices
    for r in sorted(plan.runs, key=lambda r: (r.start_ms, r.end_ms)):
        op = ops[r.metaop]
        need = op.time(len(r.devices)).total_ms * (r.last - r.first)
        assert r.end_ms - r.start_ms >= need - EPS, f"{r} is shorter than its time"
        assert r.first == at[r.metaop], f"{r} out of order"
        assert r.start_ms >= ends.get(r.metaop, 0.0) - EPS
        if r.first == 0:
            for before in op.after:
                assert at[before] == ops[before].layers, f"{r} before {before}"
                assert r.start_ms >= ends[before] - EPS
        for d in r.devices:
            assert r.start_ms >= busy[d] - EPS, f"{r} overlaps on {d}"
            busy[d] = r.end_ms
        at[r.metaop], ends[r.metaop] = r.last, r.start_ms + need
    assert at == {m.name: m.layers for m in problem.metaops}
    return max(ends.values())


def op(name, layers=1, after=(), times=None, **more) -> PlannedOp:
    """A PlannedOp with a forward time for each allocation."""
    times = times or {1: 1.0}
    curve = tuple((n, LayerTime(ms, 0.0)) for n, ms in sorted(times.items()))
    task = more.pop("task", name.split(".")[0])
    return PlannedOp(name, task, layers, tuple(after), more.pop("batch", 64), curve, **more)


def problem(*ops, devices=4, island=None, memory=None, free=True, **more) -> PlanningProblem:
    links = (
        (Link(0.0, float("inf")), Link(0.0, float("inf"))) if free else (Link(1e-5, 150e9), Link(6e-5, 8e9))
    )
    cluster = Cluster(devices, island or devices, *links, memory_bytes=memory)
    return PlanningProblem("test", tuple(ops), cluster, **more)


@st.composite
def curves(draw, devices: int) -> dict[int, float]:
    """Times for some allocations, from 1 on; not always falling."""
    allocations = sorted({1, *draw(st.sets(st.integers(1, devices), max_size=5))})
    alpha, beta = draw(st.floats(0.01, 5)), draw(st.floats(0.01, 20))
    bumps = draw(st.lists(st.floats(0.8, 1.3), min_size=len(allocations), max_size=len(allocations)))
    return {n: (alpha + beta / n) * bump for n, bump in zip(allocations, bumps, strict=True)}


@st.composite
def problems(draw, most_ops: int = 8, most_devices: int = 12) -> PlanningProblem:
    """Random problems: any DAG, any curves, free links."""
    devices = draw(st.integers(1, most_devices))
    count = draw(st.integers(1, most_ops))
    ops = []
    for i in range(count):
        after = [f"t{j % 3}.m{j}" for j in range(i) if draw(st.integers(0, 3)) == 0]
        ops.append(op(f"t{i % 3}.m{i}", draw(st.integers(1, 9)), after, draw(curves(devices))))
    return problem(*ops, devices=devices)
