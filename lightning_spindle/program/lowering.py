"""Lowering: from placed runs to the instructions that each rank executes (paper, section 3.6).

``lower`` puts all computing and all communication of an iteration into one global total
order; a rank executes its projection of it. Two ranks that talk to each other therefore
meet their messages in the same order, so that even sends that block until they are
received cannot deadlock. ``simulate.check_deadlock`` proves it for each program anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from lightning_spindle.graph import Layout, OperatorGraph
from lightning_spindle.program.instructions import Instruction, Kind
from lightning_spindle.program.pooling import most_groups, pooled
from lightning_spindle.program.program import Broadcast, Bucket, Edge, Program, ProgramRun

BUCKET_BYTES = 100 * 2**20
"""Gradients that are summed together at most: enough that latency is a small part (decision 0022)."""

_Key = TypeVar("_Key")


def lower(
    runs: Sequence[ProgramRun],
    graph: OperatorGraph,
    devices: int,
    held: Mapping[str, tuple[int, ...]],
    *,
    trainable: Iterable[str] | None,
    bucket_bytes: int = BUCKET_BYTES,
    groups: int | None = None,
    owners: Mapping[str, int] | None = None,
) -> Program:
    """The program of placed runs.

    Args:
        runs: in an order in which they can execute (``place_plan``, ``follow``).
        held: parameter to holders over all steps; gradients are summed over them.
        trainable: parameters that get gradients; None for a forward-only program.
        groups: at most so many parameter device groups besides that of all devices
            (default: ``pooling.most_groups``).
        owners: parameter to the holder that alone steps it, and then gives the others its new values;
            each holder steps those that are not named (``ownership.owners``).

    Raises:
        ValueError: gradients would flow through an operator that runs on every rank, or a split run gives
            a value of which it needs the whole batch's.
    """
    trains = frozenset(trainable or ())
    gradients = graph.gradient_values(trains) if trainable is not None else frozenset()
    _check_everywhere(graph, trains, gradients)
    edges = _edges(runs, graph, gradients)
    order = _forward_order(runs, edges)
    order.append(Instruction(Kind.EXCHANGE))
    buckets: tuple[Bucket, ...] = ()
    broadcasts: tuple[Broadcast, ...] = ()
    if trainable is not None:
        used = _users(runs, graph, trains.intersection(held).intersection(graph.parameter_map()))
        pool = _pool(used, held, graph, devices, most_groups(devices) if groups is None else groups)
        backward = _backward_runs(runs, edges)
        buckets = _buckets(used, _completed(used, backward), held, graph, pool, bucket_bytes)
        order += _backward_order(backward, runs, edges, buckets)
        broadcasts = _broadcasts(buckets, owners or {}, graph, bucket_bytes)
        order += [Instruction(Kind.BROADCAST, b.index) for b in broadcasts]
    owned = dict(owners or {})
    return Program(devices, tuple(runs), edges, buckets, tuple(order), dict(held), owned, broadcasts)


def _check_everywhere(graph: OperatorGraph, trains: frozenset[str], gradients: frozenset[str]) -> None:
    """Each rank would add the whole gradient of such an operator: refused, never summed n times."""
    if not any(r.is_loss for r in graph.results):
        return
    leading = graph.loss_operators()
    for o in graph.operators:
        passes = trains.intersection(o.parameters) or gradients.intersection(o.inputs)
        if o.layout is Layout.EVERYWHERE and o.name in leading and passes:
            raise ValueError(
                f"invalid graph: {o.name} of task {o.task} runs on every rank, but a loss needs its "
                f"gradient; it must be split or run whole"
            )


def _edges(runs: Sequence[ProgramRun], graph: OperatorGraph, gradients: frozenset[str]) -> tuple[Edge, ...]:
    """What goes between runs; a gradient comes back where a consumer leads to a loss."""
    operators, leading, values = graph.operator_map(), graph.loss_operators(), graph.value_map()
    giver = {name: run.index for run in runs for op in run.operators for name in operators[op].outputs}
    found: dict[tuple[int, int, str], bool] = {}
    for run in runs:
        for op in run.operators:
            for value in operators[op].inputs:
                if giver[value] != run.index:
                    key = (giver[value], run.index, value)
                    found[key] = found.get(key, False) or (op in leading and value in gradients)
                elif values[value].meets and run.layout is Layout.SPLIT and len(run.devices) > 1:
                    raise ValueError(
                        f"invalid plan: {op} needs {value} of the whole batch, and is in the same run "
                        f"({run.label}) as the operator that gives it"
                    )
    return tuple(
        Edge(i, value, source, target, gradient, values[value].meets, values[value].alike)
        for i, ((source, target, value), gradient) in enumerate(sorted(found.items()))
    )


def _shard_pairs(edge: Edge, runs: Sequence[ProgramRun]) -> list[tuple[int, int]]:
    """Pairs of shards on different devices whose rows can meet, whatever the batch."""
    source, target = runs[edge.source], runs[edge.target]
    if source.layout is Layout.EVERYWHERE:
        return []
    n, m = len(source.devices), len(target.devices)
    pairs = []
    for i in range(n):
        for j in range(m):
            if source.devices[i] == target.devices[j]:
                continue
            aligned = source.layout is Layout.SPLIT and target.layout is Layout.SPLIT and not edge.meets
            if not aligned or max(i * m, j * n) < min((i + 1) * m, (j + 1) * n):
                pairs.append((i, j))
    return pairs


def _forward_order(runs: Sequence[ProgramRun], edges: Sequence[Edge]) -> list[Instruction]:
    """Each run, then at once the messages that carry its values to others."""
    leaving: dict[int, list[Edge]] = {}
    for edge in edges:
        leaving.setdefault(edge.source, []).append(edge)
    order: list[Instruction] = []
    for run in runs:
        order.append(Instruction(Kind.FORWARD, run.index))
        for edge in leaving.get(run.index, ()):
            pairs = _shard_pairs(edge, runs)
            order += [Instruction(Kind.ACTIVATION, edge.index, i, j) for i, j in pairs]
    return order


def _backward_runs(runs: Sequence[ProgramRun], edges: Sequence[Edge]) -> list[ProgramRun]:
    """The runs in an order in which backward can execute: the mirror of the forwards, but some losses first.

    All devices that gave the inputs of a loss that couples samples wait for its gradients. Where tasks follow
    each other, in a plain mirror these would queue behind the sums of the task before.
    """
    entering = _gradients(edges, lambda e: e.target)
    leaving = _gradients(edges, lambda e: e.source)

    def leads(run: ProgramRun) -> bool:
        couples = run.layout is Layout.WHOLE or any(e.meets for e in entering.get(run.index, ()))
        return couples and run.index in entering and run.index not in leaving

    return sorted(runs, key=lambda run: (not leads(run), -run.index))


def _completed(users: Mapping[_Key, tuple[int, ...]], backward: Sequence[ProgramRun]) -> dict[_Key, int]:
    """When all gradients of something are there: the place in ``backward`` of the last run that uses it.

    For what no run uses, the last place.
    """
    places = {run.index: place for place, run in enumerate(backward)}
    return {key: max((places[r] for r in used), default=len(backward) - 1) for key, used in users.items()}


def _backward_order(
    backward: Sequence[ProgramRun],
    runs: Sequence[ProgramRun],
    edges: Sequence[Edge],
    buckets: Sequence[Bucket],
) -> list[Instruction]:
    """Each run, then at once the messages with its gradients, and the sums of what it completes."""
    due: dict[int, list[Instruction]] = {}
    for index, place in _completed({b.index: b.runs for b in buckets}, backward).items():
        due.setdefault(place, []).append(Instruction(Kind.REDUCE, index))
    entering = _gradients(edges, lambda e: e.target)
    order: list[Instruction] = []
    for place, run in enumerate(backward):
        order.append(Instruction(Kind.BACKWARD, run.index))
        for edge in entering.get(run.index, ()):
            pairs = _shard_pairs(edge, runs)
            order += [Instruction(Kind.GRADIENT, edge.index, i, j) for i, j in pairs]
        order += due.get(place, [])
    return order


def _gradients(edges: Iterable[Edge], key: Callable[[Edge], int]) -> dict[int, list[Edge]]:
    """The edges on which gradients come back."""
    found: dict[int, list[Edge]] = {}
    for edge in edges:
        if edge.gradient:
            found.setdefault(key(edge), []).append(edge)
    return found


def _users(
    runs: Sequence[ProgramRun], graph: OperatorGraph, parameters: Iterable[str]
) -> dict[str, tuple[int, ...]]:
    """For each of the parameters the runs that use it, ascending."""
    operators = graph.operator_map()
    users: dict[str, dict[int, None]] = {p: {} for p in sorted(parameters)}
    for run in runs:
        for op in run.operators:
            for p in operators[op].parameters:
                if p in users:
                    users[p][run.index] = None
    return {p: tuple(indices) for p, indices in users.items()}


def _pool(
    used: Iterable[str], held: Mapping[str, tuple[int, ...]], graph: OperatorGraph, devices: int, most: int
) -> dict[tuple[int, ...], tuple[int, ...]]:
    parameters = graph.parameter_map()
    wanted: dict[tuple[int, ...], int] = {}
    for p in used:
        if len(held[p]) > 1:
            wanted[held[p]] = wanted.get(held[p], 0) + parameters[p].bytes
    return pooled(wanted, devices, most)


def _buckets(
    used: Mapping[str, tuple[int, ...]],
    completed: Mapping[str, int],
    held: Mapping[str, tuple[int, ...]],
    graph: OperatorGraph,
    pool: Mapping[tuple[int, ...], tuple[int, ...]],
    bucket_bytes: int,
) -> tuple[Bucket, ...]:
    """Parameters of equal holders and dtype, packed in the order in which backward completes them."""
    parameters = graph.parameter_map()
    shared = [p for p in sorted(used, key=lambda p: (completed[p], p)) if len(held[p]) > 1]
    packed = _packed(shared, lambda p: (held[p], parameters[p].dtype), graph, bucket_bytes)
    return tuple(
        Bucket(
            i,
            pool[holders],
            names,
            sum(parameters[p].bytes for p in names),
            tuple(sorted({r for p in names for r in used[p]})),
            dtype,
        )
        for i, ((holders, dtype), names) in enumerate(packed)
    )


def _broadcasts(
    buckets: Iterable[Bucket], owners: Mapping[str, int], graph: OperatorGraph, bucket_bytes: int
) -> tuple[Broadcast, ...]:
    """Parameters of equal owner, group and dtype, packed in the order in which their gradients are summed."""
    parameters = graph.parameter_map()
    groups = {p: bucket.devices for bucket in buckets for p in bucket.parameters if p in owners}
    packed = _packed(groups, lambda p: (owners[p], groups[p], parameters[p].dtype), graph, bucket_bytes)
    return tuple(
        Broadcast(i, source, devices, names, sum(parameters[p].bytes for p in names), dtype)
        for i, ((source, devices, dtype), names) in enumerate(packed)
    )


def _packed(
    names: Iterable[str], key: Callable[[str], _Key], graph: OperatorGraph, most_bytes: int
) -> list[tuple[_Key, tuple[str, ...]]]:
    """Parameters of equal key together, in their order; a larger one than ``most_bytes`` goes alone."""
    parameters = graph.parameter_map()
    filling: dict[_Key, list[str]] = {}
    packed: list[tuple[_Key, tuple[str, ...]]] = []
    for p in names:
        filled = filling.setdefault(key(p), [])
        if filled and sum(parameters[q].bytes for q in filled) + parameters[p].bytes > most_bytes:
            packed.append((key(p), tuple(filled)))
            filled.clear()
        filled.append(p)
    return packed + [(of, tuple(filled)) for of, filled in filling.items()]
