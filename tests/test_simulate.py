"""Simulated iterations against times worked out by hand, and what holds for any program."""

import itertools
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spindle.cluster import Cluster, Link
from lightning_spindle.costs import MeasuredCosts
from lightning_spindle.graph import Layout, Operator, OperatorGraph, Parameter, Reduction, Result, Value
from lightning_spindle.program import Instruction, Kind, Program, ProgramRun, holders, lower
from lightning_spindle.simulate import ProgramError, simulate
from lightning_spindle.timeline import Category, Timeline
from tests.support.programs import Sample, samples

FREE = Link(0.0, float("inf"))
ROWS = 8


def graph_of(*tasks: tuple[str, int], bytes_: int = 800, shared: bool = False) -> OperatorGraph:
    """A chain of operators for each (task, length); each has a weight of 100 bytes and keeps 1000."""
    operators, values, parameters, results = [], [], {}, []
    for task, length in tasks:
        for k in range(length):
            weight = f"w{k}" if shared else f"{task}.w{k}"
            parameters[weight] = Parameter(weight, 100, True)
            inputs = (f"{task}/v{k - 1}",) if k else ()
            operators.append(
                Operator(
                    f"{task}/{k}", task, "s", Layout.SPLIT, inputs, (f"{task}/v{k}",), (weight,), 1e9, 1000
                )
            )
            values.append(Value(f"{task}/v{k}", 0, 1, bytes_, True))
        results.append(Result(task, "loss", f"{task}/v{length - 1}", Reduction.MEAN))
    rows = tuple((task, ROWS) for task, _ in tasks)
    return OperatorGraph(tuple(operators), tuple(values), tuple(parameters.values()), tuple(results), rows)


def program_of(graph: OperatorGraph, groups: Mapping[str, tuple[int, ...]], devices: int) -> Program:
    runs = tuple(
        ProgramRun(i, o.name, o.task, (o.name,), groups[o.name], o.layout)
        for i, o in enumerate(graph.operators)
    )
    trainable = [p.name for p in graph.parameters]
    return lower(runs, graph, devices, holders([(runs, graph)]), trainable=trainable)


def costs_of(graph: OperatorGraph, devices: int, link: Link = FREE, **more: Any) -> MeasuredCosts:
    """Forward takes 1 ms a row, backward 2 ms."""
    cores = more.pop("cores", None)
    samples_ = {o.name: {ROWS: (float(ROWS), 2.0 * ROWS)} for o in graph.operators}
    more.setdefault("collectives", {2: (0.0, float("inf"))})
    return MeasuredCosts(graph, Cluster(devices, devices, link, link, cores=cores), samples_, **more)


def only(
    timeline: Timeline, instruction: str, rank: int, category: Category | None = None
) -> tuple[float, float]:
    """Start and end, in ms."""
    (found,) = [
        e
        for e in timeline.on(rank)
        if e.instruction == instruction and (category is None or e.category is category)
    ]
    return round(found.start_s * 1e3, 9), round(found.end_s * 1e3, 9)


def test_one_device_takes_the_sum_of_its_work() -> None:
    graph = graph_of(("a", 3))
    program = program_of(graph, {f"a/{k}": (0,) for k in range(3)}, 1)
    timeline = simulate(program, costs_of(graph, 1, optimizer_s_per_byte=1e-5))
    assert timeline.span_s == pytest.approx(3 * 0.008 + 3 * 0.016 + 300e-5)
    assert [e.category for e in timeline.events] == [
        *[Category.FORWARD] * 3,
        *[Category.BACKWARD] * 3,
        Category.OPTIMIZER,
    ]
    assert timeline.busy_share(0) == pytest.approx(1.0)


def test_a_message_takes_its_link_and_the_consumer_waits() -> None:
    """Alone on its device, b can start when a's 800 bytes have come: 8 + (1 + 0.8) ms."""
    graph = graph_of(("a", 2))
    program = program_of(graph, {"a/0": (0,), "a/1": (1,)}, 2)
    timeline = simulate(program, costs_of(graph, 2, Link(1e-3, 1e6)))
    assert only(timeline, "F0", 0) == (0.0, 8.0)
    assert only(timeline, "A0:0>0", 0) == only(timeline, "A0:0>0", 1) == (8.0, 9.8)
    assert only(timeline, "F1", 1, Category.WAIT) == (0.0, 9.8)
    assert only(timeline, "F1", 1, Category.FORWARD) == (9.8, 17.8)
    assert only(timeline, "X", 0, Category.WAIT) == (8.0, 17.8)
    assert only(timeline, "B1", 1) == (17.8, 33.8)
    assert only(timeline, "G0:0>0", 1) == (33.8, 35.6)
    assert only(timeline, "B0", 0, Category.BACKWARD) == (35.6, 51.6)
    assert timeline.span_s == pytest.approx(0.0516)


