"""Who keeps the optimizer state of which parameter: shares, broadcasts, memory and time."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarking.simulated import Cell
from lightning_spindle.costs import A800, AnalyticCosts, State, all_gather_s
from lightning_spindle.graph import Parameter
from lightning_spindle.plan import Configuration, Run
from lightning_spindle.planner import plan
from lightning_spindle.planner.memory import Memory
from lightning_spindle.planner.placement import check_memory, memory_per_device
from lightning_spindle.planner.sync import Sync
from lightning_spindle.planner.timing import UnplacedRun
from lightning_spindle.program import Instruction, Kind, Program, ProgramRun, holders, lower, owners
from lightning_spindle.simulate import ProgramError, check_deadlock, simulate
from lightning_spindle.timeline import Category
from tests.planner.checking import op, problem
from tests.support.programs import Sample, samples
from tests.support.scaled import multitask_clip
from tests.test_simulate import costs_of, graph_of, memory_on, only

GROUPS = st.sets(st.integers(0, 4), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
PARAMETERS = st.lists(st.tuples(st.integers(1, 100), st.booleans(), GROUPS), max_size=12)


def of_parameters(
    drawn: list[tuple[int, bool, tuple[int, ...]]],
) -> tuple[list[Parameter], dict[str, tuple[int, ...]]]:
    parameters = [Parameter(f"p{i}", size, trainable) for i, (size, trainable, _) in enumerate(drawn)]
    return parameters, {p.name: ranks for p, (_, _, ranks) in zip(parameters, drawn, strict=True)}


@given(PARAMETERS, st.integers(0, 99))
def test_shares_are_balanced_and_the_same_on_every_rank(
    drawn: list[tuple[int, bool, tuple[int, ...]]], seed: int
) -> None:
    parameters, held = of_parameters(drawn)
    found = owners(parameters, held)
    shuffled = Random(seed).sample(parameters, len(parameters))
    assert owners(shuffled, held) == found
    assert found.keys() == held.keys()
    for group in set(held.values()):
        trained = [p for p in parameters if held[p.name] == group and p.trainable]
        shares = [sum(p.bytes for p in trained if found[p.name] == rank) for rank in group]
        assert sum(shares) == sum(p.bytes for p in trained)
        assert max(shares) - min(shares) <= max((p.bytes for p in trained), default=0)


@given(PARAMETERS)
def test_who_steps_a_parameter_goes_on_when_others_join(
    drawn: list[tuple[int, bool, tuple[int, ...]]],
) -> None:
    parameters, held = of_parameters(drawn)
    some = owners(parameters[::2], held)
    wider = {name: tuple(sorted({*ranks, 0, 3})) for name, ranks in held.items()}
    assert some.items() <= owners(parameters, wider, some).items()


@given(samples())
def test_new_values_are_broadcast_once_after_their_gradients_are_summed(sample: Sample) -> None:
    program = sample.program
    given_away = [p for b in program.broadcasts for p in b.parameters]
    summed = [p for b in program.buckets for p in b.parameters if p in program.owners]
    assert sorted(given_away) == sorted(summed)
    sizes = {p.name: p.bytes for p in sample.graph.parameters}
    for b in program.broadcasts:
        assert b.bytes == sum(sizes[p] for p in b.parameters)
        for p in b.parameters:
            assert program.owners[p] == b.source
            assert set(program.holders[p]) <= set(b.devices)
    assert {b.devices for b in program.broadcasts} <= set(program.groups())
    tail = program.order[len(program.order) - len(program.broadcasts) :]
    assert tail == tuple(Instruction(Kind.BROADCAST, b.index) for b in program.broadcasts)
    stepped = [p for rank in range(program.devices) for p in program.stepped(rank)]
    if program.owners:
        assert sorted(stepped) == sorted(program.holders)


def sharded_chain() -> Program:
    """Two weights of 100 bytes on ranks 0 and 1, one of which each steps; buckets of one weight."""
    graph = graph_of(("a", 2))
    runs = tuple(
        ProgramRun(i, o.name, o.task, (o.name,), (0, 1), o.layout) for i, o in enumerate(graph.operators)
    )
    held = holders([(runs, graph)])
    owned = owners(graph.parameters, held)
    assert owned == {"a.w0": 0, "a.w1": 1}
    return lower(runs, graph, 2, held, trainable=list(held), bucket_bytes=1, owners=owned)


def test_a_broadcast_before_its_sum_is_refused() -> None:
    program = sharded_chain()
    assert [str(i) for i in program.order[-4:]] == ["B0", "R1", "P0", "P1"]
    early = (*program.order[:-3], *program.order[-2:], program.order[-3])
    with pytest.raises(
        ProgramError, match=r"P\d \(values of a\.w0 … from rank 0 to ranks \(0, 1\)\) comes before R1"
    ):
        check_deadlock(replace(program, order=early))


def test_a_divided_step_takes_half_of_the_time_and_then_the_broadcasts() -> None:
    """A step of 1 ms on 100 bytes instead of 2 on 200; then broadcasts of 1 ms, one after the other."""
    program = sharded_chain()
    costs = costs_of(graph_of(("a", 2)), 2, collectives={2: (0.0, 1e5)}, optimizer_s_per_byte=1e-5)
    assert costs.broadcast_s(100, (0, 1)) == pytest.approx(1e-3)
    timeline = simulate(program, costs)
    for rank in (0, 1):
        (step,) = [e for e in timeline.on(rank) if e.category is Category.OPTIMIZER]
        assert step.duration_s == pytest.approx(1e-3)
        ended_ms = round(step.end_s * 1e3, 9)
        assert only(timeline, "P0", rank) == (ended_ms, ended_ms + 1)
        assert only(timeline, "P1", rank) == (ended_ms + 1, ended_ms + 2)
    assert timeline.span_s * 1e3 == pytest.approx(ended_ms + 2)
    held = [size for _, size in memory_on(timeline, 0)]
    # Two weights, two gradients, the moments of one weight; two copies of gradients, then of values.
    assert held[0] == 200 + 200 + 200 + 500
    assert held[-2:] == [600 + 200, 600]


def test_broadcasts_of_all_shares_take_as_long_as_gathering_them() -> None:
    """But for latencies: an all-gather of equal parts moves (n - 1)/n of what n broadcasts do."""
    cluster = A800.cluster(16)
    costs = AnalyticCosts(graph_of(("a", 1)), cluster)
    for group in (range(8), range(16)):
        n, size = len(group), 2**34
        broadcasts_s = n * costs.broadcast_s(size // n, group)
        assert broadcasts_s == pytest.approx(all_gather_s(size, group, cluster) * n / (n - 1), rel=0.02)


# ------------------------------------------------------------------------------------------- planning


def test_holders_divide_optimizer_state_in_the_planners_ledger() -> None:
    """100 bytes of parameter, as many of gradient, 200 of moments divided by two and then by three."""
    ops = [op(f"m{i}", times={1: 2.0, 2: 1.0}, layer_parameters=(("w", "f"),)) for i in range(2)]
    p = problem(
        *ops,
        devices=3,
        parameter_bytes=(("w", 100), ("f", 7)),
        frozen=frozenset("f"),
        state=State(),
        shard_optimizer_state=True,
    )
    memory = Memory(p)
    first = UnplacedRun("m0", 0, 1, 2, 0.0, 1.0)
    assert memory.need(first).state_bytes.tolist() == [307.0] * 3, "if two devices take it"
    memory.take(first, (0, 1))
    assert memory.used.tolist() == [307.0, 307.0, 0.0]
    second = UnplacedRun("m1", 0, 1, 1, 1.0, 3.0)
    need = memory.need(second)
    booked = memory.take(second, (2,))
    third = 200 + 200 / 3 + 7
    assert memory.used.tolist() == pytest.approx([third] * 3), "the first two give a part of the state away"
    assert memory.bytes_on(need, 2) == pytest.approx(third)
    memory.give_back(booked)
    assert memory.used.tolist() == [307.0, 307.0, 0.0]
    runs = [
        Run("m0", 0, 1, (0, 1), 0.0, 1.0, Configuration(2)),
        Run("m1", 0, 1, (2,), 1.0, 3.0, Configuration(1)),
    ]
    assert memory_per_device(runs, p) == pytest.approx((third,) * 3)


def test_what_fits_only_when_divided_is_planned() -> None:
    """4 bytes a byte of parameter whole, 2.5 among four."""
    wide = op("m", 2, times={4: 1.0}, layer_parameters=(("w0",), ("w1",)))
    sizes = (("w0", 100), ("w1", 100))
    with pytest.raises(ValueError, match="does not fit"):
        plan(problem(wide, devices=4, memory=600, parameter_bytes=sizes), "spindle")
    p = problem(wide, devices=4, memory=600, parameter_bytes=sizes, shard_optimizer_state=True)
    found = plan(p, "spindle")
    check_memory(found.runs, p)
    assert memory_per_device(found.runs, p) == (500.0,) * 4
    assert Sync(p).seconds_a_byte(15) >= 0


def test_dividing_lowers_the_memory_of_simulated_iterations() -> None:
    """The same plan: the largest device keeps less, all devices together each state once."""
    whole = Cell("multitask_clip", 4, "a800", AnalyticCosts(multitask_clip(4), A800.cluster(8)))
    divided = replace(whole, shard_optimizer_state=True)
    found = plan(whole.problem, "seq")
    peaks = [
        max(t.peak_bytes(rank) or 0 for rank in range(8))
        for t in (simulate(cell.step.program(found), cell.costs) for cell in (whole, divided))
    ]
    state = whole.costs.state.optimizer * sum(p.bytes for p in whole.graph.parameters if p.trainable)
    largest = whole.costs.state.optimizer * max(p.bytes for p in whole.graph.parameters)
    assert peaks[0] - peaks[1] == pytest.approx(state * 7 / 8, abs=largest)
