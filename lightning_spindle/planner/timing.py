"""When runs start and end, given their devices and their order: list scheduling.

Execution never waits at a Stage or for a clock: a run starts when its devices are free and its
data are there. So a plan's times are these, whatever its planner had in mind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_spindle.plan import Run
from lightning_spindle.planner.problem import PlanningProblem
from lightning_spindle.planner.transfers import flow_bytes, inputs_of, transfer_ms


@dataclass(frozen=True, slots=True)
class UnplacedRun:
    """Layers [first, last) of a MetaOp on n devices at a planned time; which devices is open."""

    metaop: str
    first: int
    last: int
    n: int
    start_ms: float
    end_ms: float
    stage: int | None = None

    def __str__(self) -> str:
        return f"{self.metaop}[{self.first}:{self.last}] on {self.n} devices"


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """A run with its devices, whose times are still the planned ones."""

    run: UnplacedRun
    devices: tuple[int, ...]


def list_schedule(placed: Iterable[PlacedRun], problem: PlanningProblem) -> tuple[Run, ...]:
    """Runs in the order of their planned starts, each as early as its devices and data allow.

    Where links cost nothing and the planned times were feasible, no run ends later than planned.
    O(runs x devices).
    """
    position = {m.name: i for i, m in enumerate(problem.metaops)}
    flows = flow_bytes(problem.flows)
    free = [0.0] * problem.devices
    ends: dict[str, float] = {}
    at: dict[str, tuple[int, ...]] = {}
    runs: list[Run] = []
    for p in sorted(placed, key=lambda p: (p.run.start_ms, position[p.run.metaop], p.run.first)):
        r, op = p.run, problem.metaop(p.run.metaop)
        start_ms = max(free[d] for d in p.devices)
        names = (r.metaop,) if r.first > 0 else op.after
        inputs = inputs_of(r.metaop, r.first, problem, flows, at)
        for name, (size, devices) in zip(names, inputs, strict=True):
            start_ms = max(start_ms, ends[name] + transfer_ms(size, devices, p.devices, problem.cluster))
        end_ms = start_ms + (r.last - r.first) * op.time(r.n).total_ms
        for d in p.devices:
            free[d] = end_ms
        ends[r.metaop], at[r.metaop] = end_ms, p.devices
        configuration = op.configuration(r.n)
        runs.append(Run(r.metaop, r.first, r.last, p.devices, start_ms, end_ms, configuration, r.stage))
    return tuple(runs)
