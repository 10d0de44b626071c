"""What each device holds over an iteration."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_spindle.costs import Costs
from lightning_spindle.program import Program
from lightning_spindle.timeline import MemorySample


class Memory:
    """Parameters, optimizer state, gradients, activations and copies of gradients that are being summed.

    An iteration starts with the last one's gradients, which are cleared when the forwards have ended,
    as Lightning does. A run's activations are there from the start of its forward to the end of its
    backward, its gradients from there on; a bucket is a copy of its gradients until all sums are done.
    New values that owners broadcast are copies too, until all have come. Buffers of messages are not
    counted.
    """

    def __init__(self, program: Program, costs: Costs, kept_bytes: Mapping[tuple[int, int], float]) -> None:
        self._program, self._costs, self._kept = program, costs, kept_bytes
        self.held: list[list[str]] = [[] for _ in range(program.devices)]
        """Parameters of each rank."""
        self.stepped: list[list[str]] = [[] for _ in range(program.devices)]
        """Those whose optimizer state it keeps."""
        for name, holders in program.holders.items():
            for rank in holders:
                self.held[rank].append(name)
                if program.owners.get(name, rank) == rank:
                    self.stepped[rank].append(name)
        operators = costs.graph.operator_map()
        self._parameters = [
            list(dict.fromkeys(p for o in run.operators for p in operators[o].parameters))
            for run in program.runs
        ]
        self._changes: list[list[tuple[float, float]]] = [[] for _ in range(program.devices)]
        self._cleared: list[set[str]] = [set() for _ in range(program.devices)]
        """Parameters without a gradient at present."""
        self._copies = [0.0] * program.devices

    def forward_starts(self, run: int, rank: int, now_s: float) -> None:
        self._change(rank, now_s, self._kept[run, rank])

    def released(self, run: int, rank: int, now_s: float) -> None:
        """A run's activations are needed no more."""
        self._change(rank, now_s, -self._kept[run, rank])

    def gradients_cleared(self, runs: frozenset[int], rank: int, now_s: float) -> None:
        """Those of all that ``runs``, which pass gradients back, use on this rank."""
        mine = {p for r in runs if rank in self._program.runs[r].devices for p in self._parameters[r]}
        self._cleared[rank] = mine
        self._change(rank, now_s, -self._costs.gradient_bytes(mine))

    def backward_ended(self, run: int, rank: int, now_s: float) -> None:
        new = self._cleared[rank].intersection(self._parameters[run])
        self._cleared[rank] -= new
        self._change(rank, now_s, self._costs.gradient_bytes(new))

    def copied(self, size_bytes: float, rank: int, now_s: float) -> None:
        """A bucket was posted, of gradients to be summed or of new values."""
        self._copies[rank] += size_bytes
        self._change(rank, now_s, size_bytes)

    def copies_end(self, rank: int, now_s: float) -> None:
        """All are let go together."""
        self._change(rank, now_s, -self._copies[rank])
        self._copies[rank] = 0.0

    def samples(self) -> tuple[MemorySample, ...]:
        found: list[MemorySample] = []
        for rank, changes in enumerate(self._changes):
            held, at_s = self._costs.held_bytes(self.held[rank], self.stepped[rank]), 0.0
            for time_s, change in changes:
                if time_s > at_s:
                    found.append(MemorySample(rank, at_s, round(held)))
                held, at_s = held + change, time_s
            found.append(MemorySample(rank, at_s, round(held)))
        return tuple(found)

    def _change(self, rank: int, now_s: float, change: float) -> None:
        if change:
            self._changes[rank].append((now_s, change))
