"""What a program makes each rank do, against the plan itself: no notion of the lowering is used."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spindle.graph import Layout, Operator, OperatorGraph, Parameter, Reduction, Result, Value
from lightning_spindle.program import Kind, ProgramRun, holders, lower
from lightning_spindle.work import Traffic, rank_work
from tests.support.programs import Sample, samples


def sizes_by_row(graph: OperatorGraph) -> OperatorGraph:
    """The graph with values whose bytes divide by the rows, as those of real tensors do."""
    rows, producers, operators = dict(graph.rows), graph.producers(), graph.operator_map()
    values = tuple(
        replace(v, bytes=v.bytes * (1 if v.dim is None else rows[operators[producers[v.name]].task]))
        for v in graph.values
    )
    return replace(graph, values=values)


def shards(sample: Sample, rows: dict[str, int]) -> list[tuple[int, Operator, set[int]]]:
    """(rank, operator, rows of it) straight from the plan; EVERYWHERE operators are on all ranks."""
    operators = sample.graph.operator_map()
    found = []
    for run in sample.plan.runs:
        n = len(run.devices)
        for layer in sample.metagraph.metaop(run.metaop).layers[run.first : run.last]:
            for operator in map(operators.__getitem__, layer):
                count = rows[operator.task]
                for i, device in enumerate(run.devices):
                    found.append((device, operator, set(range(i * count // n, (i + 1) * count // n))))
    for operator in operators.values():
        if operator.layout is Layout.EVERYWHERE:
            everything = set(range(rows[operator.task]))
            found += [(device, operator, everything) for device in range(sample.plan.devices)]
    return found


@given(samples(), st.data())
def test_rows_and_flops_are_the_plans(sample: Sample, data: st.DataObject) -> None:
    example = dict(sample.graph.rows)
    rows = {task: data.draw(st.integers(0, 2 * count)) for task, count in example.items()}
    works = rank_work(sample.program, sample.graph, rows)
    expected = [dict[str, int]() for _ in works]
    flops = [0.0] * len(works)
    for rank, operator, mine in shards(sample, rows):
        if mine:
            expected[rank][operator.name] = len(mine)
            flops[rank] += operator.forward_flops * len(mine) / example[operator.task]
    assert [w.rows for w in works] == expected
    assert [w.forward_flops for w in works] == pytest.approx(flops)
    backward = {o.name: float(k) for k, o in enumerate(sample.graph.operators)}
    for work in rank_work(sample.program, sample.graph, rows, backward_flops=backward):
        share = sum(backward[o] * n / example[sample.graph.operator(o).task] for o, n in work.rows.items())
        assert work.backward_flops == pytest.approx(share)


@given(samples())
def test_ranks_together_do_what_one_process_does(sample: Sample) -> None:
    """Each operator's rows are seen once, by one rank each; only EVERYWHERE operators are repeated."""
    graph = sample.graph
    works = rank_work(sample.program, graph)
    seen = Counter[str]()
    for work in works:
        seen.update(work.rows)
    for o in graph.operators:
        times = len(works) if o.layout is Layout.EVERYWHERE else 1
        assert seen[o.name] == times * dict(graph.rows)[o.task]
    alone = rank_work(
        lower(
            [replace(r, devices=(0,)) for r in sample.runs],
            graph,
            1,
            holders([]),
            trainable=[p.name for p in graph.parameters if p.trainable],
        ),
        graph,
    )
    if all(o.layout is not Layout.EVERYWHERE for o in graph.operators):
        assert sum(w.flops for w in works) == pytest.approx(alone[0].flops)
    assert not any(t.count for t in (*alone[0].sent.values(), *alone[0].received.values(), alone[0].summed))


@given(samples(tables=True), st.integers(0, 9))
def test_a_rank_receives_the_rows_that_it_lacks(sample: Sample, count: int) -> None:
    """Each run takes, of each value, the rows that its rank needs and the producer left elsewhere."""
    graph = sizes_by_row(sample.graph)
    rows = dict.fromkeys(dict(graph.rows), count)
    values, producers = graph.value_map(), graph.producers()
    at = {(rank, o.name): mine for rank, o, mine in shards(sample, rows)}
    run_of = {name: run for run in sample.runs for name in run.operators}
    received = [0] * sample.plan.devices
    for rank in range(sample.plan.devices):
        needed: dict[tuple[int, str], int] = {}
        for (device, name), mine in at.items():
            for value in graph.operator(name).inputs if device == rank else ():
                source = producers[value]
                if run_of[source] is not run_of[name]:
                    # What has no rows comes with the first of them.
                    wanted = mine if values[value].dim is not None else set(sorted(mine)[:1])
                    lacking = len(wanted - at.get((rank, source), set()))
                    needed[run_of[name].index, value] = lacking
        for (_, value), lacking in needed.items():
            v = values[value]
            rows_of_it = 1 if v.dim is None else dict(graph.rows)[value.split("/")[0]]
            received[rank] += v.bytes // rows_of_it * lacking
    works = rank_work(sample.program, graph, rows)
    assert [w.received[Kind.ACTIVATION].bytes for w in works] == received
    for kind in (Kind.ACTIVATION, Kind.GRADIENT):
        assert sum(w.sent[kind].bytes for w in works) == sum(w.received[kind].bytes for w in works)
        assert sum(w.sent[kind].count for w in works) == sum(w.received[kind].count for w in works)
    for work in works:
        # A gradient goes back where an activation came from, if at all.
        assert work.sent[Kind.GRADIENT].bytes <= work.received[Kind.ACTIVATION].bytes
        assert work.received[Kind.GRADIENT].bytes <= work.sent[Kind.ACTIVATION].bytes


