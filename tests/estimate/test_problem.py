"""From samples to planning problems: pure, on the hand-written graph."""

from dataclasses import replace

import pytest

from lightning_spindle.cluster import Cluster, Link
from lightning_spindle.estimate.problem import cluster_from, layer_times, measured_costs, planning_problem
from lightning_spindle.estimate.samples import LinkSamples, Samples
from lightning_spindle.graph import Flow, Layout, OperatorGraph
from lightning_spindle.plan import Configuration, Run
from lightning_spindle.planner import LayerTime, plan
from lightning_spindle.planner.placement import memory_per_device
from tests.support import handmade

GRAPH = handmade.capture(handmade.Handmade()).graph
META = handmade.metagraph()
LINKS = LinkSamples(Link(1e-4, 1e9), None, {2: Link(1e-3, 1e9)}, 1e-3)


def samples(devices: int, busy: int = 1, cores: int | None = None) -> Samples:
    """Every operator takes 1 ms + 1 ms a row, backward twice that."""
    found = {}
    for o in GRAPH.operators:
        batch = handmade.ROWS[o.task]
        counts = [1] if o.layout is Layout.WHOLE else range(1, devices + 1)
        rows = {-(-batch // n) for n in counts}
        found[o.name] = {r: LayerTime(1.0 + r, 2.0 * (1.0 + r)) for r in rows}
    return Samples(found, LINKS, busy, cores, 2)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("any_allocation", [False, True])
def test_problem_is_planned(devices: int, any_allocation: bool) -> None:
    given = samples(devices)
    problem = planning_problem(
        "handmade", META, GRAPH, given, cluster_from(given, devices), any_allocation=any_allocation
    )
    made = plan(problem, "spindle")
    assert {r.metaop for r in made.runs} == set(handmade.METAOPS)
    assert problem.metaop("pair/loss").allocations == (1,)
    image = problem.metaop("pair/image")
    expected = range(1, devices + 1) if any_allocation else [n for n in (1, 7) if n <= devices]
    assert image.allocations == tuple(expected)
    for n in image.allocations:
        rows = -(-7 // n)
        assert image.time(n) == LayerTime(1.0 + rows, 2.0 * (1.0 + rows))


def test_problem_knows_parameters_and_flows() -> None:
    flow = Flow("pair/image", "pair/loss", 336)
    given = samples(2)
    problem = planning_problem("h", replace(META, flows=(flow,)), GRAPH, given, cluster_from(given, 2))
    assert problem.flows == (flow,)
    assert problem.metaop("pair/text").layer_parameters == problem.metaop("score/text").layer_parameters
    sizes = dict(problem.parameter_bytes)
    assert sizes["text.0.linear.weight"] == 6 * 6 * 8
    assert not any(name.startswith("unused") for name in sizes)


def test_allocations_without_samples_come_from_the_curve() -> None:
    """The budget may end before small shards are measured."""
    given = samples(2)
    problem = planning_problem("h", META, GRAPH, given, cluster_from(given, 7), any_allocation=True)
    image = problem.metaop("pair/image")
    assert image.allocations == tuple(range(1, 8))
    for n, time in image.times:
        rows = -(-7 // n)
        assert time.total_ms == pytest.approx(3.0 * (1.0 + rows), rel=1e-6)


def test_one_sample_is_divisible_work() -> None:
    given = samples(1)
    times = planning_problem("h", META, GRAPH, given, cluster_from(given, 7)).metaop("pair/image").times
    assert [n for n, _ in times] == [1, 7]
    assert times[1][1].total_ms == pytest.approx(times[0][1].total_ms / 7)


def test_layer_times_add_a_layers_operators_and_average_layers() -> None:
    merged = replace(META.metaop("pair/image"), layers=(("pair/image.0", "pair/image.1"), ("pair/text.0",)))
    assert layer_times(merged, samples(1)) == {7: LayerTime(12.0, 24.0)}


def test_an_operator_that_was_not_measured_is_named() -> None:
    given = samples(2)
    some = {k: v for k, v in given.operators.items() if k != "pair/text.1"}
    with pytest.raises(ValueError, match=r"pair/text: no sample of operator pair/text\.1"):
        planning_problem("h", META, GRAPH, replace(given, operators=some), cluster_from(given, 2))


def test_frozen_parameters_count_once_in_memory() -> None:
    frozen = tuple(replace(p, trainable=False) for p in GRAPH.parameters)
    graph = OperatorGraph(GRAPH.operators, GRAPH.values, frozen, GRAPH.results, GRAPH.rows)
    given = samples(2)
    problem = planning_problem("h", META, graph, given, cluster_from(given, 2))
    assert dict(problem.parameter_bytes)["text.0.linear.weight"] == 6 * 6 * 8
    assert "text.0.linear.weight" in problem.frozen
    op = problem.metaop("plain/plain")
    runs = [Run(op.name, 0, 1, (1,), 0.0, op.time(1).total_ms, Configuration(1))]
    assert memory_per_device(runs, problem) == (0.0, (6 * 6 + 6) * 8)
    assert all(m.activation_bytes == 0 for m in problem.metaops)


def test_costs_for_the_simulator_are_free_of_shared_cores() -> None:
    given = samples(4, busy=4, cores=2)
    cluster = cluster_from(given, 4, cores=2)
    costs = measured_costs(GRAPH, cluster, given)
    assert costs.operator_s("pair/image.0", 7, False) == pytest.approx(0.004)
    assert costs.all_reduce_s(0, (0, 1)) == pytest.approx(1e-3)
    assert cluster == Cluster(4, 4, LINKS.inside, LINKS.inside, None, 2)
    problem = planning_problem("h", META, GRAPH, given, cluster)
    assert problem.metaop("pair/image").time(1) == LayerTime(8.0, 16.0)
