"""Placing: which devices run which operators, of the planned step and of those that follow it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from lightning_spindle.graph import Layout, MetaGraph, OperatorGraph
from lightning_spindle.plan import ExecutionPlan, Run
from lightning_spindle.program.program import ProgramRun

PIECE_BYTES = 50 * 2**20
"""Parameters that a piece of a run has at least: half a bucket (decision 0022)."""


def place_plan(
    plan: ExecutionPlan, metagraph: MetaGraph, graph: OperatorGraph, *, piece_bytes: int = PIECE_BYTES
) -> tuple[ProgramRun, ...]:
    """The plan's runs, and one on every device for each EVERYWHERE operator, in executable order.

    A run of many parameters is cut between layers into several on the same devices, so that the gradients of
    its last layers are summed while the backward of its first ones goes on.

    Args:
        piece_bytes: of parameters whose gradients a piece completes, at least.
    """
    operators = graph.operator_map()
    placed: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = []
    for run in _pieces(plan, metagraph, graph, piece_bytes):
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


def _pieces(
    plan: ExecutionPlan, metagraph: MetaGraph, graph: OperatorGraph, piece_bytes: int
) -> Iterator[Run]:
    """The plan's runs, each as pieces of consecutive layers, cut from its last layer on."""
    completed = _completed_bytes(plan, metagraph, graph)
    uncut = _uncut(plan, metagraph, graph)
    for i, run in enumerate(plan.runs):
        last, size = run.last, 0
        pieces: list[Run] = []
        for k in range(run.last - 1, run.first - 1, -1):
            size += completed.get((i, k), 0)
            if k == run.first or (size >= piece_bytes and (i, k) not in uncut):
                pieces.append(replace(run, first=k, last=last))
                last, size = k, 0
        yield from reversed(pieces)


def _layers(plan: ExecutionPlan, metagraph: MetaGraph) -> Iterator[tuple[int, int, Run, tuple[str, ...]]]:
    """Every layer: its run's place in the plan, its own number, its run and its operators."""
    for i, run in enumerate(plan.runs):
        for k in range(run.first, run.last):
            yield i, k, run, metagraph.metaop(run.metaop).layers[k]


def _completed_bytes(
    plan: ExecutionPlan, metagraph: MetaGraph, graph: OperatorGraph
) -> dict[tuple[int, int], int]:
    """By run and layer the parameters whose summed gradients its backward completes.

    They are those that several devices hold and that no run or layer before it uses. Frozen ones count: they
    may be unfrozen while the placement stays.
    """
    operators, parameters = graph.operator_map(), graph.parameter_map()
    first: dict[str, tuple[int, int]] = {}
    held: dict[str, set[int]] = {}
    for i, k, run, layer in _layers(plan, metagraph):
        for p in (p for name in layer for p in operators[name].parameters):
            first.setdefault(p, (i, k))
            held.setdefault(p, set()).update(run.devices)
    found: dict[tuple[int, int], int] = {}
    for p, place in first.items():
        if len(held[p]) > 1:
            found[place] = found.get(place, 0) + parameters[p].bytes
    return found


def _uncut(plan: ExecutionPlan, metagraph: MetaGraph, graph: OperatorGraph) -> set[tuple[int, int]]:
    """Runs and layers before which no cut may be: what comes from other devices would come twice."""
    operators, producers = graph.operator_map(), graph.producers()
    devices = {name: run.devices for _, _, run, layer in _layers(plan, metagraph) for name in layer}
    reading: dict[tuple[int, str], int] = {}
    found: set[tuple[int, int]] = set()
    for i, k, run, layer in _layers(plan, metagraph):
        for value in (v for name in layer for v in operators[name].inputs):
            if devices.get(producers[value], run.devices) != run.devices:
                earlier = reading.setdefault((i, value), k)
                found.update((i, between) for between in range(earlier + 1, k + 1))
    return found


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
