"""What lowering guarantees, over random graphs and plans, and what the dry run finds."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_spindle.graph import (
    Layout,
    Operator,
    OperatorGraph,
    Parameter,
    Reading,
    Reduction,
    Result,
    Value,
)
from lightning_spindle.program import (
    Instruction,
    Kind,
    Program,
    ProgramRun,
    follow,
    holders,
    lower,
    row_range,
)
from lightning_spindle.simulate import DeadlockError, ProgramError, check_deadlock
from tests.support.programs import Sample, samples

MESSAGES = (Kind.ACTIVATION, Kind.GRADIENT)


# ------------------------------------------------------------------------------------------ properties


@given(samples(tables=True))
def test_random_programs_are_free_of_deadlock(sample: Sample) -> None:
    check_deadlock(sample.program)


@given(samples(training=False))
def test_random_forward_programs_are_free_of_deadlock(sample: Sample) -> None:
    check_deadlock(sample.program)
    kinds = {i.kind for i in sample.program.order}
    assert kinds <= {Kind.FORWARD, Kind.ACTIVATION, Kind.EXCHANGE}


@given(samples())
def test_projections_are_the_ranks(sample: Sample) -> None:
    program = sample.program
    assert program.projections() == tuple(program.rank(r) for r in range(program.devices))


@given(samples())
def test_every_operator_runs_forward_and_backward_once(sample: Sample) -> None:
    program = sample.program
    assert len(set(program.order)) == len(program.order)
    run_operators = Counter(o for r in program.runs for o in r.operators)
    assert run_operators == Counter(o.name for o in sample.graph.operators)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        assert sorted(i.index for i in program.order if i.kind is kind) == list(range(len(program.runs)))
    assert [i.kind for i in program.order].count(Kind.EXCHANGE) == 1


@given(samples(tables=True), st.integers(0, 11))
def test_every_needed_row_arrives_exactly_once(sample: Sample, rows: int) -> None:
    """Replays each rank by rows, without the lowering's own notion of which shards meet.

    A value without rows arrives once, with the first row.
    """
    program, graph = sample.program, sample.graph
    operators, values = graph.operator_map(), graph.value_map()
    for rank in range(program.devices):
        present: dict[str, Counter[int]] = {}
        arrived: dict[tuple[int, str], Counter[int]] = {}
        for i in program.rank(rank):
            if i.kind is Kind.ACTIVATION:
                edge = program.edges[i.index]
                sender, receiver = program.participants(i)
                assert sender != receiver
                shared = range(*program.shared_rows(edge, i.source, i.target, rows))
                if rank == sender:
                    assert set(shared) <= set(present[edge.value])
                else:
                    arrived.setdefault((edge.target, edge.value), Counter()).update(shared)
            if i.kind is not Kind.FORWARD:
                continue
            run = program.runs[i.index]
            shard = run.shard_of(rank)
            assert shard is not None
            mine = set(range(*run.rows(shard, rows)))
            inside = {v for o in run.operators for v in operators[o].outputs}
            for value in {v for o in run.operators for v in operators[o].inputs} - inside:
                wanted = mine if values[value].dim is not None else set(sorted(mine)[:1])
                local = Counter({r: 1 for r in present.get(value, ()) if r in wanted})
                assert local + arrived.get((run.index, value), Counter()) == Counter(wanted)
            for value in inside:
                present[value] = Counter(mine)


@given(samples(tables=True))
def test_gradients_go_back_the_way_that_activations_came(sample: Sample) -> None:
    program = sample.program
    there = [i for i in program.order if i.kind is Kind.ACTIVATION and program.edges[i.index].gradient]
    back = [i for i in program.order if i.kind is Kind.GRADIENT]
    assert {replace(i, kind=Kind.GRADIENT) for i in there} == set(back)
    for i in back:
        assert program.participants(i) == program.participants(replace(i, kind=Kind.ACTIVATION))[::-1]


@given(samples())
def test_a_gradient_edge_lies_between_a_trained_parameter_and_a_loss(sample: Sample) -> None:
    graph = sample.graph
    before: dict[str, set[str]] = {}
    for o in graph.operators:
        before[o.name] = {o.name}.union(*(before[p] for p in graph.predecessors()[o.name]))
    producers, trainable = graph.producers(), {p.name for p in graph.parameters if p.trainable}
    operators = graph.operator_map()
    losses = [producers[r.value] for r in graph.results]
    for edge in sample.program.edges:
        trained = any(trainable.intersection(operators[o].parameters) for o in before[producers[edge.value]])
        users = [o for o in sample.program.runs[edge.target].operators if edge.value in operators[o].inputs]
        wanted = any(user in before[loss] for user in users for loss in losses)
        assert edge.gradient == (trained and wanted)


@given(samples())
def test_a_parameter_is_in_one_bucket_iff_several_devices_hold_it(sample: Sample) -> None:
    program = sample.program
    trainable = {p.name for p in sample.graph.parameters if p.trainable}
    counts = Counter(p for b in program.buckets for p in b.parameters)
    shared = {p for p, devices in program.holders.items() if p in trainable and len(devices) > 1}
    assert counts == Counter(shared)
    parameters = sample.graph.parameter_map()
    for b in program.buckets:
        (holders,) = {program.holders[p] for p in b.parameters}
        assert set(holders) <= set(b.devices)
        assert b.bytes == sum(parameters[p].bytes for p in b.parameters)
    assert program.groups() == tuple(sorted({b.devices for b in program.buckets}))
    everyone = tuple(range(program.devices))
    assert len(set(program.groups()) - {everyone}) <= sample.groups


@given(samples())
def test_a_bucket_is_summed_once_after_all_its_gradients(sample: Sample) -> None:
    program, operators = sample.program, sample.graph.operator_map()
    reduces = [i for i in program.order if i.kind is Kind.REDUCE]
    assert sorted(i.index for i in reduces) == [b.index for b in program.buckets]
    place = {i: k for k, i in enumerate(program.order)}
    for b in program.buckets:
        users = {
            r.index
            for r in program.runs
            if any(set(b.parameters).intersection(operators[o].parameters) for o in r.operators)
        }
        assert set(b.runs) == users
        for r in users:
            assert place[Instruction(Kind.BACKWARD, r)] < place[Instruction(Kind.REDUCE, b.index)]


@given(samples())
def test_backward_goes_against_the_flow(sample: Sample) -> None:
    place = {i.index: k for k, i in enumerate(sample.program.order) if i.kind is Kind.BACKWARD}
    for edge in sample.program.edges:
        assert not edge.gradient or place[edge.target] < place[edge.source]


@given(samples())
def test_instructions_parse_back(sample: Sample) -> None:
    for i in sample.program.order:
        assert Instruction.parse(str(i)) == i


@given(st.integers(1, 40), st.integers(0, 200))
def test_row_ranges_cut_the_batch_evenly(shards: int, rows: int) -> None:
    cuts = [row_range(i, shards, rows) for i in range(shards)]
    assert [r for a, b in cuts for r in range(a, b)] == list(range(rows))
    sizes = [b - a for a, b in cuts]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 100))
def test_row_ranges_of_a_multiple_nest(shards: int, factor: int, rows: int) -> None:
    for i in range(shards):
        parts = [row_range(i * factor + k, shards * factor, rows) for k in range(factor)]
        assert (parts[0][0], parts[-1][1]) == row_range(i, shards, rows)


# ------------------------------------------------------------------------------------ deliberate faults


@given(samples(), st.data())
def test_two_meetings_of_the_same_ranks_in_swapped_order_deadlock(
    sample: Sample, data: st.DataObject
) -> None:
    program = sample.program
    streams = [list(s) for s in program.projections()]
    rank = data.draw(st.sampled_from(range(program.devices)))
    talks = [k for k, i in enumerate(streams[rank]) if i.kind not in (Kind.FORWARD, Kind.BACKWARD)]
    pairs = [
        (a, b)
        for n, a in enumerate(talks)
        for b in talks[n + 1 :]
        if len(set(program.participants(streams[rank][a])) & set(program.participants(streams[rank][b]))) > 1
    ]
    assume(pairs)
    a, b = data.draw(st.sampled_from(pairs))
    streams[rank][a], streams[rank][b] = streams[rank][b], streams[rank][a]
    with pytest.raises(ProgramError):
        check_deadlock(program, streams)


@given(samples(), st.data())
def test_a_missing_message_is_found(sample: Sample, data: st.DataObject) -> None:
    program = sample.program
    streams = [list(s) for s in program.projections()]
    talks = [
        (r, k)
        for r, stream in enumerate(streams)
        for k, i in enumerate(stream)
        if len(program.participants(i)) > 1 and i.kind not in (Kind.FORWARD, Kind.BACKWARD)
    ]
    assume(talks)
    rank, k = data.draw(st.sampled_from(talks))
    del streams[rank][k]
    with pytest.raises(ProgramError):
        check_deadlock(program, streams)


def chain() -> Program:
    """Two operators that share a weight, first on ranks 0 and 1, then on 1 and 2."""
    operators = (
        Operator("t/a", "t", "s", Layout.SPLIT, (), ("x",), ("w",)),
        Operator("t/b", "t", "s", Layout.SPLIT, ("x",), ("y",), ("w",)),
        Operator("t/loss", "t", "loss", Layout.WHOLE, ("y",), ("l",)),
    )
    values = (Value("x", 0, 1, 8, True), Value("y", 0, 1, 8, True), Value("l", None, 1, 4, True))
    results = (Result("t", "loss", "l", Reduction.WHOLE),)
    graph = OperatorGraph(operators, values, (Parameter("w", 4, True),), results, (("t", 4),))
    groups = ((0, 1), (1, 2), (2,))
    runs = tuple(
        ProgramRun(i, o.name, o.task, (o.name,), groups[i], o.layout) for i, o in enumerate(operators)
    )
    return lower(runs, graph, 3, holders([(runs, graph)]), trainable=["w"])


def test_losses_that_couple_samples_go_back_before_anything_is_summed() -> None:
    """Two tasks after each other on both devices; one loss runs whole, the other one gathers rows."""
    operators = (
        Operator("a/tower", "a", "s", Layout.SPLIT, (), ("x",), ("v",)),
        Operator("a/loss", "a", "loss", Layout.WHOLE, ("x",), ("l",)),
        Operator("b/tower", "b", "s", Layout.SPLIT, (), ("y",), ("w",)),
        Operator("b/loss", "b", "loss", Layout.SPLIT, ("y",), ("m",)),
    )
    values = (
        Value("x", 0, 1, 8, True),
        Value("l", None, 1, 4, True),
        Value("y", 0, 1, 8, True, reading=Reading.GATHERED),
        Value("m", None, 1, 4, True),
    )
    results = (Result("a", "loss", "l", Reduction.WHOLE), Result("b", "loss", "m", Reduction.MEAN))
    parameters = (Parameter("v", 4, True), Parameter("w", 4, True))
    graph = OperatorGraph(operators, values, parameters, results, (("a", 4), ("b", 4)))
    runs = tuple(
        ProgramRun(i, o.name, o.task, (o.name,), (0,) if o.layout is Layout.WHOLE else (0, 1), o.layout)
        for i, o in enumerate(operators)
    )
    program = lower(runs, graph, 2, holders([(runs, graph)]), trainable=["v", "w"], bucket_bytes=1)
    check_deadlock(program)
    backward = [str(i) for i in program.order if str(i)[0] in "BGR"]
    assert backward == ["B3", "G1:0>1", "G1:1>0", "B1", "G0:1>0", "B2", "R0", "B0", "R1"]


def texts(program: Program) -> list[list[str]]:
    return [list(map(str, stream)) for stream in program.projections()]


def parsed(streams: list[list[str]]) -> list[list[Instruction]]:
    return [[Instruction.parse(text) for text in stream] for stream in streams]


def test_the_crafted_program_reads_as_expected() -> None:
    assert texts(chain()) == [
        ["F0", "A0:0>0", "X", "G0:0>0", "B0", "R0"],
        ["F0", "A0:0>0", "A0:1>1", "F1", "A1:0>0", "X", "G1:0>0", "B1", "G0:0>0", "G0:1>1", "B0", "R0"],
        ["A0:1>1", "F1", "A1:0>0", "F2", "X", "B2", "G1:0>0", "B1", "G0:1>1", "R0"],
    ]


@pytest.mark.parametrize(
    ("rank", "first", "second", "error", "message"),
    [
        (1, "A0:1>1", "A1:0>0", ProgramError, r"A1:0>0 \(y for t/loss, rank 1 to rank 2\) comes before F1"),
        (2, "A1:0>0", "F2", ProgramError, r"on rank 2 F2 \(t/loss\) comes before A1:0>0"),
        (2, "A1:0>0", "X", DeadlockError, r"rank 1 is blocked in A1:0>0 .*, waiting for rank 2"),
        (1, "G1:0>0", "X", DeadlockError, r"rank 1 is blocked in G1:0>0 .*, waiting for rank 2"),
        (0, "G0:0>0", "X", DeadlockError, r"rank 0 is blocked in G0:0>0 .*, waiting for rank 1"),
        (0, "F0", "A0:0>0", ProgramError, r"on rank 0 A0:0>0 .* comes before F0"),
        (1, "A0:0>0", "F1", ProgramError, r"on rank 1 F1 \(t/b\) comes before A0"),
        (2, "B1", "G0:1>1", ProgramError, r"on rank 2 G0:1>1 .* comes before B1"),
        (1, "B1", "G1:0>0", ProgramError, r"on rank 1 B1 \(t/b\) comes before G1:0>0"),
        (0, "B0", "R0", ProgramError, r"on rank 0 R0 .* comes before B0"),
    ],
)
def test_swapping_two_instructions_of_a_rank_is_found(
    rank: int, first: str, second: str, error: type[Exception], message: str
) -> None:
    program = chain()
    streams = texts(program)
    a, b = streams[rank].index(first), streams[rank].index(second)
    streams[rank][a], streams[rank][b] = streams[rank][b], streams[rank][a]
    with pytest.raises(error, match=message):
        check_deadlock(program, parsed(streams))


def test_a_deadlock_shows_every_rank_and_where_it_is_blocked() -> None:
    program = chain()
    streams = texts(program)
    streams[0][2:4] = ["G0:0>0", "X"]
    with pytest.raises(DeadlockError) as caught:
        check_deadlock(program, parsed(streams))
    assert (
        str(caught.value)
        == """\
