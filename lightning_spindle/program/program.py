"""A program: placed runs, what goes between them, and one order for all ranks.

Rows are a matter of the iteration, not of the program: shard i of n holds the rows
[i*B//n, (i+1)*B//n), so shards differ by at most one row, and splits into n and into a
multiple of n nest. A message whose row ranges do not meet is skipped by both ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_spindle.graph import Layout
from lightning_spindle.program.instructions import Instruction, Kind


def row_range(shard: int, shards: int, rows: int) -> tuple[int, int]:
    """Rows [first, last) of shard ``shard`` of ``shards`` in a batch of ``rows``.

    >>> [row_range(i, 4, 6) for i in range(4)]
    [(0, 1), (1, 3), (3, 4), (4, 6)]
    """
    return shard * rows // shards, (shard + 1) * rows // shards


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
    """A value that goes from one run to another.

    ``meets``: each shard of the target gets what all shards of the source have (``Value.meets``).
    ``alike``: the value has no rows, all shards of the source have the same; each shard of the target
    gets it from one of them, which gets the gradient.
    """

    index: int
    value: str
    source: int
    target: int
    gradient: bool
    meets: bool = False
    alike: bool = False

    def reads(self, own: tuple[int, int], rows: int) -> tuple[int, int]:
        """Rows of the value that a target shard with rows ``own`` reads in a batch of ``rows``.

        What is alike it reads at its first row, which exactly one shard of the source has.
        """
        if own[0] >= own[1]:
            return own
        if self.meets:
            return (0, rows)
        return (own[0], own[0] + 1) if self.alike else own


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters with the same holders, whose gradients are summed together over ``devices``.

    These are the holders, or a wider group of the pool (``pooling``), whose other devices add zeros.
    ``runs`` are those that use them: once a device's share of these ran backward, its gradients are
    complete. ``bytes`` of the gradients, all of ``dtype``.
    """

    index: int
    devices: tuple[int, ...]
    parameters: tuple[str, ...]
    bytes: int
    runs: tuple[int, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Parameters whose optimizer state one device keeps, and whose new values it gives to their holders.

    ``devices`` are the holders, or a wider group of the pool, whose other devices forget what they get.
    ``bytes`` of the values, all of ``dtype``.
    """

    index: int
    source: int
    devices: tuple[int, ...]
    parameters: tuple[str, ...]
    bytes: int
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Program:
    """One iteration, for all ranks.

    ``holders``: devices that hold each parameter. ``owners``: the one of them that steps it; a parameter
    that has none is stepped by all its holders.
    """

    devices: int
    runs: tuple[ProgramRun, ...]
    edges: tuple[Edge, ...]
    buckets: tuple[Bucket, ...]
    order: tuple[Instruction, ...]
    holders: Mapping[str, tuple[int, ...]]
    owners: Mapping[str, int] = field(default_factory=dict)
    broadcasts: tuple[Broadcast, ...] = ()

    def stepped(self, rank: int) -> tuple[str, ...]:
        """The parameters that a rank steps, and keeps the optimizer state of."""
        return tuple(
            p for p, ranks in self.holders.items() if rank in ranks and self.owners.get(p, rank) == rank
        )

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
            case Kind.BROADCAST:
                return self.broadcasts[instruction.index].devices
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
        """Rows of a value that both shards of an edge have; empty where first >= last."""
        a, b = self.runs[edge.source].rows(source, rows)
        c, d = edge.reads(self.runs[edge.target].rows(target, rows), rows)
        return max(a, c), min(b, d)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The pool: groups over which gradients are summed, in one order for all ranks.

        Values are broadcast over the same ones.
        """
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
            case Kind.EXCHANGE | Kind.BROADCAST:
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
            case Kind.BROADCAST:
                return f"new values of {len(self.broadcasts[instruction.index].parameters)} parameters"
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
            case Kind.BROADCAST:
                given = self.broadcasts[instruction.index]
                what = f"values of {given.parameters[0]} … from rank {given.source} to ranks {ranks}"
            case Kind.EXCHANGE:
                what = "loss and logged values, all ranks"
        return f"{instruction} ({what})"
