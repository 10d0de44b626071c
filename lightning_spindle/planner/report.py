"""Figures of a plan, and a Gantt chart in text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_spindle.plan import ExecutionPlan, Run
from lightning_spindle.planner.placement import memory_per_device
from lightning_spindle.planner.problem import PlanningProblem
from lightning_spindle.planner.sync import sync_per_device_ms
from lightning_spindle.planner.transfers import transfers_ms

_SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def with_figures(
    planner: str, runs: Sequence[Run], problem: PlanningProblem, figures: Mapping[str, float]
) -> ExecutionPlan:
    """The plan of these runs, reporting ``figures`` and what follows from the runs.

    ``utilisation`` is the devices' busy share of the makespan; ``transfer_ms`` the sum of all
    transfers; ``sync_ms`` the all-reduce time of the device that has most of it;
    ``transfer_share`` and ``sync_share`` these over the makespan; ``memory_max_bytes`` and
    ``memory_min_bytes`` over the devices; ``stage_loss_ms`` (planners with Stages) what
    waiting at each Stage would have cost over the makespan.
    """
    makespan_ms = max(r.end_ms for r in runs)
    memory = memory_per_device(runs, problem)
    transfer_ms, sync_ms = transfers_ms(runs, problem), max(sync_per_device_ms(runs, problem))
    report = {
        "transfer_ms": transfer_ms,
        "transfer_share": transfer_ms / makespan_ms,
        "sync_ms": sync_ms,
        "sync_share": sync_ms / makespan_ms,
        "memory_max_bytes": max(memory),
        "memory_min_bytes": min(memory),
        **figures,
    }
    if "stage_makespan_ms" in figures:
        report["stage_loss_ms"] = figures["stage_makespan_ms"] - makespan_ms
    plan = ExecutionPlan(planner, problem.devices, tuple(runs), makespan_ms)
    return plan.with_report({**report, "utilisation": utilisation(plan)})


def gantt(plan: ExecutionPlan, width: int = 100) -> str:
    """The plan as text: a line for each device, a letter for each MetaOp, dots where it is idle.

    Each column is an equal part of the makespan and shows what runs for most of it.
    """
    names = list(dict.fromkeys(r.metaop for r in plan.runs))
    letters = {name: _SYMBOLS[i % len(_SYMBOLS)] for i, name in enumerate(names)}
    end_ms = max((r.end_ms for r in plan.runs), default=0.0) or 1.0
    column_ms = end_ms / width
    margin = len(str(plan.devices - 1))
    lines = []
    for device in range(plan.devices):
        runs = [r for r in plan.runs if device in r.devices]
        cells = [_cell(runs, letters, i * column_ms, (i + 1) * column_ms) for i in range(width)]
        lines.append(f"{device:>{margin}} |{''.join(cells)}|")
    legend = "  ".join(f"{letters[name]} {name}" for name in names)
    title = f"{plan.planner}: {plan.makespan_ms:.2f} ms, {column_ms:.2f} ms a column"
    return "\n".join([title, *lines, legend])


def _cell(runs: Sequence[Run], letters: Mapping[str, str], start_ms: float, end_ms: float) -> str:
    shown = {".": (end_ms - start_ms) / 2}
    for r in runs:
        overlap_ms = min(r.end_ms, end_ms) - max(r.start_ms, start_ms)
        if overlap_ms > 0:
            letter = letters[r.metaop]
            shown[letter] = shown.get(letter, 0.0) + overlap_ms
    return max(shown, key=lambda letter: shown[letter])


def utilisation(plan: ExecutionPlan) -> float:
    """The devices' busy share of the makespan."""
    busy_ms = sum(len(r.devices) * (r.end_ms - r.start_ms) for r in plan.runs)
    return busy_ms / (plan.makespan_ms * plan.devices)
