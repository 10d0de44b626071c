"""One multi-modal task alone (paper, figure 14 and appendix C)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from benchmarking.figures.comparing import ComparedRow, compared, number
from benchmarking.figures.reported import SINGLE_TASK_SPEEDUP
from benchmarking.figures.style import SYSTEMS, WORKLOADS, legend, named, panels
from benchmarking.figures.suite import Suite, part_of, tasks_of
from benchmarking.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = ("deepspeed", "megatron", "seq", "stmm", "spindle", "search")


@dataclass(frozen=True, slots=True)
class SingleTaskRow(ComparedRow):
    """A system on one task."""

    task: str = ""


def rows(suite: Suite) -> list[SingleTaskRow]:
    """Every task of the cases' workloads, alone."""
    found = []
    for case in suite.cases("single_task"):
        whole = suite.cell(case["workload"], case["devices"], case["tasks"])
        for task in tasks_of(whole):
            for row in compared(suite, part_of(whole, [task]), SHOWN):
                found.append(SingleTaskRow(**asdict(row), task=task))
    return found


def draw(found: Sequence[SingleTaskRow]) -> Figure:
    """A panel for each workload, a group of bars for each task."""
    cases = list(dict.fromkeys((row.workload, row.devices) for row in found))
    systems = [s for s in SHOWN if s != "deepspeed"]
    figure, axes = panels(len(cases), 1, "One task alone: speedup over DeepSpeed, simulated", width=10.0)
    for each, (workload, devices) in zip(axes, cases, strict=True):
        own = [row for row in found if (row.workload, row.devices) == (workload, devices)]
        tasks = list(dict.fromkeys(row.task for row in own))
        for k, system in enumerate(systems):
            values = [row.speedup for row in own if row.name == system]
            at = [g + (k - (len(systems) - 1) / 2) * 0.16 for g in range(len(tasks))]
            look = SYSTEMS[system]
            bars = each.bar(at, [v or 0.0 for v in values], 0.15, color=look.colour, label=look.label)
            each.bar_label(bars, [number(v) for v in values], fontsize=6, rotation=90, padding=2)
        each.axhline(1.0, color="#666666", linestyle="--", linewidth=1.0, label="DeepSpeed = 1")
        each.set_xticks(range(len(tasks)), [t.replace("_", "\n", 1) for t in tasks], fontsize=8)
        each.set_ylim(0, each.get_ylim()[1] * 1.08)
        name = WORKLOADS.get(workload, workload)
        named(each, f"{name}, {devices} devices", "task", "speedup over DeepSpeed")
    legend(figure, axes, columns=3)
    return figure


def tell(found: Sequence[SingleTaskRow]) -> str:
    """Speedups of each task."""
    systems = [s for s in SHOWN if s != "deepspeed"]
    by_task: dict[tuple[str, int, str], dict[str, SingleTaskRow]] = {}
    for row in found:
        by_task.setdefault((row.workload, row.devices, row.task), {})[row.name] = row
    lines = [
        [
            f"{WORKLOADS.get(workload, workload)}, {task}",
            str(devices),
            number(own["deepspeed"].simulated_ms, ".1f"),
            *(number(own[s].speedup) for s in systems),
        ]
        for (workload, devices, task), own in by_task.items()
    ]
    most = max((row.speedup for row in found if row.name == "spindle" and row.speedup), default=None)
    head = ["speedup over DeepSpeed", "devices", "DeepSpeed ms", *(SYSTEMS[s].label for s in systems)]
    note = f"The most that the paper's planner gains: {number(most)}; reported: {SINGLE_TASK_SPEEDUP:.2f}."
    return f"{table(head, lines)}\n\n{note}"
