"""The engine on virtual devices: what it does by itself, and what the simulator says that it does."""

import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarking.simulated import Cell
from lightning_spindle.cluster import Cluster, Link
from lightning_spindle.costs import A800, AnalyticCosts, MeasuredCosts
from lightning_spindle.emulate import emulate
from lightning_spindle.emulate.clocks import Clocks, EmulationError
from lightning_spindle.emulate.network import Network
from lightning_spindle.planner import plan
from lightning_spindle.program import Program
from lightning_spindle.runtime.engine import InstructionError
from lightning_spindle.simulate import simulate
from lightning_spindle.timeline import Timeline
from tests.support.programs import Sample, samples
from tests.support.scaled import multitask_clip
from tests.test_simulate import costs_of, graph_of, only, program_of


def chain(devices: int, groups: dict[str, tuple[int, ...]], link: Link) -> tuple[Program, MeasuredCosts]:
    """A task of operators that take 1 ms a row forward and 2 ms backward, its loss a scalar."""
    graph = graph_of(("a", len(groups)))
    last = graph.values[-1].name
    scalar = tuple(replace(v, dim=None, bytes=4) if v.name == last else v for v in graph.values)
    graph = replace(graph, values=scalar)
    return program_of(graph, groups, devices), costs_of(graph, devices, link, optimizer_s_per_byte=1e-5)


def test_clocks_show_what_is_worked_out_by_hand() -> None:
    """8 ms of forward, a message of 1.8, 8 of forward; 16 of backward, a message of 1.8, 16; a step of 1."""
    program, costs = chain(2, {"a/0": (0,), "a/1": (1,)}, Link(1e-3, 1e6))
    timeline = emulate(program, costs)
    assert (timeline.source, timeline.devices) == ("emulated", 2)
    assert only(timeline, "F0", 0) == (0.0, 8.0)
    assert [round(e.end_s * 1e3, 9) for e in timeline.on(1)] == [9.8, 17.8, 33.8, 35.6, 36.6]
    assert [str(e.category) for e in timeline.on(1)] == ["wait", "forward", "backward", "sync", "optimizer"]
    assert timeline.span_s == pytest.approx(0.0526)


def test_an_iteration_without_gradients_ends_with_the_exchange() -> None:
    program, costs = chain(2, {"a/0": (0, 1), "a/1": (1,)}, Link(0.0, 1e6))
    forward = tuple(i for i in program.order if str(i)[0] in "FAX")
    only_forward = replace(program, order=forward, buckets=())
    assert emulate(only_forward, costs).span_s == pytest.approx(4e-3 + 0.4e-3 + 8e-3)
    assert emulate(only_forward, costs, {"a": 2}).span_s == pytest.approx(1e-3 + 0.1e-3 + 2e-3)


def test_devices_that_share_cores_are_refused() -> None:
    graph = graph_of(("a", 1))
    with pytest.raises(ValueError, match="devices that share cores cannot be emulated"):
        emulate(program_of(graph, {"a/0": (0,)}, 1), costs_of(graph, 1, cores=2))


def test_a_rank_that_fails_ends_the_others() -> None:
    program, costs = chain(3, {"a/0": (0,), "a/1": (1,), "a/2": (2,)}, Link(1e-3, 1e6))
    order = [i for i in program.order if str(i) != "A1:0>0"]
    with pytest.raises(InstructionError, match=r"rank 2, F2"):
        emulate(replace(program, order=tuple(order)), costs)


def test_ranks_that_wait_for_each_other_are_told_so() -> None:
    """Two ranks wait for a message from one another that neither sends."""
    network = Network(costs_of(graph_of(("a", 1)), 2))
    clocks = Clocks(2, network, limit_s=30.0)
    errors: list[Any] = []

    def receive(rank: int) -> None:
        try:
            now_s = clocks.take_turn(rank)
            clocks.wait(rank, network.message(now_s, rank, rank, 1 - rank, rank, 8.0))
        except EmulationError as e:
            errors.append(str(e))

    threads = [threading.Thread(target=receive, args=(r,)) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10.0)
    assert errors == ["another rank failed: ranks wait for each other for ever"] * 2


# ---------------------------------------------------------------------------------------- the simulator


def costs_for(sample: Sample, uplink: float) -> MeasuredCosts:
    """Times that depend on the operator; what has no backward takes no time in it."""
    devices = sample.program.devices
    passing = AnalyticCosts(sample.graph, Cluster.ideal(devices)).has_backward
    times = {
        o.name: {
            1: (3.0 + 0.017 * k, (4.1 + 0.013 * k) * passing(o.name)),
            6: (8.0 + 0.19 * k, (19.0 + 0.23 * k) * passing(o.name)),
        }
        for k, o in enumerate(sample.graph.operators)
    }
    inside, between = Link(1.03e-4, 1.07e6), Link(1.01e-3, 1.09e5)
    cluster = Cluster(devices, max(1, devices // 2), inside, between, uplink_bytes_per_s=uplink * 1.09e5)
    collectives = {2: (1.3e-3, 1.1e6), 4: (3.1e-3, 5.3e5)}
    return MeasuredCosts(sample.graph, cluster, times, collectives, optimizer_s_per_byte=1.7e-6)


def computing(timeline: Timeline) -> list[tuple[int, str, float, float]]:
    """What each rank computed when, to a nanosecond."""
    found = [e for e in timeline.events if e.category.computes]
    return sorted((e.rank, e.instruction, round(e.start_s, 9), round(e.end_s, 9)) for e in found)


@settings(max_examples=25, deadline=None)
@given(samples(), st.sampled_from([1.0, 1.6, float("inf")]))
def test_the_simulator_foretells_every_event_of_any_program(sample: Sample, uplink: float) -> None:
    costs = costs_for(sample, uplink)
    simulated, emulated = simulate(sample.program, costs), emulate(sample.program, costs)
    assert simulated.span_s == pytest.approx(emulated.span_s)
    for ours, theirs in zip(computing(simulated), computing(emulated), strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2:] == pytest.approx(theirs[2:], abs=2e-9)


@pytest.mark.parametrize("planner", ["spindle", "seq"])
def test_simulated_and_emulated_iterations_of_a_workload_agree(planner: str) -> None:
    """On 8 A800s in two nodes of 4; ``python benchmark.py mode=emulated`` has all workloads and sizes."""
    costs = AnalyticCosts(multitask_clip(4), A800.cluster(8, island_size=4))
    cell = Cell("multitask_clip", 4, "a800", costs)
    program = cell.step.program(plan(cell.problem, planner))
    assert simulate(program, costs).span_s == pytest.approx(emulate(program, costs).span_s, rel=0.02)