deadlock: ranks wait for each other for ever

rank  step  instructions ([x]: stands here)
   0     2  F0  A0:0>0  [G0:0>0]  X  B0  …
   1     5  …  A0:1>1  F1  A1:0>0  [X]  G1:0>0  B1  …
   2     4  …  F1  A1:0>0  F2  [X]  B2  G1:0>0  …

rank 0 is blocked in G0:0>0 (x for t/a, rank 1 to rank 0), waiting for rank 1
rank 1 is blocked in X (loss and logged values, all ranks), waiting for rank 0
rank 2 is blocked in X (loss and logged values, all ranks), waiting for rank 0"""
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[0].insert(0, "A1:0>0"), "A1:0>0 .* is not this rank's to execute"),
        (lambda s: s[0].append("F99"), "F99 is not this rank's to execute"),
        (lambda s: s[2].append("B2"), "B2 .* comes a second time"),
        (lambda s: s.pop(), "2 instruction lists for 3 ranks"),
        (lambda s: s[2].clear(), "rank 1 is blocked in A0:1>1 .*, waiting for rank 2"),
    ],
)
def test_wrong_lists_are_refused(change: object, message: str) -> None:
    program = chain()
    streams = texts(program)
    assert callable(change)
    change(streams)
    with pytest.raises(ProgramError, match=message):
        check_deadlock(program, parsed(streams))


# ---------------------------------------------------------------------------------------- other rules


@pytest.mark.parametrize("text", ["", "F", "F1:0>1", "A1", "A1:0", "Z3", "f1", "A1:0>1 ", "X1", "B-1"])
def test_malformed_instructions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no instruction"):
        Instruction.parse(text)


def test_gradients_through_an_operator_on_every_rank_are_refused() -> None:
    operators = (
        Operator("t/a", "t", "s", Layout.SPLIT, (), ("x",), ("w",)),
        Operator("t/loss", "t", "loss", Layout.EVERYWHERE, ("x",), ("l",)),
    )
    values = (Value("x", 0, 1, 8, True), Value("l", None, 1, 4, True))
    results = (Result("t", "loss", "l", Reduction.WHOLE),)
    graph = OperatorGraph(operators, values, (Parameter("w", 4, True),), results, (("t", 4),))
    runs = tuple(ProgramRun(i, o.name, o.task, (o.name,), (0, 1), o.layout) for i, o in enumerate(operators))
    held = holders([(runs, graph)])
    with pytest.raises(
        ValueError, match="t/loss of task t runs on every rank, but a loss needs its gradient"
    ):
        lower(runs, graph, 2, held, trainable=["w"])
    check_deadlock(lower(runs, graph, 2, held, trainable=None))


@given(samples())
def test_another_step_follows_the_placement_of_the_trained_one(sample: Sample) -> None:
    """The same graph as a validation step: no device needs parameters that it does not hold."""
    runs = follow(sample.runs, sample.program.devices, sample.graph, sample.graph)
    check_deadlock(lower(runs, sample.graph, sample.program.devices, sample.program.holders, trainable=None))
    operators = sample.graph.operator_map()
    for run in runs:
        for name in run.operators:
            if len(operators[name].parameters) == 1:
                assert set(run.devices) <= set(sample.program.holders[operators[name].parameters[0]])


@settings(max_examples=30)
@given(samples(max_devices=3))
def test_lowering_is_deterministic(sample: Sample) -> None:
    trainable = [p.name for p in sample.graph.parameters if p.trainable]
    held = dict(sample.program.holders)
    again = [
        lower(sample.runs, sample.graph, sample.program.devices, held, trainable=t)
        for t in (trainable, reversed(trainable))
    ]
    assert again[0] == again[1]