@given(samples())
def test_a_rank_holds_the_parameters_of_its_operators(sample: Sample) -> None:
    graph = sample.graph
    works = rank_work(sample.program, graph)
    users: dict[str, set[int]] = {p.name: set() for p in graph.parameters}
    for rank, operator, _ in shards(sample, dict(graph.rows)):
        for p in operator.parameters:
            users[p].add(rank)
    groups = {p: b.devices for b in sample.program.buckets for p in b.parameters}
    for rank, work in enumerate(works):
        held = [p for p in graph.parameters if rank in users[p.name] or not users[p.name]]
        assert work.parameters == tuple(p.name for p in held)
        assert work.parameter_bytes == sum(p.bytes for p in held)
        shared = [p for p in graph.parameters if p.trainable and len(users[p.name]) > 1]
        # Groups of the pool may be wider than the holders.
        within = [p for p in shared if rank in users[p.name] or rank in groups[p.name]]
        assert work.summed.bytes == sum(p.bytes for p in within)
        assert work.broadcast.bytes == work.summed.bytes * bool(sample.program.owners)


def test_a_crafted_program() -> None:
    """Two linear layers on ranks (0, 1) and (1,), a loss on rank 2; 4 rows of 16 and 8 bytes."""
    operators = (
        Operator("t/a", "t", "a", Layout.SPLIT, (), ("x",), ("w",), 100.0),
        Operator("t/b", "t", "b", Layout.SPLIT, ("x",), ("y",), ("v",), 40.0),
        Operator("t/loss", "t", "loss", Layout.WHOLE, ("y",), ("l",), (), 8.0),
    )
    values = (Value("x", 0, 1, 64, True), Value("y", 0, 1, 32, True), Value("l", None, 1, 8, True))
    parameters = (Parameter("w", 400, True), Parameter("v", 80, True), Parameter("unused", 4, True))
    results = (Result("t", "loss", "l", Reduction.WHOLE),)
    graph = OperatorGraph(operators, values, parameters, results, (("t", 4),))
    groups = ((0, 1), (1,), (2,))
    runs = tuple(
        ProgramRun(i, o.name, o.task, (o.name,), groups[i], o.layout) for i, o in enumerate(operators)
    )
    program = lower(runs, graph, 3, holders([(runs, graph)]), trainable=["w", "v", "unused"])

    first, second, third = rank_work(program, graph)
    assert (first.rows, second.rows, third.rows) == ({"t/a": 2}, {"t/a": 2, "t/b": 4}, {"t/loss": 4})
    # No gradient flows to the batch: one product for w; two for v; one for the loss without parameters.
    assert (first.forward_flops, first.backward_flops) == (50.0, 50.0)
    assert (second.forward_flops, second.backward_flops) == (90.0, 50.0 + 80.0)
    assert (third.forward_flops, third.backward_flops, third.flops) == (8.0, 8.0, 16.0)
    assert first.sent == {Kind.ACTIVATION: Traffic(1, 32), Kind.GRADIENT: Traffic()}
    assert second.received == {Kind.ACTIVATION: Traffic(1, 32), Kind.GRADIENT: Traffic(1, 32)}
    assert second.sent == {Kind.ACTIVATION: Traffic(1, 32), Kind.GRADIENT: Traffic(1, 32)}
    assert third.sent == {Kind.ACTIVATION: Traffic(), Kind.GRADIENT: Traffic(1, 32)}
    assert (first.summed, second.summed, third.summed) == (Traffic(1, 400), Traffic(1, 400), Traffic())
    assert (first.parameters, first.parameter_bytes) == (("w", "unused"), 404)
    assert (second.parameters, second.parameter_bytes) == (("w", "v", "unused"), 484)
    assert (third.parameters, third.parameter_bytes) == (("unused",), 4)

    one_row = rank_work(program, graph, {"t": 1})
    assert [w.rows for w in one_row] == [{}, {"t/a": 1, "t/b": 1}, {"t/loss": 1}]
    assert one_row[0].sent[Kind.ACTIVATION] == Traffic()
    idle = rank_work(program, graph, {})
    assert not any(w.rows or w.flops for w in idle)
