"""Which rows of a task's batches a rank reads, from what runs on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache

from lightning_spindle.capture.pieces import Capture, LeafRef
from lightning_spindle.program import Program, ProgramRun
from lightning_spindle.runtime.rows import Rows

Needs = Callable[[int], tuple[Rows, ...]]
"""Row ranges of a batch of so many rows, in order and apart from each other."""


def no_rows(rows: int) -> tuple[Rows, ...]:
    """The needs of a rank that runs nothing of a task."""
    return ()


def reads_batch(captured: Capture, run: ProgramRun) -> bool:
    """Whether a run takes anything from the batch itself, not only from other operators."""
    return any(
        isinstance(source, LeafRef) for name in run.operators for source in captured.pieces[name].sources
    )


def rows_needed(program: Program, captured: Capture, task: str, rank: int) -> Needs:
    """The rows of a task's batches that ``rank`` reads: those of its shards that read the batch, and the
    first row of each message that it sends or receives.

    Shapes of messages follow from those of the batch. That both ends read a row of it makes them the same
    at both, or collating fails as it would in one process.
    """
    mine = [run for run in program.runs if run.task == task and rank in run.devices]
    if not mine:
        return no_rows
    reading = [run for run in mine if reads_batch(captured, run)]

    @cache
    def needs(rows: int) -> tuple[Rows, ...]:
        own = [run.rows(run.devices.index(rank), rows) for run in reading]
        firsts = [(first, first + 1) for run in mine for first, _ in _messages(program, run, rank, rows)]
        return united([*own, *firsts])

    return needs


def _messages(program: Program, run: ProgramRun, rank: int, rows: int) -> Iterator[Rows]:
    """The rows in each message between a run's shard on ``rank`` and other ranks."""
    shard = run.devices.index(rank)
    for edge in program.edges:
        if run.index not in (edge.source, edge.target):
            continue
        sends = edge.source == run.index
        other = program.runs[edge.target if sends else edge.source]
        for at, device in enumerate(other.devices):
            ends = (shard, at) if sends else (at, shard)
            shared = program.shared_rows(edge, *ends, rows)
            if device != rank and shared[0] < shared[1]:
                yield shared


def united(ranges: Iterable[Rows]) -> tuple[Rows, ...]:
    """The rows that are in any of the ranges; ranges that touch become one.

    >>> united([(4, 6), (0, 2), (2, 3), (5, 5)])
    ((0, 3), (4, 6))
    """
    found: list[Rows] = []
    for first, last in sorted(r for r in ranges if r[0] < r[1]):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)
