"""Random graphs, plans and programs for property tests."""

import itertools
from dataclasses import dataclass

from hypothesis import strategies as st

from lightning_spindle.graph import (
    Layout,
    MetaGraph,
    MetaOp,
    Operator,
    OperatorGraph,
    Parameter,
    Reduction,
    Result,
    Value,
)
from lightning_spindle.plan import Configuration, ExecutionPlan, Run
from lightning_spindle.program import Program, ProgramRun, holders, lower, owners, place_plan

POOL = tuple(f"shared.{k}" for k in range(4))


@dataclass(frozen=True)
class Sample:
    """A random program with everything that it was made of."""

    graph: OperatorGraph
    metagraph: MetaGraph
    plan: ExecutionPlan
    runs: tuple[ProgramRun, ...]
    program: Program
    groups: int


@st.composite
def graphs(draw: st.DrawFn, max_tasks: int = 3, tables: bool = False) -> OperatorGraph:
    """Tasks of up to six operators with random inputs, shared and frozen parameters, and a loss each.

    Operators that run everywhere (metrics) only read. With ``tables`` some values have no rows.
    """
    operators: list[Operator] = []
    values: list[Value] = []
    results: list[Result] = []
    rows: list[tuple[str, int]] = []
    own: list[Parameter] = []
    for t in range(draw(st.integers(1, max_tasks))):
        task = f"task{t}"
        rows.append((task, draw(st.integers(1, 9))))
        given: list[str] = []
        count = draw(st.integers(1, 6))
        for k in range(count):
            name = f"{task}/op{k}"
            last = k == count - 1
            kinds = [Layout.SPLIT, Layout.SPLIT, Layout.WHOLE] + [Layout.EVERYWHERE] * (not last)
            layout = draw(st.sampled_from(kinds))
            inputs = tuple(draw(st.lists(st.sampled_from(given), max_size=2, unique=True))) if given else ()
            used: tuple[str, ...] = ()
            if layout is not Layout.EVERYWHERE:
                used = tuple(draw(st.lists(st.sampled_from(POOL), max_size=2, unique=True)))
                if draw(st.booleans()):
                    own.append(Parameter(f"{name}.weight", draw(st.integers(1, 200)), draw(st.booleans())))
                    used = (*used, own[-1].name)
            out = f"{name}:out"
            dim = None if last else draw(st.sampled_from([0, 0, None])) if tables else 0
            values.append(Value(out, dim, 1, draw(st.integers(1, 1000)), True))
            flops, kept = draw(st.integers(0, 10)) * 1e9, draw(st.integers(0, 1000))
            operators.append(Operator(name, task, name, layout, inputs, (out,), used, flops, kept))
            if layout is not Layout.EVERYWHERE:
                given.append(out)
        results.append(Result(task, "loss", out, Reduction.MEAN))
    shared = [Parameter(p, 100, draw(st.booleans())) for p in POOL]
    return OperatorGraph(tuple(operators), tuple(values), (*shared, *own), tuple(results), tuple(rows))


def as_metagraph(graph: OperatorGraph) -> MetaGraph:
    """Each task's neighbours of one layout as a MetaOp, one operator a layer."""
    segments: list[list[Operator]] = []
    for o in graph.operators:
        if o.layout is Layout.EVERYWHERE:
            continue
        if segments and (segments[-1][0].task, segments[-1][0].layout) == (o.task, o.layout):
            segments[-1].append(o)
        else:
            segments.append([o])
    rows = dict(graph.rows)
    metaops = [
        MetaOp(s[0].name, s[0].task, tuple((o.name,) for o in s), (), rows[s[0].task], 0, s[0].layout)
        for s in segments
    ]
    return MetaGraph(tuple(metaops))


@st.composite
def plans(draw: st.DrawFn, metagraph: MetaGraph, devices: int) -> ExecutionPlan:
    """Runs of random cuts on random device groups, in a random order that keeps each task's."""
    queues: dict[str, list[tuple[MetaOp, int, int]]] = {}
    for m in metagraph.metaops:
        cuts = draw(st.sets(st.integers(1, len(m.layers) - 1))) if len(m.layers) > 1 else set()
        ends = [0, *sorted(cuts), len(m.layers)]
        queues.setdefault(m.task, []).extend((m, a, b) for a, b in itertools.pairwise(ends))
    runs: list[Run] = []
    while any(queues.values()):
        task = draw(st.sampled_from([t for t, queue in queues.items() if queue]))
        m, first, last = queues[task].pop(0)
        group = draw(st.permutations(range(devices)))
        n = 1 if m.layout is Layout.WHOLE else draw(st.integers(1, devices))
        at = float(len(runs))
        runs.append(Run(m.name, first, last, tuple(group[:n]), at, at + 1, Configuration(n)))
    return ExecutionPlan("random", devices, tuple(runs), float(len(runs)))


@st.composite
def samples(draw: st.DrawFn, max_devices: int = 6, training: bool = True, tables: bool = False) -> Sample:
    graph = draw(graphs(tables=tables))
    metagraph = as_metagraph(graph)
    devices = draw(st.integers(1, max_devices))
    plan = draw(plans(metagraph, devices))
    runs = place_plan(plan, metagraph, graph, piece_bytes=draw(st.sampled_from([1, 150, 10_000])))
    trainable = [p.name for p in graph.parameters if p.trainable] if training else None
    limit = draw(st.sampled_from([1, 150, 10_000]))
    held = holders([(runs, graph)])
    groups = draw(st.integers(0, 2 * devices - 1))
    owned = owners(graph.parameters, held) if draw(st.booleans()) else {}
    program = lower(
        runs, graph, devices, held, trainable=trainable, bucket_bytes=limit, groups=groups, owners=owned
    )
    return Sample(graph, metagraph, plan, runs, program, groups)
