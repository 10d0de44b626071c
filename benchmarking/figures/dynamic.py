"""Tasks that come and go: phases of a training, each planned anew (paper, figure 13 and section 5.6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from benchmarking.figures.comparing import COMPARED
from benchmarking.figures.head import head_of
from benchmarking.figures.style import SYSTEMS, WORKLOADS, legend, named, panels
from benchmarking.figures.suite import Suite, part_of, tasks_of
from benchmarking.rows import CellRow
from benchmarking.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class DynamicRow(CellRow):
    """A phase under a system: ``steps`` iterations of tasks [first, last) of the workload's order.

    ``planning_s`` is what planning at the phase's start took here, by the clock of this machine. Saving
    and loading the model between phases is the same for all systems and counts nothing.
    """

    phase: int
    first: int
    last: int
    steps: int
    system: str
    iteration_ms: float
    planning_s: float

    @property
    def seconds(self) -> float:
        return self.planning_s + self.steps * self.iteration_ms / 1e3


def rows(suite: Suite) -> list[DynamicRow]:
    """Every phase under every system.

    Raises:
        ValueError: a system cannot run a phase.
    """
    case = suite.cases("dynamic")
    whole = suite.cell(case["workload"], case["devices"])
    names, found = tasks_of(whole), []
    for phase, step in enumerate(case["phases"]):
        first, last = step["tasks"]
        cell = part_of(whole, names[first:last])
        for system in COMPARED:
            row = suite.result(cell, system).row
            if row.simulated_ms is None:
                raise ValueError(f"phase {phase} under {system}: {row.error}")
            what = (phase, first, last, step["steps"], system)
            found.append(DynamicRow(*head_of(cell), *what, row.simulated_ms, row.planning_s or 0.0))
    return found


def draw(found: Sequence[DynamicRow]) -> Figure:
    """Left, the iteration in each phase; right, how far training is after how long."""
    workload = WORKLOADS.get(found[0].workload, found[0].workload)
    title = f"Tasks that come and go, {workload} on {found[0].devices} devices, simulated"
    figure, (speed, progress) = panels(1, 2, title, width=6.6, height=4.2)
    for system in COMPARED:
        own, look = _of(found, system), SYSTEMS[system]
        style = {"color": look.colour, "linestyle": look.line, "label": look.label}
        steps = [0, *accumulate(row.steps for row in own)]
        times = [row.iteration_ms for row in own]
        speed.step(steps, [times[0], *times], where="pre", **style)
        minutes = [0.0, *accumulate(row.seconds / 60 for row in own)]
        progress.plot(minutes, steps, marker=".", **style)
    own = _of(found, COMPARED[0])
    for row, start in zip(own, [0, *accumulate(r.steps for r in own)], strict=False):
        middle = (start + row.steps / 2, 0.98)
        text = f"tasks\n{row.first + 1} to {row.last}"
        speed.annotate(text, middle, xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=8)
        speed.axvline(start, color="#999999", linewidth=0.6, linestyle=":")
    speed.set_ylim(0, speed.get_ylim()[1] * 1.15)
    named(speed, "iteration in each phase", "iterations", "ms an iteration")
    named(progress, "progress (planning included)", "minutes", "iterations")
    legend(figure, (speed,), columns=4)
    return figure


def _of(found: Sequence[DynamicRow], system: str) -> list[DynamicRow]:
    return [row for row in found if row.system == system]


def tell(found: Sequence[DynamicRow]) -> str:
    """Iterations of each phase, and the whole training's time."""
    base_s = sum(row.seconds for row in _of(found, "deepspeed"))
    phases = _of(found, COMPARED[0])
    lines = []
    for system in COMPARED:
        own = _of(found, system)
        total_s = sum(row.seconds for row in own)
        times = [f"{row.iteration_ms:.0f}" for row in own]
        planned_s = sum(row.planning_s for row in own)
        lines.append(
            [
                SYSTEMS[system].label,
                *times,
                f"{planned_s:.1f}",
                f"{total_s / 60:.1f}",
                f"{base_s / total_s:.2f}",
            ]
        )
    head = [f"tasks {p.first + 1} to {p.last}, ms" for p in phases]
    return table(["system", *head, "planning s, measured", "all, min", "over DeepSpeed"], lines)
