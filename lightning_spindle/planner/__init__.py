"""Planners: from MetaOps with scaling curves to an execution plan (paper, section 3).

>>> from lightning_spindle.planner import load_cell, plan
>>> plan(load_cell("cell.json"), "spindle").makespan_ms  # doctest: +SKIP
186.2

Pure Python: nothing here imports torch. A planner's module is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, cast

from lightning_spindle.planner.problem import LayerTime, PlannedOp, PlanningProblem, load_cell

if TYPE_CHECKING:
    from lightning_spindle.plan import ExecutionPlan

__all__ = ["PLANNERS", "LayerTime", "PlannedOp", "Planner", "PlanningProblem", "load_cell", "plan"]

DEFAULT_TIME_LIMIT_S = 1.0


class Planner(Protocol):
    """A planner is a function of the problem alone: equal problem and seed, equal plan.

    ``time_limit_s`` caps planners that search (None: no cap); the others finish by themselves.
    """

    def __call__(
        self, problem: PlanningProblem, *, time_limit_s: float | None = ..., seed: int = ...
    ) -> ExecutionPlan: ...


def _lazy(module: str, function: str) -> Planner:
    def planner(
        problem: PlanningProblem, *, time_limit_s: float | None = DEFAULT_TIME_LIMIT_S, seed: int = 0
    ) -> ExecutionPlan:
        found = getattr(import_module(f"lightning_spindle.planner.{module}"), function)
        return cast("Planner", found)(problem, time_limit_s=time_limit_s, seed=seed)

    planner.__name__ = function
    return planner


PLANNERS: Mapping[str, Planner] = MappingProxyType(
    {
        "spindle": _lazy("spindle", "plan_spindle"),
        "seq": _lazy("competitors", "plan_seq"),
        "uniform": _lazy("competitors", "plan_uniform"),
        "optimus": _lazy("competitors", "plan_optimus"),
        "stmm": _lazy("competitors", "plan_stmm"),
        "search": _lazy("search", "plan_search"),
    }
)


def plan(
    problem: PlanningProblem,
    planner: str = "spindle",
    *,
    time_limit_s: float | None = DEFAULT_TIME_LIMIT_S,
    seed: int = 0,
) -> ExecutionPlan:
    """Plans with the planner of that name.

    Raises:
        ValueError: no planner has that name (the message lists those there are), or the
            problem cannot be planned (the message names the MetaOp and the value).
    """
    if planner not in PLANNERS:
        raise ValueError(f"unknown planner {planner!r}; there are {', '.join(PLANNERS)}")
    return PLANNERS[planner](problem, time_limit_s=time_limit_s, seed=seed)