def test_a_split_run_takes_its_share_of_the_rows_and_sends_only_what_is_needed() -> None:
    """Rows 0-3 on device 0, 4-7 on device 1; the next run has all rows on device 1."""
    graph = graph_of(("a", 2))
    program = program_of(graph, {"a/0": (0, 1), "a/1": (1,)}, 2)
    timeline = simulate(program, costs_of(graph, 2, Link(0.0, 1e6)))
    assert only(timeline, "F0", 1) == (0.0, 4.0)
    assert only(timeline, "A0:0>0", 0) == (4.0, 4.4)
    assert only(timeline, "F1", 1, Category.FORWARD) == (4.4, 12.4)


def test_this_iterations_rows_count() -> None:
    graph = graph_of(("a", 2), ("b", 1))
    program = program_of(graph, {"a/0": (0, 1), "a/1": (0, 1), "b/0": (1,)}, 2)
    costs = costs_of(graph, 2)
    assert simulate(program, costs).span_s == pytest.approx(3 * (4 + 4 + 8) / 1e3)
    assert simulate(program, costs, {"a": 2}).span_s == pytest.approx(3 * 2 / 1e3)
    one_row = simulate(program, costs, {"a": 1, "b": 0})
    assert one_row.span_s == pytest.approx(6 / 1e3)
    assert one_row.busy_share(0) == 0.0  # rows [0, 0) and [0, 1)


def test_messages_out_of_one_device_go_one_at_a_time() -> None:
    graph = graph_of(("a", 2))
    program = program_of(graph, {"a/0": (0,), "a/1": (1, 2)}, 3)
    timeline = simulate(program, costs_of(graph, 3, Link(0.0, 1e5)))
    assert only(timeline, "A0:0>0", 1) == (8.0, 12.0)
    assert only(timeline, "A0:0>1", 2) == (12.0, 16.0)


def test_messages_between_other_devices_do_not_disturb_each_other() -> None:
    graph = graph_of(("a", 2), ("b", 2))
    program = program_of(graph, {"a/0": (0,), "a/1": (1,), "b/0": (2,), "b/1": (3,)}, 4)
    timeline = simulate(program, costs_of(graph, 4, Link(0.0, 1e5)))
    assert only(timeline, "A0:0>0", 1) == only(timeline, "A1:0>0", 3) == (8.0, 16.0)


def test_a_message_moves_while_both_ends_compute() -> None:
    """a/0 on device 0 sends to device 1, while 0 goes on with b/0 and 1 with c/0."""
    operators = [
        Operator("a/0", "a", "s", Layout.SPLIT, (), ("x",)),
        Operator("b/0", "b", "s", Layout.SPLIT, (), ("y",)),
        Operator("c/0", "c", "s", Layout.SPLIT, (), ("z",)),
        Operator("a/1", "a", "s", Layout.SPLIT, ("x",), ("u",)),
    ]
    values = tuple(Value(v, 0, 1, 800, True) for v in ("x", "y", "z", "u"))
    graph = OperatorGraph(tuple(operators), values, rows=(("a", 8), ("b", 8), ("c", 16)))
    groups = ((0,), (0,), (1,), (1,))
    runs = tuple(
        ProgramRun(i, o.name, o.task, (o.name,), groups[i], o.layout) for i, o in enumerate(operators)
    )
    program = lower(runs, graph, 2, {}, trainable=None)
    timeline = simulate(program, costs_of(graph, 2, Link(0.0, 1e5)))
    assert only(timeline, "A0:0>0", 1) == (8.0, 16.0)
    assert only(timeline, "F3", 1) == (16.0, 24.0)
    assert timeline.breakdown(1)["wait"] == 0.0
    assert timeline.breakdown(1)["transfer"] == 0.0  # hidden behind computing
    assert timeline.span_s == pytest.approx(0.024)


