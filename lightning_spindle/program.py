"""Lowering: from a plan to the instructions that each rank executes (paper, section 3.6).

``lower`` puts all computing and all communication of an iteration into one global total
order; a rank executes its projection of it. Two ranks that talk to each other therefore
meet their messages in the same order, so that even sends that block until they are
received cannot deadlock. ``simulate.check_deadlock`` proves it for each program anyway.

Rows are a matter of the iteration, not of the program: shard i of n holds the rows
[i*B//n, (i+1)*B//n), so shards differ by at most one row, and splits into n and into a
multiple of n nest. A message whose row ranges do not meet is skipped by both ends.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lightning_spindle.graph import Layout, MetaGraph, OperatorGraph
from lightning_spindle.plan import ExecutionPlan

BUCKET_BYTES = 25 * 2**20


def row_range(shard: int, shards: int, rows: int) -> tuple[int, int]:
    """Rows [first, last) of shard ``shard`` of ``shards`` in a batch of ``rows``.

    >>> [row_range(i, 4, 6) for i in range(4)]
    [(0, 1), (1, 3), (3, 4), (4, 6)]
    """
    return shard * rows // shards, (shard + 1) * rows // shards


class Kind(StrEnum):
    """What an instruction does; the value is its letter in the text form."""

    __hash__ = str.__hash__  # many times faster than that of Enum

    FORWARD = "F"
    ACTIVATION = "A"
    """Rows of a value go from the producing to a consuming shard."""
    EXCHANGE = "X"
    """Loss and logged values become known on all ranks."""
    BACKWARD = "B"
    GRADIENT = "G"
    """The gradient of what ACTIVATION carried goes back the same way."""
    REDUCE = "R"
    """A bucket of gradients is summed over its parameter device group."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of the global order.

    ``index`` is a run (F, B), an edge (A, G) or a bucket (R). ``source`` and ``target`` are
    shards of the edge's runs; the direction of a GRADIENT is target to source. The text
    form parses back:

    >>> Instruction.parse("A5:0>1")
    Instruction(kind=<Kind.ACTIVATION: 'A'>, index=5, source=0, target=1)
    >>> str(Instruction(Kind.FORWARD, 3))
    'F3'
    """

    kind: Kind
    index: int = 0
    source: int = 0
    target: int = 0

    def __str__(self) -> str:
        if self.kind is Kind.EXCHANGE:
            return "X"
        if self.kind in (Kind.ACTIVATION, Kind.GRADIENT):
            return f"{self.kind}{self.index}:{self.source}>{self.target}"
        return f"{self.kind}{self.index}"

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """Raises ValueError where ``text`` is no instruction."""
        match = re.fullmatch(r"X|([FBR])(\d+)|([AG])(\d+):(\d+)>(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is no instruction")
        single, index, message, edge, source, target = match.groups()
        if message:
            return cls(Kind(message), int(edge), int(source), int(target))
        return cls(Kind(single), int(index)) if single else cls(Kind.EXCHANGE)


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """Operators that a device group executes together; device i of it holds shard i."""

    index: int
    label: str
    task: str
    operators: tuple[str, ...]
    devices: tuple[int, ...]
    layout: Layout

    def shard_of(self, device: int) -> int | None:
        return self.devices.index(device) if device in self.devices else None

    def rows(self, shard: int, rows: int) -> tuple[int, int]:
        """Rows [first, last) that a shard of this run sees of a batch of ``rows``."""
        return row_range(shard, len(self.devices), rows) if self.layout is Layout.SPLIT else (0, rows)


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that goes from one run to another."""

    index: int
    value: str
    source: int
    target: int
    gradient: bool


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients are summed together over the devices that hold them.

    ``runs`` are those that use them: once a device's share of these ran backward, its
    gradients are complete.
    """

    index: int
    devices: tuple[int, ...]
    parameters: tuple[str, ...]
    bytes: int
    runs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """One iteration, for all ranks. ``holders``: devices that hold each parameter."""

    devices: int
    runs: tuple[ProgramRun, ...]
    edges: tuple[Edge, ...]
    buckets: tuple[Bucket, ...]
    order: tuple[Instruction, ...]
    holders: Mapping[str, tuple[int, ...]]

    def participants(self, instruction: Instruction) -> tuple[int, ...]:
        """The ranks that execute an instruction; for a message the sender comes first."""
        match instruction.kind:
            case Kind.FORWARD | Kind.BACKWARD:
                return self.runs[instruction.index].devices
            case Kind.ACTIVATION | Kind.GRADIENT:
                edge = self.edges[instruction.index]
                source = self.runs[edge.source].devices[instruction.source]
                target = self.runs[edge.target].devices[instruction.target]
                return (source, target) if instruction.kind is Kind.ACTIVATION else (target, source)
            case Kind.REDUCE:
                return self.buckets[instruction.index].devices
            case Kind.EXCHANGE:
                return tuple(range(self.devices))

    def rank(self, rank: int) -> tuple[Instruction, ...]:
        """The projection of the global order on one rank."""
        return tuple(i for i in self.order if rank in self.participants(i))

    def projections(self) -> tuple[tuple[Instruction, ...], ...]:
        """The projections on all ranks, in one pass."""
        ranks: list[list[Instruction]] = [[] for _ in range(self.devices)]
        for instruction in self.order:
            for rank in self.participants(instruction):
                ranks[rank].append(instruction)
        return tuple(map(tuple, ranks))

    def shared_rows(self, edge: Edge, source: int, target: int, rows: int) -> tuple[int, int]:
        """Rows of the batch that both shards of an edge see; empty where first >= last."""
        a, b = self.runs[edge.source].rows(source, rows)
        c, d = self.runs[edge.target].rows(target, rows)
        return max(a, c), min(b, d)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Parameter device groups of more than one device, in one order for all ranks."""
        return tuple(sorted({b.devices for b in self.buckets}))

    def task(self, instruction: Instruction) -> str:
        """The task that an instruction works for; "" where several share it."""
        match instruction.kind:
            case Kind.FORWARD | Kind.BACKWARD:
                return self.runs[instruction.index].task
            case Kind.ACTIVATION | Kind.GRADIENT:
                return self.runs[self.edges[instruction.index].source].task
            case Kind.REDUCE:
                tasks = {self.runs[r].task for r in self.buckets[instruction.index].runs}
                return tasks.pop() if len(tasks) == 1 else ""
            case Kind.EXCHANGE:
                return ""

    def label(self, instruction: Instruction) -> str:
        """What an instruction is called in timelines: "image_text/vision[0:2]", "x, 0 to 2"."""
        match instruction.kind:
            case Kind.FORWARD | Kind.BACKWARD:
                return self.runs[instruction.index].label
            case Kind.ACTIVATION | Kind.GRADIENT:
                value = self.edges[instruction.index].value
                sender, receiver = self.participants(instruction)
                what = value if instruction.kind is Kind.ACTIVATION else f"gradient of {value}"
                return f"{what}, {sender} to {receiver}"
            case Kind.REDUCE:
                return f"gradients of {len(self.buckets[instruction.index].parameters)} parameters"
            case Kind.EXCHANGE:
                return "losses and logged values"

    def describe(self, instruction: Instruction) -> str:
        """An instruction in words, for messages: "A5:0>1 (image_text/x, rank 0 to rank 2)"."""
        ranks = self.participants(instruction)
        match instruction.kind:
            case Kind.FORWARD | Kind.BACKWARD:
                what = self.runs[instruction.index].label
            case Kind.ACTIVATION | Kind.GRADIENT:
                edge = self.edges[instruction.index]
                run = self.runs[edge.target if instruction.kind is Kind.ACTIVATION else edge.source]
                what = f"{edge.value} for {run.label}, rank {ranks[0]} to rank {ranks[1]}"
            case Kind.REDUCE:
                what = f"gradients of {self.buckets[instruction.index].parameters[0]} … over ranks {ranks}"
            case Kind.EXCHANGE:
                what = "loss and logged values, all ranks"
        return f"{instruction} ({what})"


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
    runs: Sequence[ProgramRun], devices: int, trained: OperatorGraph, graph: OperatorGraph
) -> tuple[ProgramRun, ...]:
    """Places another step's graph (validation, test) where a trained graph's parameters lie.

    An operator goes to the devices of the run that holds most of its parameters (of its own
    task where there is a choice), one without parameters to the devices that give its
    inputs, else to all devices.
    """
    holding = {name: run for run in runs for name in run.operators}
    users: dict[str, list[str]] = {}
    for o in trained.operators:
        for p in o.parameters:
            users.setdefault(p, []).append(o.name)
    producers = graph.producers()
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
        if o.layout is Layout.EVERYWHERE:
            group = everywhere
        where[o.name] = group[:1] if o.layout is Layout.WHOLE else group
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


