"""Systems on one cell beside DeepSpeed: rows that several figures share."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarking.figures.suite import Suite
from benchmarking.report_simulated import speedup
from benchmarking.rows import SimulatedRow
from benchmarking.simulated import Cell

COMPARED = ("deepspeed", "megatron", "seq", "uniform", "stmm", "optimus", "spindle", "search")


@dataclass(frozen=True, slots=True)
class ComparedRow(SimulatedRow):
    """A system on a cell, and what the paper reports of it."""

    speedup: float | None = None
    """DeepSpeed's iteration over this one."""
    reported: float | None = None


def compared(
    suite: Suite,
    cell: Cell,
    systems: Sequence[str] = COMPARED,
    reported: Mapping[tuple[str, int, int, str], float] | None = None,
) -> list[ComparedRow]:
    """A row for each system."""
    rows = [suite.result(cell, system).row for system in systems]
    told = reported or {}
    return [
        ComparedRow(
            **asdict(row),
            speedup=speedup(row, rows),
            reported=told.get((row.workload, row.tasks, row.devices, row.name)),
        )
        for row in rows
    ]


def number(value: float | None, form: str = ".2f") -> str:
    """A value as text, "-" where there is none."""
    return "-" if value is None else format(value, form)
