"""One iteration on one rank: the batches it gets, what it keeps on the way, and when it did what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_spindle.capture.coarse import CoarseRun
from lightning_spindle.capture.layout import take_rows
from lightning_spindle.capture.pieces import BatchLayout
from lightning_spindle.graph import Result
from lightning_spindle.program import Instruction, Program
from lightning_spindle.runtime.gradients import PendingBucket
from lightning_spindle.runtime.messages import Received, Signature
from lightning_spindle.runtime.rows import Rows
from lightning_spindle.runtime.telling import Told
from lightning_spindle.timeline import Category, Event


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """A task's batch on this rank: its rows, and its leaves where the rank reads any.

    ``held``: the row ranges that the leaves hold, one after the other; None for all rows. ``drawn``: a
    checksum of what the sampler drew, 0 where that is not known.
    """

    rows: int
    leaves: list[Any] | None
    held: tuple[Rows, ...] | None = None
    drawn: int = 0

    def taken(self, layout: BatchLayout, rows: Rows) -> list[Any]:
        """Rows ``rows`` of each leaf, which this rank must hold."""
        assert self.leaves is not None, "a rank runs an operator without its batch"
        if rows == (0, self.rows) and self.held in (None, (rows,)):
            return self.leaves
        start = 0
        for first, last in self.held or ((0, self.rows),):
            if first <= rows[0] and rows[1] <= last:
                begin = start + rows[0] - first
                return take_rows(self.leaves, layout, begin, begin + rows[1] - rows[0])
            start += last - first
        raise AssertionError(f"rows {rows} were not read, but {self.held}")

    def signature(self, layout: BatchLayout) -> Signature:
        """The shapes of the batch without its rows; decides the shapes of values that go between ranks."""
        assert self.leaves is not None
        parts: list[Any] = []
        for leaf, where in zip(self.leaves, layout.leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                shape = list(leaf.shape)
                if where.dim is not None:
                    shape[where.dim] = -1
                parts.append((tuple(shape), leaf.dtype))
            else:
                parts.append(type(leaf).__name__)
        return tuple(parts)


@dataclass(slots=True)
class RunState:
    """What a run keeps from its forward to its backward."""

    rows: Rows
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, Any]
    results: dict[str, Any]
    gradients: dict[str, list[tuple[Rows, Received | torch.Tensor]]] = field(default_factory=dict)


@dataclass(slots=True)
class Iteration:
    """The state of one iteration: made by ``forward``, used up by ``backward``."""

    index: int
    batch_idx: int
    batches: dict[str, TaskBatch]
    signatures: Mapping[str, Signature]
    runs: dict[int, RunState] = field(default_factory=dict)
    received: dict[int, list[Received]] = field(default_factory=dict)
    results: dict[Result, float | torch.Tensor] = field(default_factory=dict)
    coarse: dict[str, CoarseRun] = field(default_factory=dict)
    """What steps that could not be taken apart did here beside their loss, by operator."""
    told: dict[str, Told] = field(default_factory=dict)
    """What those did anywhere, as all ranks know it."""
    given: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """What other steps give to every rank (``pieces.GivenRef``), by task."""
    buckets: list[PendingBucket] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    """Runs whose backward is done; their inputs live until the next one starts."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What this rank did for an instruction, in seconds of ``time.perf_counter``.

    An instruction that waited for another rank has a mark of its own for that. ``instruction``
    is None for the wait at the end of the iteration.
    """

    instruction: Instruction | None
    category: Category
    start_s: float
    end_s: float

    def event(self, program: Program, rank: int, zero_s: float) -> Event:
        """As a timeline shows it that starts at ``zero_s``."""
        i = self.instruction
        return Event(
            rank,
            self.start_s - zero_s,
            self.end_s - zero_s,
            "" if i is None else str(i),
            self.category.value if i is None else program.label(i),
            self.category,
            "" if i is None else program.task(i),
        )