def lower(
    runs: Sequence[ProgramRun],
    graph: OperatorGraph,
    devices: int,
    held: Mapping[str, tuple[int, ...]],
    *,
    trainable: Iterable[str] | None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Program:
    """The program of placed runs.

    Args:
        runs: in an order in which they can execute (``place_plan``, ``follow``).
        held: parameter to holders over all steps; gradients are summed over them.
        trainable: parameters that get gradients; None for a forward-only program.

    Raises:
        ValueError: gradients would flow through an operator that runs on every rank.
    """
    trains = frozenset(trainable or ())
    gradients = graph.gradient_values(trains) if trainable is not None else frozenset()
    _check_everywhere(graph, trains, gradients)
    edges = _edges(runs, graph, gradients)
    order = _forward_order(runs, edges)
    order.append(Instruction(Kind.EXCHANGE))
    buckets: tuple[Bucket, ...] = ()
    if trainable is not None:
        used = _users(runs, graph, trains.intersection(held).intersection(graph.parameter_map()))
        buckets = _buckets(used, held, graph, bucket_bytes)
        order += _backward_order(runs, edges, buckets)
    return Program(devices, tuple(runs), edges, buckets, tuple(order), dict(held))


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


def _edges(runs: Sequence[ProgramRun], graph: OperatorGraph, gradients: frozenset[str]) -> tuple[Edge, ...]:
    """What goes between runs; a gradient comes back where a consumer leads to a loss."""
    operators, leading = graph.operator_map(), graph.loss_operators()
    giver = {name: run.index for run in runs for op in run.operators for name in operators[op].outputs}
    found: dict[tuple[int, int, str], bool] = {}
    for run in runs:
        for op in run.operators:
            for value in operators[op].inputs:
                if giver[value] != run.index:
                    key = (giver[value], run.index, value)
                    found[key] = found.get(key, False) or (op in leading and value in gradients)
    return tuple(
        Edge(i, value, source, target, gradient)
        for i, ((source, target, value), gradient) in enumerate(sorted(found.items()))
    )


def _shard_pairs(source: ProgramRun, target: ProgramRun) -> list[tuple[int, int]]:
    """Pairs of shards on different devices whose rows can meet, whatever the batch."""
    if source.layout is Layout.EVERYWHERE:
        return []
    n, m = len(source.devices), len(target.devices)
    pairs = []
    for i in range(n):
        for j in range(m):
            if source.devices[i] == target.devices[j]:
                continue
            aligned = source.layout is Layout.SPLIT and target.layout is Layout.SPLIT
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
            pairs = _shard_pairs(run, runs[edge.target])
            order += [Instruction(Kind.ACTIVATION, edge.index, i, j) for i, j in pairs]
    return order


def _backward_order(
    runs: Sequence[ProgramRun], edges: Sequence[Edge], buckets: Sequence[Bucket]
) -> list[Instruction]:
    """The mirror of the forwards; a bucket is summed as soon as its last user ran."""
    due: dict[int, list[Instruction]] = {}
    for bucket in buckets:
        # Backward runs in reverse, so that the lowest run index comes last.
        last = min(bucket.runs, default=0)
        due.setdefault(last, []).append(Instruction(Kind.REDUCE, bucket.index))
    entering: dict[int, list[Edge]] = {}
    for edge in edges:
        if edge.gradient:
            entering.setdefault(edge.target, []).append(edge)
    order: list[Instruction] = []
    for run in reversed(runs):
        order.append(Instruction(Kind.BACKWARD, run.index))
        for edge in entering.get(run.index, ()):
            pairs = _shard_pairs(runs[edge.source], run)
            order += [Instruction(Kind.GRADIENT, edge.index, i, j) for i, j in pairs]
        order += due.get(run.index, [])
    return order


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


def _buckets(
    used: Mapping[str, tuple[int, ...]],
    held: Mapping[str, tuple[int, ...]],
    graph: OperatorGraph,
    bucket_bytes: int,
) -> tuple[Bucket, ...]:
    """Parameters of equal device group and dtype, packed in the order in which backward finishes them."""
    parameters = graph.parameter_map()
    finished = sorted(used, key=lambda p: (-min(used[p], default=0), p))
    filling: dict[tuple[tuple[int, ...], str], list[str]] = {}
    packed: list[tuple[tuple[int, ...], tuple[str, ...]]] = []
    for p in finished:
        if len(held[p]) < 2:
            continue
        bucket = filling.setdefault((held[p], parameters[p].dtype), [])
        size = sum(parameters[q].bytes for q in bucket)
        if bucket and size + parameters[p].bytes > bucket_bytes:
            packed.append((held[p], tuple(bucket)))
            bucket.clear()
        bucket.append(p)
    packed += [(devices, tuple(bucket)) for (devices, _), bucket in filling.items()]
    return tuple(
        Bucket(
            i,
            devices,
            names,
            sum(parameters[p].bytes for p in names),
            tuple(sorted({r for p in names for r in used[p]})),
        )
        for i, (devices, names) in enumerate(packed)
    )
