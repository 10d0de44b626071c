"""Placement near the data against sequential placement (paper, section 5.5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarking.figures.comparing import number
from benchmarking.figures.head import head_of
from benchmarking.figures.reported import TRANSFER_SHARES
from benchmarking.figures.style import legend, named, panels, workload_title
from benchmarking.figures.suite import Suite
from benchmarking.rows import CellRow
from benchmarking.simulated import Cell
from benchmarking.tables import table
from lightning_spindle.planner.placement import Policy
from lightning_spindle.planner.spindle import Reading, plan_spindle
from lightning_spindle.simulate import simulate
from lightning_spindle.timeline import Category, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICIES = {
    Policy.COMMUNICATION: ("Spindle's placement", "#56B4E9"),
    Policy.SEQUENTIAL: ("sequential placement", "#CC79A7"),
}
MEASURES = {
    "transfer_share": "transfers, all",
    "exposed_share": "transfers that nothing hides",
    "sync_share": "synchronisation that nothing hides",
}


@dataclass(frozen=True, slots=True)
class PlacementRow(CellRow):
    """Shares of the mean device's iteration; ``transfer_share`` counts transfers beside computing too.

    None where no plan fits, for the reason in ``error``.
    """

    policy: str
    reported: float | None
    """The paper's share of send and receive."""
    iteration_ms: float | None = None
    transfer_share: float | None = None
    exposed_share: float | None = None
    sync_share: float | None = None
    error: str = ""


def rows(suite: Suite) -> list[PlacementRow]:
    """The paper's planner under both policies."""
    return [_row(suite, cell, policy) for cell in suite.cells("placement") for policy in POLICIES]


def _row(suite: Suite, cell: Cell, policy: Policy) -> PlacementRow:
    told = TRANSFER_SHARES.get((cell.workload, cell.tasks, cell.costs.cluster.devices))
    reported = None if told is None else told[list(POLICIES).index(policy)]
    row = PlacementRow(*head_of(cell), str(policy), reported)
    try:
        plan = plan_spindle(cell.problem, reading=Reading(policy=policy))
    except ValueError as refusal:
        suite.refuse(cell, POLICIES[policy][0], str(refusal))
        return replace(row, error=str(refusal))
    timeline = simulate(cell.step.program(plan), cell.costs)
    shares = {name: s / (timeline.span_s * timeline.devices) for name, s in timeline.breakdown().items()}
    return replace(
        row,
        iteration_ms=timeline.span_s * 1e3,
        transfer_share=transfer_share(timeline),
        exposed_share=shares[Category.TRANSFER],
        sync_share=shares[Category.SYNC],
    )


def transfer_share(timeline: Timeline) -> float:
    """The part of the iteration in which the mean device sends or receives, whatever else it does."""
    transfers = tuple(e for e in timeline.events if e.category is Category.TRANSFER)
    seconds = replace(timeline, events=transfers).breakdown()[Category.TRANSFER]
    return seconds / (timeline.span_s * timeline.devices)


def draw(found: Sequence[PlacementRow]) -> Figure:
    """A panel for each measure, a pair of bars for each cell."""
    figure, axes = panels(
        1, len(MEASURES), "Placement near the data or sequential, simulated", width=5.2, height=4.0
    )
    cells = list(dict.fromkeys((row.workload, row.tasks, row.devices) for row in found))
    for each, (measure, title) in zip(axes, MEASURES.items(), strict=True):
        for k, (policy, (label, colour)) in enumerate(POLICIES.items()):
            own = [row for row in found if row.policy == policy]
            at = [cells.index((r.workload, r.tasks, r.devices)) + (k - 0.5) * 0.4 for r in own]
            each.bar(at, [100 * (getattr(r, measure) or 0.0) for r in own], 0.38, color=colour, label=label)
            for x, r in zip(at, own, strict=True):
                if r.error:
                    each.text(x, 0, " no plan fits", fontsize=7, rotation=90, ha="center", color="#AA0000")
            told = [(x, 100 * r.reported) for x, r in zip(at, own, strict=True) if r.reported is not None]
            if measure == "transfer_share" and told:
                each.plot(*zip(*told, strict=True), marker="D", color="black", fillstyle="none",
                          linestyle="none", markersize=5, label="reported by the paper")  # fmt: skip
        names = [f"{workload_title(workload, tasks)}, {devices}" for workload, tasks, devices in cells]
        each.set_xticks(range(len(cells)), names, rotation=90, fontsize=7)
        named(each, title, "workload, tasks, devices", "% of the iteration")
    legend(figure, axes)
    return figure


def tell(found: Sequence[PlacementRow]) -> str:
    """The same as a table."""
    lines = [
        [
            f"{workload_title(row.workload, row.tasks)}, {row.devices} devices",
            POLICIES[Policy(row.policy)][0],
            number(row.iteration_ms, ".1f"),
            number(row.transfer_share, ".1%"),
            number(row.exposed_share, ".1%"),
            number(row.reported, ".1%"),
            number(row.sync_share, ".1%"),
        ]
        for row in found
    ]
    head = [
        "cell",
        "placement",
        "iteration ms",
        "transfers",
        "exposed transfers",
        "the paper's",
        "exposed sync",
    ]
    return table(head, lines)
