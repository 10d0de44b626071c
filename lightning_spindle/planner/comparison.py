"""A plan held against its lower bound, and all planners side by side, as text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.planner import PLANNERS
from lightning_spindle.planner.bounds import Bounds, lower_bounds
from lightning_spindle.planner.losses import LOSSES, Loss, losses
from lightning_spindle.planner.placement import memory_per_device
from lightning_spindle.planner.problem import PlanningProblem
from lightning_spindle.planner.report import utilisation
from lightning_spindle.planner.transfers import transfers_ms


def describe(plan: ExecutionPlan, problem: PlanningProblem, bounds: Bounds | None = None) -> str:
    """What a plan promises and where it lost time, and each device's load and memory, as text.

    ``bounds`` are computed where not given (seconds for large problems).
    """
    bounds = bounds or lower_bounds(problem)
    figures = dict(plan.report)
    lines = [f"predicted {plan.makespan_ms:.3f} ms, lower bound {bounds.bound_ms:.3f} ms"]
    if "c_star_ms" in figures:
        lines[0] += f", C* {figures['c_star_ms']:.3f} ms"
    lines.append(
        f"devices busy {utilisation(plan):.1%}, transfers {transfers_ms(plan.runs, problem):.3f} ms "
        f"({figures.get('transfer_share', 0.0):.1%}), synchronisation {figures.get('sync_ms', 0.0):.3f} ms "
        f"({figures.get('sync_share', 0.0):.1%})"
    )
    for loss in losses(plan, problem, bounds):
        lines.append(f"  {loss.name:16} {loss.ms:+11.3f} ms {loss.ms / plan.makespan_ms:+8.1%}")
    memory = memory_per_device(plan.runs, problem)
    for device in range(plan.devices):
        busy_ms = sum(r.end_ms - r.start_ms for r in plan.runs if device in r.devices)
        lines.append(
            f"device {device:4} busy {busy_ms / plan.makespan_ms:6.1%}, {memory[device] / 2**20:10.1f} MiB"
        )
    return "\n".join(lines)


def compare(problem: PlanningProblem, *, time_limit_s: float | None = 1.0, seed: int = 0) -> str:
    """All planners on one problem, side by side; a planner that refuses it shows why.

    "/bound" is the makespan over the lower bound of ``bounds`` (linear programs), which
    knows nothing of transfers and memory. Below, the parts of each makespan (``losses.py``).
    """
    plans: dict[str, tuple[ExecutionPlan, float]] = {}
    refused: dict[str, str] = {}
    for name, planner in PLANNERS.items():
        started = time.perf_counter()
        try:
            plan = planner(problem, time_limit_s=time_limit_s, seed=seed)
        except (ValueError, ImportError) as error:
            refused[name] = str(error)
            continue
        plans[name] = (plan, time.perf_counter() - started)
    bounds = lower_bounds(problem)
    ranked = sorted(plans.items(), key=lambda item: item[1][0].makespan_ms)
    lines = [
        f"{problem.name}: {len(problem.metaops)} MetaOps, {problem.devices} devices, "
        f"lower bound {bounds.bound_ms:.3f} ms",
        "planner             ms  /bound   busy  transfers ms    sync ms  max MiB  runs  planning s",
    ]
    for name, (plan, seconds) in ranked:
        figures = dict(plan.report)
        lines.append(
            f"{name:10} {plan.makespan_ms:11.3f} {plan.makespan_ms / bounds.bound_ms:7.3f} "
            f"{figures['utilisation']:6.1%} {figures['transfer_ms']:13.3f} {figures['sync_ms']:10.3f} "
            f"{figures['memory_max_bytes'] / 2**20:8.1f} {len(plan.runs):5d} {seconds:11.3f}"
        )
    lines += _parts({name: losses(plan, problem, bounds) for name, (plan, _) in ranked})
    lines += [f"{name:10} refused: {why}" for name, why in refused.items()]
    return "\n".join(lines)


def _parts(found: Mapping[str, Sequence[Loss]]) -> list[str]:
    """A table of the parts of each planner's makespan, in ms; "-" where a planner has no such part."""
    names = list(dict.fromkeys(loss.name for parts in found.values() for loss in parts))
    names.sort(key=LOSSES.index)
    lines = ["", "parts, ms " + "".join(f"{name:>17}" for name in names)]
    for planner, parts in found.items():
        ms = {loss.name: f"{loss.ms:.3f}" for loss in parts}
        lines.append(f"{planner:10}" + "".join(f"{ms.get(name, '-'):>17}" for name in names))
    return lines
