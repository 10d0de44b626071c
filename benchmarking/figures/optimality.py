"""Plans and iterations against the paper's optimum C* and a true lower bound (paper, figure 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarking.figures.comparing import number
from benchmarking.figures.head import head_of
from benchmarking.figures.reported import OVER_C_STAR
from benchmarking.figures.style import SYSTEMS, legend, named, panels, workload_title
from benchmarking.figures.suite import Suite
from benchmarking.rows import CellRow
from benchmarking.simulated import Cell
from benchmarking.tables import table
from lightning_spindle.cluster import Cluster
from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.simulate import simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLANNERS = ("spindle", "search")
MEASURES = {
    "bound_ms": ("true lower bound", "_", "#000000"),
    "makespan_ms": ("plan's makespan", "s", "#56B4E9"),
    "computing_ms": ("iteration on links that cost nothing", "^", "#009E73"),
    "iteration_ms": ("iteration", "o", "#D55E00"),
}


@dataclass(frozen=True, slots=True)
class OptimalityRow(CellRow):
    """``makespan_ms`` is the planner's own; ``computing_ms`` the simulated iteration with free links."""

    planner: str
    c_star_ms: float
    bound_ms: float
    makespan_ms: float
    computing_ms: float
    iteration_ms: float
    reported: float | None
    """The paper's iteration over its C*."""

    def over_c_star(self, measure: str) -> float:
        value: float = getattr(self, measure)
        return value / self.c_star_ms


def rows(suite: Suite) -> list[OptimalityRow]:
    """Of every cell that can be planned."""
    found = []
    for cell in suite.cells("optimality"):
        for planner in PLANNERS:
            result = suite.result(cell, planner)
            if result.plan is None or result.timeline is None:
                continue
            where = (cell.workload, cell.tasks, cell.costs.cluster.devices)
            reported = OVER_C_STAR.get(where) if planner == "spindle" else None
            found.append(
                OptimalityRow(
                    *head_of(cell),
                    planner,
                    cell.c_star_ms,
                    cell.bound_ms,
                    result.plan.makespan_ms,
                    computing_ms(cell, result.plan),
                    result.timeline.span_s * 1e3,
                    reported,
                )
            )
    return found


def computing_ms(cell: Cell, plan: ExecutionPlan) -> float:
    """The plan's iteration where transfers and sums take no time."""
    free = replace(cell.costs, cluster=Cluster.ideal(plan.devices))
    return simulate(cell.step.program(plan), free).span_s * 1e3


def draw(found: Sequence[OptimalityRow]) -> Figure:
    """A panel for each planner; everything over C*."""
    figure, axes = panels(
        1, len(PLANNERS), "Against the theoretical optimum C*, simulated", width=6.6, height=4.2
    )
    for each, planner in zip(axes, PLANNERS, strict=True):
        own = [row for row in found if row.planner == planner]
        at = range(len(own))
        for measure, (label, marker, colour) in MEASURES.items():
            values = [row.over_c_star(measure) for row in own]
            each.plot(at, values, marker=marker, color=colour, linestyle="none", markersize=8, label=label)
        told = [(k, row.reported) for k, row in enumerate(own) if row.reported is not None]
        if told:
            each.plot(*zip(*told, strict=True), marker="D", color="black", fillstyle="none", linestyle="none",
                      markersize=8, label="iteration, reported by the paper")  # fmt: skip
        each.axhline(1.0, color="#666666", linestyle="--", linewidth=1.0)
        names = [f"{workload_title(r.workload, r.tasks)}, {r.devices}" for r in own]
        each.set_xticks(at, names, rotation=90, fontsize=7)
        named(each, SYSTEMS[planner].label, "workload, tasks, devices", "times C*")
    limits = [each.get_ylim() for each in axes]
    for each in axes:
        each.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    legend(figure, axes)
    return figure


def tell(found: Sequence[OptimalityRow]) -> str:
    """The same as a table."""
    lines = [
        [
            f"{workload_title(row.workload, row.tasks)}, {row.devices} devices",
            row.planner,
            f"{row.c_star_ms:.1f}",
            f"{row.bound_ms:.1f}",
            *(f"{row.over_c_star(m):.2f}" for m in ("makespan_ms", "computing_ms", "iteration_ms")),
            number(row.reported),
            f"{row.makespan_ms / row.bound_ms:.2f}",
        ]
        for row in found
    ]
    head = ["cell", "planner", "C* ms", "bound ms", "makespan / C*", "computing / C*", "iteration / C*"]
    return table([*head, "the paper's", "makespan / bound"], lines)
