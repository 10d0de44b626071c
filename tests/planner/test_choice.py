"""The planner is chosen by what the simulator says of its plan."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spindle.cluster import Cluster, Link
from lightning_spindle.costs import Costs
from lightning_spindle.graph import Layout, MetaGraph, OperatorGraph, Reduction, Result
from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.planner import PLANNERS, LayerTime, PlannedOp, PlanningProblem, plan
from lightning_spindle.planner import choice as choice_module
from lightning_spindle.planner.choice import Workload, choose
from lightning_spindle.planner.contraction import contract
from tests.planner.graphs import GraphBuilder

OTHERS = tuple(name for name in PLANNERS if name != "search")
ROWS = 8


@dataclass(frozen=True, eq=False)
class HandCosts(Costs):
    """A millisecond for each GFLOP and row share, backward twice that; sums cost their bytes."""

    def operator_s(self, operator: str, rows: int, backward: bool) -> float:
        flops = self.graph.operator_map()[operator].forward_flops
        share = rows / self.example_rows(self.graph.operator_map()[operator].task)
        return flops * 1e-3 * (0.2 + 0.8 * share) * (2 if backward else 1) if rows else 0.0

    def all_reduce_s(self, size_bytes: int, devices) -> float:
        return self.cluster.group_link(devices).seconds(size_bytes) if len(devices) > 1 else 0.0

    def optimizer_s(self, parameter_bytes: int) -> float:
        return 1e-12 * parameter_bytes


def workload(towers: list[tuple[int, float]], devices: int = 4, memory: int | None = None):
    """A task for each (layers, flops): a tower and a loss over its whole batch; and its problem."""
    b = GraphBuilder()
    results = []
    for i, (layers, flops) in enumerate(towers):
        task = f"t{i}"
        end = b.tower(task, f"tower{i}", layers, flops=flops, stem=False, norm=False)
        loss = b.add(task, "loss", "loss", [end], flops=0.1, layout=Layout.WHOLE, shared=False)
        results.append(Result(task, "loss", loss, Reduction.MEAN))
        b.rows[task] = ROWS
    graph = OperatorGraph(
        tuple(b.operators),
        tuple(b.values),
        tuple(b.parameters.values()),
        tuple(results),
        tuple(b.rows.items()),
    )
    cluster = Cluster(devices, 2, Link(1e-5, 1e11), Link(1e-4, 1e10), memory)
    costs = HandCosts(graph, cluster)
    metagraph = contract(graph)
    trainable = frozenset(p.name for p in graph.parameters)
    return Workload(metagraph, graph, costs, trainable), as_problem(metagraph, graph, costs, cluster)


def as_problem(metagraph: MetaGraph, graph: OperatorGraph, costs: Costs, cluster: Cluster):
    parameters = {o.name: o.parameters for o in graph.operators}

    def layer_ms(m, n: int, backward: bool) -> float:
        seconds = sum(costs.operator_s(o, ROWS // n, backward) for layer in m.layers for o in layer)
        return 1e3 * seconds / len(m.layers)

    def allocations(m):
        return (1,) if m.layout is Layout.WHOLE else (1, 2, 4)

    ops = [
        PlannedOp(
            m.name,
            m.task,
            len(m.layers),
            m.after,
            ROWS,
            tuple((n, LayerTime(layer_ms(m, n, False), layer_ms(m, n, True))) for n in allocations(m)),
            m.layout,
            tuple(tuple(p for o in layer for p in parameters[o]) for layer in m.layers),
            layer_flow_bytes=m.layer_flow_bytes,
        )
        for m in metagraph.metaops
    ]
    sizes = tuple((p.name, p.bytes) for p in graph.parameters)
    return PlanningProblem("hand", tuple(ops), cluster, metagraph.flows, sizes)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0.5, 20.0)), min_size=1, max_size=3))
def test_the_choice_is_never_slower_in_simulation_than_any_planner(towers):
    work, p = workload(towers)
    chosen = choose(p, work, OTHERS)
    times = {name: work.iteration_ms(plan(p, name)) for name in OTHERS}
    assert dict(chosen.iteration_ms) == pytest.approx(times)
    assert work.iteration_ms(chosen.plan) == min(times.values())
    assert [ms for _, ms in chosen.iteration_ms] == sorted(times.values())


def test_search_is_judged_by_the_same_measure():
    work, p = workload([(3, 4.0), (2, 9.0), (4, 1.0)])
    chosen = choose(p, work, time_limit_s=None)
    assert {name for name, _ in chosen.iteration_ms} == set(PLANNERS)
    times = dict(chosen.iteration_ms)
    assert times["search"] <= min(times.values()) * (1 + 1e-9)
    assert str(chosen).startswith(f"planner {chosen.plan.planner} was chosen by simulated iteration time")


def test_the_plan_that_looks_shorter_loses_where_it_runs_longer(monkeypatch):
    """A makespan is a promise; the simulator decides."""
    work, p = workload([(2, 4.0), (2, 4.0)])
    honest = plan(p, "spindle")
    serial = plan(p, "seq")
    boastful = ExecutionPlan("boastful", serial.devices, serial.runs, 0.001)
    slower = max(work.iteration_ms(honest), work.iteration_ms(serial))
    planners = {"honest": lambda *_, **__: honest, "boastful": lambda *_, **__: boastful}
    monkeypatch.setattr(choice_module, "PLANNERS", planners)
    chosen = choose(p, work, planners)
    assert work.iteration_ms(chosen.plan) < slower
    assert chosen.iteration_ms[-1][1] == slower


def test_a_planner_that_refuses_is_passed_over(monkeypatch):
    def refuses(problem, *, time_limit_s=None, seed=0):
        raise ValueError("MetaOp t0.tower0 does not fit")

    work, p = workload([(2, 4.0), (2, 4.0)])
    monkeypatch.setattr(choice_module, "PLANNERS", {**PLANNERS, "picky": refuses})
    chosen = choose(p, work, ("picky", "seq"))
    assert chosen.plan.planner == "seq"
    assert [name for name, _ in chosen.iteration_ms] == ["seq"]
    with pytest.raises(ValueError, match=r"MetaOp t0\.tower0 does not fit"):
        choose(p, work, ("picky",))


def test_memory_decides_among_planners():
    """On all devices every layer is everywhere: with room for half of it only task-wise plans remain."""
    _, free = workload([(4, 4.0), (4, 4.0)])
    held = sum(size for _, size in free.parameter_bytes) * 4
    work, p = workload([(4, 4.0), (4, 4.0)], memory=int(0.7 * held))
    chosen = choose(p, work, OTHERS)
    assert "seq" not in dict(chosen.iteration_ms)
    assert {"uniform", "optimus"} <= set(dict(chosen.iteration_ms))
