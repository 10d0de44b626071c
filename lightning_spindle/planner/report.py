"""Figures of a plan, a Gantt chart in text, and planners side by side."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from lightning_spindle.plan import ExecutionPlan, Run
from lightning_spindle.planner.placement import memory_per_device
from lightning_spindle.planner.problem import PlanningProblem
from lightning_spindle.planner.transfers import transfers_ms

_SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def with_figures(
    planner: str, runs: Sequence[Run], problem: PlanningProblem, figures: Mapping[str, float]
) -> ExecutionPlan:
    """The plan of these runs, reporting ``figures`` and what follows from the runs.

    ``utilisation`` is the devices' busy share of the makespan; ``transfer_ms`` the sum of all
    transfers; ``memory_max_bytes`` and ``memory_min_bytes`` over the devices; ``stage_loss_ms``
    (planners with Stages) what waiting at each Stage would have cost over the makespan.
    """
    makespan_ms = max(r.end_ms for r in runs)
    busy_ms = sum(len(r.devices) * (r.end_ms - r.start_ms) for r in runs)
    memory = memory_per_device(runs, problem)
    report = {
        "utilisation": busy_ms / (makespan_ms * problem.devices),
        "transfer_ms": transfers_ms(runs, problem),
        "memory_max_bytes": max(memory),
        "memory_min_bytes": min(memory),
        **figures,
    }
    if "stage_makespan_ms" in figures:
        report["stage_loss_ms"] = figures["stage_makespan_ms"] - makespan_ms
    return ExecutionPlan(planner, problem.devices, tuple(runs), makespan_ms, tuple(sorted(report.items())))
