"""Placing: which devices run which operators, of the planned step and of those that follow it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from lightning_spindle.graph import Layout, MetaGraph, OperatorGraph
from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.program.program import ProgramRun


def place_plan(plan: ExecutionPlan, metagraph: MetaGraph, graph: OperatorGraph) -> tuple[ProgramRun, ...]:
    """The plan's runs, and one on every device for each EVERYWHERE operator, in executable order."""
    operators = graph.operator_map()
    placed: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = []
    for run in plan.runs:
        layers = metagraph.metaop(run.metaop).layers[run.first : run.last]
        names = tuple(name for layer in layers for name in layer)
        placed.append((f"{run.metaop}[{run.first}:{run.last}]", names, run.devices))
    for operator in graph.operators:
        if operator.layout is Layout.EVERYWHERE:
            placed.append((operator.name, (operator.name,), tuple(range(plan.devices))))
    runs = [
        ProgramRun(i, label, operators[names[0]].task, names, devices, operators[names[0]].layout)
        for i, (label, names, devices) in enumerate(placed)
    ]
    return _in_order(runs, graph)


def follow(
    runs: Sequence[ProgramRun],
    devices: int,
    trained: OperatorGraph,
    graph: OperatorGraph,
    within: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[ProgramRun, ...]:
    """Places another step's graph (validation, test) where a trained graph's parameters lie.

    An operator goes to the devices of the run that holds most of its parameters (of its own
    task where there is a choice), one without parameters to the devices that give its
    inputs, else to all devices. What writes a buffer goes where training writes it. ``within`` are
    devices to which a task's other operators keep.
    """
    holding = {name: run for run in runs for name in run.operators}
    users: dict[str, list[str]] = {}
    for o in trained.operators:
        for p in o.parameters:
            users.setdefault(p, []).append(o.name)
    producers = graph.producers()
    pins = {o.pin: holding[o.name].devices for o in trained.operators if o.pin is not None}
    where: dict[str, tuple[int, ...]] = {}
    for o in graph.operators:
        votes: dict[tuple[int, ...], tuple[int, int]] = {}
        for p in o.parameters:
            for user in users.get(p, ()):
                run = holding[user]
                count, same = votes.get(run.devices, (0, 0))
                votes[run.devices] = (count + 1, same + (run.task == o.task))
        near = [where[producers[v]] for v in o.inputs]
        best = max(votes, key=lambda d: (votes[d][1], votes[d][0], d)) if votes else None
        everywhere = tuple(range(devices))
        group = best or (near[0] if near else everywhere)
        if within is not None:
            group = tuple(device for device in group if device in within[o.task]) or within[o.task]
        if o.layout is Layout.EVERYWHERE:
            group = everywhere
        where[o.name] = group[:1] if o.layout is Layout.WHOLE else group
        if o.pin is not None:
            where[o.name] = pins.setdefault(o.pin, where[o.name])
    return _in_order(
        [
            ProgramRun(i, o.name, o.task, (o.name,), where[o.name], o.layout)
            for i, o in enumerate(graph.operators)
        ],
        graph,
    )


def spread(graph: OperatorGraph, devices: int) -> tuple[ProgramRun, ...]:
    """Every operator on all devices, one that couples samples on the first: data parallelism."""
    everyone = tuple(range(devices))
    return _in_order(
        [
            ProgramRun(
                i, o.name, o.task, (o.name,), everyone[:1] if o.layout is Layout.WHOLE else everyone, o.layout
            )
            for i, o in enumerate(graph.operators)
        ],
        graph,
    )


def holders(placements: Iterable[tuple[Sequence[ProgramRun], OperatorGraph]]) -> dict[str, tuple[int, ...]]:
    """Parameter name to the sorted devices that run an operator which uses it, over all steps."""
    found: dict[str, set[int]] = {}
    for runs, graph in placements:
        operators = graph.operator_map()
        for run in runs:
            for name in run.operators:
                for p in operators[name].parameters:
                    found.setdefault(p, set()).update(run.devices)
    return {p: tuple(sorted(devices)) for p, devices in sorted(found.items())}


def _in_order(runs: Sequence[ProgramRun], graph: OperatorGraph) -> tuple[ProgramRun, ...]:
    """Runs in a topological order that keeps to the given one where it can; indices renewed."""
    of = {name: run.index for run in runs for name in run.operators}
    waits: dict[int, set[int]] = {run.index: set() for run in runs}
    for name, before in graph.predecessors().items():
        waits[of[name]].update({of[b] for b in before} - {of[name]})
    followers: dict[int, list[int]] = {run.index: [] for run in runs}
    for index, before_runs in waits.items():
        for b in before_runs:
            followers[b].append(index)
    ready = [i for i, before_runs in waits.items() if not before_runs]
    heapq.heapify(ready)
    ordered: list[ProgramRun] = []
    while ready:
        run = runs[heapq.heappop(ready)]
        ordered.append(ProgramRun(len(ordered), run.label, run.task, run.operators, run.devices, run.layout))
        for f in followers[run.index]:
            waits[f].discard(run.index)
            if not waits[f]:
                heapq.heappush(ready, f)
    if len(ordered) != len(runs):
        stuck = sorted(runs[i].label for i, before_runs in waits.items() if before_runs)
        raise ValueError(f"invalid plan: runs wait for each other: {stuck}")
    return tuple(ordered)
