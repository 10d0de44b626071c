"""End to end: all workloads, numbers of tasks and of devices (paper, figure 8 and section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarking.figures.comparing import COMPARED, ComparedRow, compared, number
from benchmarking.figures.orderings import orderings
from benchmarking.figures.reported import GROWTH, SPEEDUPS
from benchmarking.figures.speedups import speedup_figure
from benchmarking.figures.style import SYSTEMS, workload_title
from benchmarking.figures.suite import Suite
from benchmarking.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rows(suite: Suite) -> list[ComparedRow]:
    """Every system on every cell."""
    return [row for cell in suite.cells("end_to_end") for row in compared(suite, cell, COMPARED, SPEEDUPS)]


def draw(found: Sequence[ComparedRow]) -> Figure:
    """Bars of speedups, the paper's as diamonds."""
    return speedup_figure(found, SPEEDUPS)


def tell(found: Sequence[ComparedRow]) -> str:
    """Speedups ours / the paper's, growth with the devices, and the paper's orderings."""
    parts = [_speedups(found), _growth(found), orderings(found)]
    return "\n\n".join(part for part in parts if part)


def _speedups(found: Sequence[ComparedRow]) -> str:
    systems = [s for s in COMPARED if s != "deepspeed"]
    head = ["ours / the paper's", "devices", "DeepSpeed ms", *(SYSTEMS[s].label for s in systems)]
    by_cell: dict[tuple[str, int, int], dict[str, ComparedRow]] = {}
    for row in found:
        by_cell.setdefault((row.workload, row.tasks, row.devices), {})[row.name] = row
    lines = []
    for (workload, tasks, devices), own in by_cell.items():
        values = [f"{number(own[s].speedup)} / {number(own[s].reported)}" for s in systems]
        base = number(own["deepspeed"].simulated_ms, ".0f")
        lines.append([workload_title(workload, tasks), str(devices), base, *values])
    return table(head, lines)


def _growth(found: Sequence[ComparedRow]) -> str:
    times = {(row.workload, row.tasks, row.devices, row.name): row.simulated_ms for row in found}
    lines = []
    for (workload, tasks, few, many, system), reported in GROWTH.items():
        names = (system, "search") if system == "spindle" else (system,)
        for name in names:
            slow, fast = times.get((workload, tasks, few, name)), times.get((workload, tasks, many, name))
            if slow and fast:
                what = f"{workload_title(workload, tasks)}, {few} to {many} devices"
                lines.append([what, SYSTEMS[name].label, number(slow / fast), number(reported)])
    return (
        table(["iteration on fewer over more devices", "system", "ours", "the paper's"], lines)
        if lines
        else ""
    )
