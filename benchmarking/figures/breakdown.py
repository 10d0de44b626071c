"""Where an iteration's time goes, by system (paper, figure 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarking.figures.head import head_of
from benchmarking.figures.style import SYSTEMS, legend, named, panels, workload_title
from benchmarking.figures.suite import Suite
from benchmarking.rows import CellRow
from benchmarking.tables import table
from lightning_spindle.plots import COLOURS
from lightning_spindle.timeline import Category, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = ("deepspeed", "seq", "spindle", "search")
PARTS = {
    "forward": COLOURS[Category.FORWARD],
    "backward": COLOURS[Category.BACKWARD],
    "optimizer": COLOURS[Category.OPTIMIZER],
    "transfer": COLOURS[Category.TRANSFER],
    "sync": COLOURS[Category.SYNC],
    "idle": "#E8E8E8",
}


@dataclass(frozen=True, slots=True)
class BreakdownRow(CellRow):
    """Milliseconds of the mean device; they add up to the iteration.

    Communication counts where the device computes nothing; "idle" is the rest, waiting included.
    """

    system: str
    iteration_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    transfer_ms: float
    sync_ms: float
    idle_ms: float

    def part_ms(self, part: str) -> float:
        value: float = getattr(self, f"{part}_ms")
        return value


def rows(suite: Suite) -> list[BreakdownRow]:
    """Of every cell and system that can run it."""
    found = []
    for cell in suite.cells("breakdown"):
        for system in SHOWN:
            timeline = suite.result(cell, system).timeline
            if timeline is not None:
                found.append(BreakdownRow(*head_of(cell), system, timeline.span_s * 1e3, *parts_ms(timeline)))
    return found


def parts_ms(timeline: Timeline) -> tuple[float, ...]:
    """The ``PARTS`` of the mean device."""
    seconds = timeline.breakdown()
    seconds["idle"] += seconds[Category.WAIT] + seconds[Category.DATA]
    return tuple(1e3 * seconds[part] / timeline.devices for part in PARTS)


def draw(found: Sequence[BreakdownRow]) -> Figure:
    """A panel for each cell, a bar for each system."""
    cells = list(dict.fromkeys((row.workload, row.tasks, row.devices) for row in found))
    columns = min(3, len(cells))
    title = "Where the mean device's time goes, simulated"
    figure, axes = panels(-(-len(cells) // columns), columns, title, width=4.6, height=1.9)
    for each, (workload, tasks, devices) in zip(axes, cells, strict=False):
        own = [r for r in found if (r.workload, r.tasks, r.devices) == (workload, tasks, devices)]
        missing = [name for name in SHOWN if name not in {row.system for row in own}]
        for k, system in enumerate(missing, len(own)):
            each.text(
                0,
                k,
                f" {SYSTEMS[system].label.split(' (')[0]}: no plan fits",
                fontsize=8,
                va="center",
                color="#AA0000",
            )
        left = [0.0] * len(own)
        for part, colour in PARTS.items():
            widths = [row.part_ms(part) for row in own]
            each.barh(range(len(own)), widths, left=left, color=colour, label=part, height=0.7)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        each.set_yticks(
            range(len(own)), [SYSTEMS[row.system].label.split(" (")[0] for row in own], fontsize=8
        )
        each.set_ylim(len(SHOWN) - 0.5, -0.5)
        each.grid(visible=False)
        named(each, f"{workload_title(workload, tasks)}, {devices} devices", "ms", "")
    for each in axes[len(cells) :]:
        each.set_visible(False)
    legend(figure, axes, columns=len(PARTS))
    return figure


def tell(found: Sequence[BreakdownRow]) -> str:
    """Shares of the iteration."""
    lines = []
    for row in found:
        computing = (row.forward_ms + row.backward_ms) / row.iteration_ms
        shares = [computing, *(row.part_ms(p) / row.iteration_ms for p in ("sync", "transfer", "idle"))]
        where = f"{workload_title(row.workload, row.tasks)}, {row.devices} devices"
        lines.append(
            [where, SYSTEMS[row.system].label, f"{row.iteration_ms:.0f}", *(f"{s:.1%}" for s in shares)]
        )
    head = ["cell", "system", "iteration ms", "forward and backward", "sync", "transfers", "idle"]
    return table(head, lines)