def test_a_bucket_is_summed_beside_the_backward_that_follows() -> None:
    """The last operator's gradient sum (10 ms) hides behind the first one's backward (8 ms a shard)."""
    graph = graph_of(("a", 2))
    runs = tuple(
        ProgramRun(i, o.name, o.task, (o.name,), (0, 1), o.layout) for i, o in enumerate(graph.operators)
    )
    program = lower(runs, graph, 2, holders([(runs, graph)]), trainable=["a.w0", "a.w1"], bucket_bytes=1)
    costs = costs_of(graph, 2, collectives={2: (9e-3, 1e5)})
    timeline = simulate(program, costs)
    exchange = 9e-3 + 1024 / 1e5
    forward = 0.008 + exchange
    assert only(timeline, "R0", 0) == tuple(round(1e3 * (forward + t), 9) for t in (0.008, 0.018))
    assert only(timeline, "R1", 1) == tuple(round(1e3 * (forward + t), 9) for t in (0.018, 0.028))
    assert timeline.span_s == pytest.approx(forward + 0.028)
    assert timeline.breakdown(0)["sync"] == pytest.approx(exchange + 0.012)


@pytest.mark.parametrize(("cores", "expected"), [(None, 24.0), (4, 24.0), (3, 24.0), (2, 36.0), (1, 72.0)])
def test_ranks_that_compute_at_once_share_the_cores(cores: int | None, expected: float) -> None:
    graph = graph_of(("a", 1), ("b", 1), ("c", 1))
    program = program_of(graph, {"a/0": (0,), "b/0": (1,), "c/0": (2,)}, 3)
    timeline = simulate(program, costs_of(graph, 3, cores=cores))
    assert timeline.span_s * 1e3 == pytest.approx(expected)


def test_a_rank_alone_has_a_whole_core_again() -> None:
    """8 and 16 rows on one core: both at half speed for 16 ms, then 8 ms alone."""
    graph = graph_of(("a", 1), ("b", 1))
    program = program_of(graph, {"a/0": (0,), "b/0": (1,)}, 2)
    timeline = simulate(program, costs_of(graph, 2, cores=1), {"a": 8, "b": 16})
    assert only(timeline, "F0", 0) == (0.0, 16.0)
    assert only(timeline, "F1", 1) == (0.0, 24.0)


def test_machines_do_not_share_cores_with_each_other() -> None:
    graph = graph_of(("a", 1), ("b", 1))
    program = program_of(graph, {"a/0": (0,), "b/0": (1,)}, 2)
    given_ = {o.name: {ROWS: (8.0, 16.0)} for o in graph.operators}
    costs = MeasuredCosts(graph, Cluster(2, 1, FREE, FREE, cores=1), given_, {2: (0.0, float("inf"))})
    assert simulate(program, costs).span_s == pytest.approx(0.024)


def memory_on(timeline: Timeline, rank: int) -> list[tuple[float, int]]:
    """Times in ms, and bytes held from then on."""
    return [(round(m.time_s * 1e3, 6), m.bytes) for m in timeline.memory if m.rank == rank]


def test_memory_holds_parameters_gradients_and_activations() -> None:
    """State is 400 bytes a weight; 100 of them, its gradient, from its backward to the next forwards' end.

    Of 1000 bytes that an operator keeps each shard has its part, until its backward has ended.
    """
    graph = graph_of(("a", 2))
    program = program_of(graph, {"a/0": (0, 1), "a/1": (1,)}, 2)
    timeline = simulate(program, costs_of(graph, 2))
    assert memory_on(timeline, 0) == [(0.0, 400 + 500), (12.0, 300 + 500), (36.0, 400)]
    assert memory_on(timeline, 1) == [
        (0.0, 800 + 500),
        (4.0, 800 + 1500),
        (12.0, 600 + 1500),
        (28.0, 700 + 500),
        (36.0, 800),
    ]
    assert (timeline.peak_bytes(0), timeline.peak_bytes(1)) == (900, 2300)


def test_gradients_that_are_being_summed_are_there_twice() -> None:
    """Both weights' sums take 9 ms and more; their copies go when the last is done."""
    graph = graph_of(("a", 2))
    runs = tuple(
        ProgramRun(i, o.name, o.task, (o.name,), (0, 1), o.layout) for i, o in enumerate(graph.operators)
    )
    program = lower(runs, graph, 2, holders([(runs, graph)]), trainable=["a.w0", "a.w1"], bucket_bytes=1)
    timeline = simulate(program, costs_of(graph, 2, collectives={2: (9e-3, 1e5)}))
    held = [size for _, size in memory_on(timeline, 0)]
    assert held == [800 + 500, 800 + 1000, 600 + 1000, 700 + 500 + 100, 800 + 200, 800]


def test_a_program_that_cannot_end_is_refused() -> None:
    graph = graph_of(("a", 2))
    program = program_of(graph, {"a/0": (0,), "a/1": (1,)}, 2)
    order = list(program.order)
    late = order.pop(1)
    assert str(late) == "A0:0>0"
    with pytest.raises(ProgramError, match=r"on rank 1 F1 \(a/1\) comes before A0:0>0"):
        simulate(replace(program, order=(*order, late)), costs_of(graph, 2))


