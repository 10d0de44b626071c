"""Choosing among planners by what will run: the simulator's iteration time.

A planner's own objective leaves things out: forwards of all tasks run before the mirrored
backwards, MetaOps that change devices send data, holders of a parameter sum its gradient,
ranks share cores. The simulator knows them, so it judges every planner's plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_spindle.costs import Costs
from lightning_spindle.graph import MetaGraph, OperatorGraph
from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.planner import PLANNERS
from lightning_spindle.planner.problem import PlanningProblem
from lightning_spindle.program import Program, holders, lower, owners, place_plan
from lightning_spindle.simulate import simulate

TIME_LIMIT_S = 3.0
"""Of planners that search."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A captured step whose plans can be lowered and simulated."""

    metagraph: MetaGraph
    graph: OperatorGraph
    costs: Costs
    trainable: frozenset[str]
    shard_optimizer_state: bool = False

    def program(self, plan: ExecutionPlan) -> Program:
        runs = place_plan(plan, self.metagraph, self.graph)
        held = holders([(runs, self.graph)])
        owned = owners(self.graph.parameters, held) if self.shard_optimizer_state else {}
        return lower(runs, self.graph, plan.devices, held, trainable=self.trainable, owners=owned)

    def iteration_ms(self, plan: ExecutionPlan) -> float:
        """Simulated time of one iteration, from first forward to the last rank's optimizer step."""
        return simulate(self.program(plan), self.costs).span_s * 1e3


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan that the simulator finds best, and every planner's simulated iteration."""

    plan: ExecutionPlan
    iteration_ms: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.1f}" for name, ms in self.iteration_ms)
        return f"planner {self.plan.planner} was chosen by simulated iteration time (ms): {times}"


def choose(
    problem: PlanningProblem,
    workload: Workload,
    planners: Iterable[str] = tuple(PLANNERS),
    *,
    time_limit_s: float | None = TIME_LIMIT_S,
    seed: int = 0,
) -> Choice:
    """Plans with each planner and takes the plan whose simulated iteration is shortest.

    ``search`` compares its own finalists by the same measure. A planner that finds no plan
    that fits the devices' memory is passed over.

    Raises:
        ValueError: no planner found a plan; the message is the first refusal.
    """
    plans: list[tuple[float, ExecutionPlan]] = []
    refusals: list[ValueError] = []
    for name in planners:
        try:
            plan = _plan(name, problem, workload, time_limit_s, seed)
        except ValueError as refusal:
            refusals.append(refusal)
            continue
        plans.append((workload.iteration_ms(plan), plan))
    if not plans:
        raise refusals[0]
    ranked = sorted(plans, key=lambda found: found[0])
    return Choice(ranked[0][1], tuple((plan.planner, ms) for ms, plan in ranked))


def _plan(
    name: str, problem: PlanningProblem, workload: Workload, time_limit_s: float | None, seed: int
) -> ExecutionPlan:
    if name != "search":
        return PLANNERS[name](problem, time_limit_s=time_limit_s, seed=seed)
    from lightning_spindle.planner.search import plan_search

    return plan_search(problem, time_limit_s=time_limit_s, seed=seed, score=workload.iteration_ms)
