"""How long planning takes, by devices and by tasks (paper, section 5.5.1)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarking.figures.head import head_of
from benchmarking.figures.reported import PLANNING_S
from benchmarking.figures.style import SYSTEMS, WORKLOADS, devices_axis, legend, named, panels, workload_title
from benchmarking.figures.suite import Suite
from benchmarking.rows import CellRow
from benchmarking.simulated import Cell
from benchmarking.tables import table
from lightning_spindle.planner import plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = ("seq", "uniform", "stmm", "optimus", "spindle", "search")


@dataclass(frozen=True, slots=True)
class PlanningRow(CellRow):
    """``by`` tells which of tasks and devices this row varies. ``planning_s`` of the planner alone."""

    by: str
    metaops: int
    planner: str
    planning_s: float


def rows(suite: Suite) -> list[PlanningRow]:
    """Every planner on all tasks with more and more devices, and with more and more tasks."""
    return [
        PlanningRow(
            *head_of(cell, "measured"),
            by,
            len(cell.metagraph.metaops),
            planner,
            planning_s(cell, planner, suite.config["planner"]["time_limit_s"]),
        )
        for by, cell in _cells(suite)
        for planner in SHOWN
    ]


def _cells(suite: Suite) -> Iterator[tuple[str, Cell]]:
    case = suite.cases("planning")
    for devices in case["devices"]:
        yield "devices", suite.cell(case["workload"], devices, max(case["tasks"]))
    for tasks in case["tasks"]:
        yield "tasks", suite.cell(case["workload"], case["devices_by_tasks"], tasks)


def planning_s(cell: Cell, planner: str, time_limit_s: float) -> float:
    """Seconds of this machine for one plan, what planners are given being there.

    Raises:
        ValueError: the planner finds no plan that fits.
    """
    problem = cell.problem
    started_s = time.perf_counter()
    try:
        plan(problem, planner, time_limit_s=time_limit_s)
    except ValueError as refusal:
        where = f"{workload_title(cell.workload, cell.tasks)} on {cell.costs.cluster.devices} devices"
        raise ValueError(f"{planner}, {where}: {refusal}") from refusal
    return time.perf_counter() - started_s


def draw(found: Sequence[PlanningRow]) -> Figure:
    """Two panels: by devices, by tasks."""
    workload = WORKLOADS.get(found[0].workload, found[0].workload)
    figure, axes = panels(
        1, 2, f"Planning time, {workload} (wall clock of this machine)", width=5.6, height=3.8
    )
    for each, by, other in zip(axes, ("devices", "tasks"), ("tasks", "devices"), strict=True):
        own = [row for row in found if row.by == by]
        for planner in SHOWN:
            points = [(getattr(row, by), row.planning_s) for row in own if row.planner == planner]
            look = SYSTEMS[planner]
            each.plot(
                *zip(*points, strict=True), marker="o", markersize=4, color=look.colour, label=look.label
            )
        each.axhline(PLANNING_S, color="black", linestyle=":", label="the paper: less than 3 s")
        each.set_yscale("log")
        named(each, f"{getattr(own[0], other)} {other}", by, "seconds")
    devices_axis(axes[0], sorted({row.devices for row in found if row.by == "devices"}))
    axes[1].set_xticks(sorted({row.tasks for row in found if row.by == "tasks"}))
    legend(figure, axes, columns=4)
    return figure


def tell(found: Sequence[PlanningRow]) -> str:
    """Seconds of each planner."""
    cells = list(dict.fromkeys((row.by, row.tasks, row.devices, row.metaops) for row in found))
    times = {(row.by, row.tasks, row.devices, row.planner): row.planning_s for row in found}
    lines = [
        [
            f"{tasks} tasks, {devices} devices",
            str(metaops),
            *(f"{times[by, tasks, devices, p]:.2f}" for p in SHOWN),
        ]
        for by, tasks, devices, metaops in cells
    ]
    return table(["planning, s", "MetaOps", *(SYSTEMS[p].label for p in SHOWN)], lines)