# --------------------------------------------------------------------------------------- any program


def random_costs(sample: Sample, cores: int | None = None) -> MeasuredCosts:
    devices = sample.program.devices
    times = {o.name: {1: (3.0, 4.0), 6: (8.0 + len(o.inputs), 19.0)} for o in sample.graph.operators}
    cluster = Cluster(devices, max(1, devices // 2), Link(1e-4, 1e6), Link(1e-3, 1e5), cores=cores)
    return MeasuredCosts(
        sample.graph, cluster, times, {2: (1e-3, 1e6), 4: (3e-3, 5e5)}, optimizer_s_per_byte=1e-6
    )


def work_s(sample: Sample, costs: MeasuredCosts) -> float:
    rows, total = dict(sample.graph.rows), 0.0
    for run in sample.program.runs:
        for shard in range(len(run.devices)):
            a, b = run.rows(shard, rows[run.task])
            total += sum(costs.operator_s(o, b - a, back) for o in run.operators for back in (False, True))
    stepped = [sample.program.stepped(rank) for rank in range(sample.program.devices)]
    return total + sum(costs.optimizer_s(costs.trainable_bytes(names)) for names in stepped)


@settings(max_examples=60)
@given(samples(), st.sampled_from([None, 1, 2]))
def test_any_program_runs_through(sample: Sample, cores: int | None) -> None:
    costs = random_costs(sample, cores)
    timeline = simulate(sample.program, costs)
    assert timeline == simulate(sample.program, costs)
    computing = [e for e in timeline.events if e.category.computes]
    if cores is None:
        assert sum(e.duration_s for e in computing) == pytest.approx(work_s(sample, costs))
    for rank in range(sample.program.devices):
        serial = [e for e in timeline.on(rank) if e.category.computes or e.category is Category.WAIT]
        for before, after in itertools.pairwise(serial):
            assert after.start_s >= before.end_s - 1e-12
        for end in (0, 1):  # out of the device, into it: one message at a time
            moving = [
                e
                for e in timeline.on(rank)
                if e.category is Category.TRANSFER
                and sample.program.participants(Instruction.parse(e.instruction))[end] == rank
            ]
            for before, after in itertools.pairwise(moving):
                assert after.start_s >= before.end_s - 1e-12


@settings(max_examples=60)
@given(samples())
def test_fewer_cores_never_help_the_whole(sample: Sample) -> None:
    total = work_s(sample, random_costs(sample))
    machines = len({random_costs(sample).cluster.island(r) for r in range(sample.program.devices)})
    timeline = simulate(sample.program, random_costs(sample, 1))
    assert timeline.span_s >= total / machines - 1e-9


@settings(max_examples=60)
@given(samples())
def test_rows_come_before_the_operator_that_needs_them(sample: Sample) -> None:
    timeline = simulate(sample.program, random_costs(sample))
    starts = {(e.instruction, e.rank): e.start_s for e in timeline.events if e.category.computes}
    ends = {(e.instruction, e.rank): e.end_s for e in timeline.events if e.category.computes}
    for i in sample.program.order:
        if i.kind not in (Kind.ACTIVATION, Kind.GRADIENT):
            continue
        moved = [e for e in timeline.events if e.instruction == str(i)]
        if not moved:
            continue
        edge = sample.program.edges[i.index]
        sender, receiver = sample.program.participants(i)
        made, used = (f"F{edge.source}", f"F{edge.target}")
        if i.kind is Kind.GRADIENT:
            made, used = (f"B{edge.target}", f"B{edge.source}")
        assert ends[made, sender] <= moved[0].start_s + 1e-12
        assert moved[0].end_s <= starts[used, receiver] + 1e-12


def test_large_programs_take_seconds_and_small_ones_milliseconds() -> None:
    """Generous limits: 30 runs on 4 devices take about 3 ms, 1,000 on 64 less than half a second."""
    for tasks, layers, devices, limit_s in ((6, 5, 4, 0.2), (20, 50, 64, 5.0)):
        graph = graph_of(*((f"t{t}", layers) for t in range(tasks)), shared=True)
        groups = {
            o.name: tuple(range(at := (7 * i) % (devices // 4) * 4, at + 4))
            for i, o in enumerate(graph.operators)
        }
        program = program_of(graph, groups, devices)
        began = time.perf_counter()
        simulate(program, costs_of(graph, devices, Link(1e-5, 1e9)))
        assert time.perf_counter() - began < limit_s
