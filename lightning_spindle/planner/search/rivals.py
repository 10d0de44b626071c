"""The plans of the other planners: where the search may start, and what it must not be worse than."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.planner import PLANNERS
from lightning_spindle.planner.placement import place
from lightning_spindle.planner.problem import PlanningProblem
from lightning_spindle.planner.report import with_figures
from lightning_spindle.planner.spindle import Reading, stage_schedule, unplaced_runs
from lightning_spindle.planner.sync import FULL_SYNC_WEIGHT
from lightning_spindle.planner.timing import UnplacedRun


class Rivals:
    """All planners but the search.

    ``spindle`` cuts large problems into thousands of runs, which take long to place; so its
    plan is only made where a lower bound on its makespan says that it could win.
    """

    def __init__(self, problem: PlanningProblem, seed: int) -> None:
        self.problem, self.seed = problem, seed
        self.refusals: list[ValueError] = []
        self._plans: list[ExecutionPlan] = []
        self._slowest_s = 0.0
        for name in PLANNERS:
            if name not in ("search", "spindle"):
                began_s = perf_counter()
                self._plan(name)
                self._slowest_s = max(self._slowest_s, perf_counter() - began_s)
        self._slices = unplaced_runs(stage_schedule(problem, Reading())[1])

    def runs(self) -> Iterator[Sequence[UnplacedRun]]:
        """What each planner runs, in its planned times."""
        yield self._slices
        for plan in self._plans:
            yield [
                UnplacedRun(r.metaop, r.first, r.last, len(r.devices), r.start_ms, r.end_ms)
                for r in plan.runs
            ]

    def plans_below(self, makespan_ms: float) -> Sequence[ExecutionPlan]:
        """The plans, of which ``spindle``'s is left out where it cannot be below ``makespan_ms``."""
        if self._least_ms() < makespan_ms:
            self._plan("spindle")
        return self._plans

    def with_full_sync(self) -> Sequence[ExecutionPlan]:
        """``spindle``'s Stages, placed as if no synchronisation ran beside computing."""
        try:
            runs = place(self._slices, self.problem, sync_weight=FULL_SYNC_WEIGHT)
        except ValueError as refusal:
            self.refusals.append(refusal)
            return []
        return [with_figures("search", runs, self.problem, {})]

    def placing_share(self, time_limit_s: float | None) -> float:
        """The share of the time limit that placing a plan may take, judged by their planning times."""
        return 1.5 * self._slowest_s / time_limit_s if time_limit_s else 0.0

    def _plan(self, name: str) -> None:
        try:
            self._plans.append(PLANNERS[name](self.problem, time_limit_s=None, seed=self.seed))
        except ValueError as refusal:
            self.refusals.append(refusal)

    def _least_ms(self) -> float:
        """No schedule of ``spindle``'s slices is shorter: their area, and the longest chain of them.

        Where memory limits its allocations its plan has other slices: nothing is known then.
        """
        if self.problem.cluster.memory_bytes is not None:
            return 0.0
        spans = dict.fromkeys((m.name for m in self.problem.metaops), 0.0)
        area = 0.0
        for run in self._slices:
            span = run.end_ms - run.start_ms
            spans[run.metaop] += span
            area += run.n * span
        ends: dict[str, float] = {}
        for m in self.problem.metaops:
            ends[m.name] = spans[m.name] + max((ends[b] for b in m.after), default=0.0)
        return max(area / self.problem.devices, *ends.values())
