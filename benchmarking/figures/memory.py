"""Peak memory of each device (paper, figure 15 and appendix D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarking.figures.comparing import COMPARED
from benchmarking.figures.head import head_of
from benchmarking.figures.style import SYSTEMS, legend, named, panels, workload_title
from benchmarking.figures.suite import Suite
from benchmarking.rows import CellRow
from benchmarking.simulated import Result
from benchmarking.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class MemoryRow(CellRow):
    """The most that a device holds in an iteration: parameters with their state, and activations."""

    system: str
    rank: int
    peak_bytes: float


def rows(suite: Suite) -> list[MemoryRow]:
    """Of every system that can run the cell."""
    return [
        MemoryRow(*head_of(cell), system, rank, peak)
        for cell in suite.cells("memory")
        for system in COMPARED
        for rank, peak in enumerate(peaks_bytes(suite.result(cell, system)))
    ]


def peaks_bytes(result: Result) -> list[float]:
    """By device; a baseline's devices are all alike."""
    if result.timeline is None:
        return []
    ranks = range(result.timeline.devices)
    peaks = [result.timeline.peak_bytes(rank) for rank in ranks]
    return [float(result.row.memory_bytes or 0.0) if peak is None else float(peak) for peak in peaks]


def draw(found: Sequence[MemoryRow]) -> Figure:
    """A line for each system."""
    first = found[0]
    where = f"{workload_title(first.workload, first.tasks)}, {first.devices} devices"
    figure, (axes,) = panels(1, 1, f"Peak memory by device, {where}, simulated", width=8.5, height=4.2)
    for system in dict.fromkeys(row.system for row in found):
        own, look = [row for row in found if row.system == system], SYSTEMS[system]
        gigabytes = [row.peak_bytes / 1e9 for row in own]
        axes.plot([row.rank for row in own], gigabytes, marker="o", markersize=4, color=look.colour,
                  linestyle=look.line, label=look.label)  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({row.rank for row in found}))
    named(axes, "", "device", "GB")
    legend(figure, (axes,), columns=4)
    return figure


def tell(found: Sequence[MemoryRow]) -> str:
    """Mean and extremes of each system."""
    lines = []
    for system in dict.fromkeys(row.system for row in found):
        peaks = [row.peak_bytes / 1e9 for row in found if row.system == system]
        mean = sum(peaks) / len(peaks)
        lines.append(
            [SYSTEMS[system].label, *(f"{v:.1f}" for v in (mean, min(peaks), max(peaks), max(peaks) / mean))]
        )
    return table(["peak memory, GB", "mean", "least", "most", "most / mean"], lines)
