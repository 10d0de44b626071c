"""What shares the ways between islands: simulated transfers against times worked out by hand."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spindle.cluster import Cluster, Link
from lightning_spindle.costs import MeasuredCosts
from lightning_spindle.graph import OperatorGraph
from lightning_spindle.program import Instruction, Kind
from lightning_spindle.simulate import simulate
from lightning_spindle.timeline import Category, Timeline
from tests.support.programs import Sample, samples
from tests.test_simulate import FREE, ROWS, graph_of, only, program_of

SLOW = Link(0.0, 1e5)
"""800 bytes take 8 ms."""


def run(
    graph: OperatorGraph,
    groups: Mapping[str, tuple[int, ...]],
    cluster: Cluster,
    rows: Mapping[str, int] | None = None,
    sum_s: float = 0.0,
) -> Timeline:
    """Forward takes 1 ms a row; ``sum_s`` a byte of a sum over any group."""
    times = {o.name: {ROWS: (float(ROWS), 2.0 * ROWS)} for o in graph.operators}
    collectives = {2: (0.0, 1 / sum_s if sum_s else float("inf"))}
    costs = MeasuredCosts(graph, cluster, times, collectives)
    return simulate(program_of(graph, groups, cluster.devices), costs, rows)


def two_islands(devices: int, uplink_bytes_per_s: float = 1e5, inside: Link = FREE) -> Cluster:
    return Cluster(devices, devices // 2, inside, SLOW, uplink_bytes_per_s=uplink_bytes_per_s)


PAIRS = {"a/0": (0,), "a/1": (2,), "b/0": (1,), "b/1": (3,)}
"""Two messages from island {0, 1} to island {2, 3}, of different devices."""


def test_messages_over_one_uplink_share_it() -> None:
    graph = graph_of(("a", 2), ("b", 2))
    timeline = run(graph, PAIRS, two_islands(4))
    assert only(timeline, "A0:0>0", 0) == only(timeline, "A1:0>0", 3) == (8.0, 24.0)


@pytest.mark.parametrize("uplink", [2e5, float("inf")])
def test_an_uplink_that_carries_both_slows_neither(uplink: float) -> None:
    graph = graph_of(("a", 2), ("b", 2))
    timeline = run(graph, PAIRS, two_islands(4, uplink))
    assert only(timeline, "A0:0>0", 2) == only(timeline, "A1:0>0", 3) == (8.0, 16.0)


def test_a_message_is_fast_again_when_it_is_alone() -> None:
    """b's 6 rows are ready at 6 ms and would take 6: 2 at full speed, and 4 that take 8 beside a's.

    a's 8 rows go from 8 ms: 4 of their 8 ms are through when b's are, at 16, the others at full speed.
    """
    graph = graph_of(("a", 2), ("b", 2))
    timeline = run(graph, PAIRS, two_islands(4), {"a": 8, "b": 6})
    assert only(timeline, "A1:0>0", 1) == (6.0, 16.0)
    assert only(timeline, "A0:0>0", 0) == (8.0, 20.0)


def test_directions_and_insides_are_ways_of_their_own() -> None:
    graph = graph_of(("a", 2), ("b", 2), ("c", 2))
    groups = {"a/0": (0,), "a/1": (3,), "b/0": (4,), "b/1": (1,), "c/0": (2,), "c/1": (5,)}
    timeline = run(graph, {**groups, "c/1": (0,)}, two_islands(6, inside=SLOW))
    for instruction, rank in (("A0:0>0", 3), ("A1:0>0", 1), ("A2:0>0", 2)):
        assert only(timeline, instruction, rank) == (8.0, 16.0)


def test_a_sum_and_a_message_share_an_uplink() -> None:
    """The bucket of w (100 bytes over devices 0 and 2) takes 16 ms alone; b's gradient goes the same ways."""
    graph = graph_of(("a", 1), ("b", 2))
    groups = {"a/0": (0, 2), "b/0": (3,), "b/1": (1,)}
    alone = run(graph, groups, two_islands(4, float("inf")), {"a": 8, "b": 4}, sum_s=16e-5)
    shared = run(graph, groups, two_islands(4), {"a": 8, "b": 4}, sum_s=16e-5)
    start, end = only(alone, "R0", 0)
    gradient = only(alone, "G0:0>0", 1)
    assert end - start == pytest.approx(16.0)
    assert gradient == (start, start + 4.0)
    # Demands: 100 bytes in 16 ms and 400 in 4 ms, together 106,250 bytes/s of 100,000.
    slower = 1.0625
    assert only(shared, "G0:0>0", 1) == pytest.approx((start, start + 4.0 * slower))
    assert only(shared, "R0", 2) == pytest.approx((start, start + 16.0 + 4.0 * (slower - 1.0)))


@settings(max_examples=60)
@given(samples(), st.sampled_from([1.0, 1.5, 4.0]))
def test_no_uplink_carries_more_than_it_can(sample: Sample, factor: float) -> None:
    devices = sample.program.devices
    link = Link(0.0, 1e5)
    cluster = Cluster(devices, max(1, devices // 3), link, link, uplink_bytes_per_s=factor * 1e5)
    times = {o.name: {1: (1.0, 1.0)} for o in sample.graph.operators}
    costs = MeasuredCosts(sample.graph, cluster, times, {2: (0.0, 1e5)})
    moved: dict[tuple[int, int], float] = {}
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in simulate(sample.program, costs).events:
        if e.category is not Category.TRANSFER:
            continue
        i = Instruction.parse(e.instruction)
        sender, receiver = sample.program.participants(i)
        ends = cluster.island(sender), cluster.island(receiver)
        if ends[0] == ends[1] or e.rank != sender:
            continue
        edge = sample.program.edges[i.index]
        task = sample.program.runs[edge.source].task
        first, last = sample.program.shared_rows(edge, i.source, i.target, costs.example_rows(task))
        size = costs.value_bytes(edge.value, task, last - first)
        assert e.duration_s >= size / link.bytes_per_s - 1e-12
        assert i.kind in (Kind.ACTIVATION, Kind.GRADIENT)
        for key in ((ends[0], 0), (ends[1], 1)):
            moved[key] = moved.get(key, 0.0) + size
            spans.setdefault(key, []).append((e.start_s, e.end_s))
    for key, size in moved.items():
        busy_s, until_s = 0.0, 0.0
        for start_s, end_s in sorted(spans[key]):
            busy_s += max(0.0, end_s - max(start_s, until_s))
            until_s = max(until_s, end_s)
        assert size <= cluster.uplink_bytes_per_s * busy_s + 1e-6
