"""Where a plan lost time: constraints added one after another, from a perfect cluster to the plan.

Each step is a time that no plan under the constraints so far can be shorter than (or, from the
Stages on, the time of a schedule that was really made), so that each difference is what one
constraint cost:

* *work*: every layer on its most economical allocation, all devices always busy;
* *divisibility*: valid allocations and dependencies (the linear program of ``bounds.bound_ms``);
* *level barrier*: MetaLevels one after the other (plans with Stages);
* *rounding*: whole layers on the allocations that the planner chose: their area, and the longest
  chain of them;
* *stage alignment*: the Stages as scheduled, each as long as its longest slice (plans with Stages);
  *waiting* for plans without: what the order of the runs leaves idle;
* *early starts*: what is won back as no run really waits for a Stage to end (never positive);
* *transfers*: links that cost time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_spindle.cluster import Cluster
from lightning_spindle.plan import ExecutionPlan, Run
from lightning_spindle.planner.bounds import Bounds, lower_bounds
from lightning_spindle.planner.problem import PlannedOp, PlanningProblem
from lightning_spindle.planner.relaxation import options
from lightning_spindle.planner.spindle import meta_levels
from lightning_spindle.planner.timing import PlacedRun, UnplacedRun, list_schedule

LOSSES = (
    "work",
    "divisibility",
    "level barrier",
    "rounding",
    "stage alignment",
    "early starts",
    "waiting",
    "transfers",
)


@dataclass(frozen=True, slots=True)
class Loss:
    """Milliseconds that one constraint adds to the makespan."""

    name: str
    ms: float


def work_ms(problem: PlanningProblem) -> float:
    """Device time of all layers, each on its most economical allocation, over the devices."""
    least = sum(m.layers * min(n * t for n, t in options(m, problem.devices)) for m in problem.metaops)
    return least / problem.devices


def allocated_ms(ops: Sequence[PlannedOp], runs: Sequence[Run], problem: PlanningProblem) -> float:
    """What these runs of these MetaOps last at least: by their area, and by the longest chain."""
    spans = {op.name: 0.0 for op in ops}
    area = 0.0
    for r in runs:
        if r.metaop in spans:
            ms = r.layers * problem.metaop(r.metaop).time(len(r.devices)).total_ms
            spans[r.metaop] += ms
            area += len(r.devices) * ms
    ends: dict[str, float] = {}
    for op in ops:
        ends[op.name] = spans[op.name] + max((ends.get(b, 0.0) for b in op.after), default=0.0)
    return max(area / problem.devices, *ends.values())


def without_transfers_ms(runs: Sequence[Run], problem: PlanningProblem) -> float:
    """The makespan of the same runs, in the same order on the same devices, on links that cost nothing."""
    free = replace(problem, cluster=Cluster.ideal(problem.devices))
    placed = [
        PlacedRun(UnplacedRun(r.metaop, r.first, r.last, len(r.devices), r.start_ms, r.end_ms), r.devices)
        for r in runs
    ]
    return max(r.end_ms for r in list_schedule(placed, free))


def losses(plan: ExecutionPlan, problem: PlanningProblem, bounds: Bounds | None = None) -> tuple[Loss, ...]:
    """The parts of a plan's makespan; they add up to it.

    ``bounds`` are computed where not given (seconds for large problems). A plan without Stages
    has no level barrier, stage alignment and early starts; it has *waiting* instead.
    """
    bounds = bounds or lower_bounds(problem)
    stage_ms = dict(plan.report).get("stage_makespan_ms")
    steps = [("work", work_ms(problem)), ("divisibility", bounds.bound_ms)]
    free_ms = without_transfers_ms(plan.runs, problem)
    if stage_ms is None:
        steps.append(("rounding", max(bounds.bound_ms, allocated_ms(problem.metaops, plan.runs, problem))))
        steps.append(("waiting", free_ms))
    else:
        levels = meta_levels(problem.metaops)
        rounded = [
            max(bound_ms, allocated_ms(level, plan.runs, problem))
            for level, bound_ms in zip(levels, bounds.levels_ms, strict=True)
        ]
        steps.append(("level barrier", max(bounds.bound_ms, bounds.level_bound_ms)))
        steps.append(("rounding", max(bounds.bound_ms, sum(rounded))))
        steps += [("stage alignment", stage_ms), ("early starts", free_ms)]
    steps.append(("transfers", plan.makespan_ms))
    before = [0.0, *(ms for _, ms in steps)]
    return tuple(Loss(name, ms - earlier) for (name, ms), earlier in zip(steps, before, strict=False))
