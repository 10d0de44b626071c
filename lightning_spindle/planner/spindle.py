"""The paper's planner (section 3): MetaLevels, allocator, stage scheduler, placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.planner.allocation import Demand, Interpolation, allocate, envelope
from lightning_spindle.planner.placement import Policy, place
from lightning_spindle.planner.problem import PlannedOp, PlanningProblem
from lightning_spindle.planner.report import with_figures
from lightning_spindle.planner.scheduling import Extension, StageSchedule, merge_levels, schedule_level
from lightning_spindle.planner.timing import UnplacedRun


@dataclass(frozen=True, slots=True)
class Reading:
    """The choices that the paper's text leaves open; the defaults are this planner's."""

    interpolation: Interpolation = Interpolation.SPEED
    extension: Extension = Extension.WIDEN
    policy: Policy = Policy.COMMUNICATION


def meta_levels(metaops: Sequence[PlannedOp]) -> tuple[tuple[PlannedOp, ...], ...]:
    """MetaOps by longest-path depth (section 3.1); ``metaops`` in topological order."""
    depth: dict[str, int] = {}
    for m in metaops:
        depth[m.name] = 1 + max((depth[b] for b in m.after), default=-1)
    count = 1 + max(depth.values(), default=-1)
    return tuple(tuple(m for m in metaops if depth[m.name] == k) for k in range(count))


def plan_spindle(
    problem: PlanningProblem,
    *,
    time_limit_s: float | None = None,
    seed: int = 0,
    reading: Reading | None = None,
) -> ExecutionPlan:
    """Plans as section 3 says. Deterministic; ``time_limit_s`` and ``seed`` are not used.

    Where the placement cannot give its allocations enough memory, the allocations are limited
    to half as many devices and so on: fewer devices then hold each layer.

    Raises:
        ValueError: memory does not suffice whatever the allocations.
    """
    reading = reading or Reading()
    limit, refusal = problem.devices, None
    while limit >= 1:
        try:
            return _plan_within(problem, reading, limit)
        except ValueError as error:
            refusal = refusal or error
        limit //= 2
    assert refusal is not None
    raise refusal


def _plan_within(problem: PlanningProblem, reading: Reading, limit: int) -> ExecutionPlan:
    c_star_ms, schedule = stage_schedule(problem, reading, limit)
    runs = place(unplaced_runs(schedule), problem, reading.policy)
    return with_figures(
        "spindle", runs, problem, {"c_star_ms": c_star_ms, "stage_makespan_ms": schedule.end_ms}
    )


def stage_schedule(
    problem: PlanningProblem, reading: Reading, limit: int | None = None
) -> tuple[float, StageSchedule]:
    """C* (summed over the MetaLevels) and the Stages, before placement.

    ``limit``: no MetaOp gets more devices than this, its smallest allocation excepted.
    """
    pins = {m.name: m.pin for m in problem.metaops if m.pin is not None}
    schedules: list[StageSchedule] = []
    c_star_ms, now_ms = 0.0, 0.0
    for level in meta_levels(problem.metaops):
        demands = [_demand(m, problem.devices, limit) for m in level]
        allocation = allocate(demands, problem.devices, reading.interpolation)
        schedule = schedule_level(
            allocation, demands, problem.devices, start_ms=now_ms, extension=reading.extension, pins=pins
        )
        c_star_ms += allocation.c_star_ms
        now_ms = schedule.end_ms
        schedules.append(schedule)
    return c_star_ms, merge_levels(schedules)


def unplaced_runs(schedule: StageSchedule) -> list[UnplacedRun]:
    """The slices of all Stages, numbered by Stage."""
    return [
        UnplacedRun(s.metaop, s.first, s.last, s.n, s.start_ms, s.end_ms, k)
        for k, stage in enumerate(schedule.stages)
        for s in stage.slices
    ]


def _demand(op: PlannedOp, devices: int, limit: int | None) -> Demand:
    widest = devices if limit is None else min(devices, max(limit, op.allocations[0]))
    return Demand(op.name, op.layers, envelope(op, widest))
