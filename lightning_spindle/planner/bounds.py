"""True lower bounds on the makespan, by linear programs over relaxed schedules.

Appendix B's C* is *not* one: it interpolates T between valid allocations. These hold for every
plan whose links cost nothing, hence for every plan:

* the critical path, each layer on its fastest allocation;
* across levels: layers x[m, n] of MetaOp m on n devices, dependencies between the MetaOps'
  spans, and the area Σ n·T·x ≤ N·C;
* configurations: at each moment the devices are in one *configuration*, which gives each MetaOp
  at most one valid allocation, N devices in all. The time spent in configurations covers each
  MetaOp's layers. Solved by column generation (Gilmore & Gomory 1961); a column is priced by
  a multiple-choice knapsack (dynamic program, O(metaops · allocations · N));
* ``bound_ms``: both together, the configurations' times covering the layers of the LP across
  levels. It dominates the others.

Column generation may stop early: scaling the duals until no configuration is violated leaves a
feasible dual, so its value bounds the makespan at any iteration (Farley 1990).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from lightning_spindle.planner.problem import PlannedOp, PlanningProblem
from lightning_spindle.planner.relaxation import Duals, Master, knapsack, options

_CLOSE = 1e-4
"""Column generation ends where the bound is this close (relative) to the restricted optimum."""
_SMOOTHING = 0.5
"""Columns are priced between the best duals and the newest (Wentges 1997): fewer iterations."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds in ms; ``levels_ms`` are those of each MetaLevel run alone."""

    critical_path_ms: float
    across_levels_ms: float
    levels_ms: tuple[float, ...]
    bound_ms: float

    @property
    def level_bound_ms(self) -> float:
        """The bound for plans with a barrier between levels; others may be shorter."""
        return sum(self.levels_ms)


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The optimum of the LP across levels: ``layers[m][k]`` of MetaOp m on its k-th option."""

    span_ms: float
    layers: tuple[tuple[float, ...], ...]


def critical_path_ms(problem: PlanningProblem) -> float:
    """The longest chain of MetaOps, each layer on its fastest allocation."""
    ends: dict[str, float] = {}
    for m in problem.metaops:
        fastest = options(m, problem.devices)[-1][1]
        ends[m.name] = max((ends[b] for b in m.after), default=0.0) + m.layers * fastest
    return max(ends.values(), default=0.0)


def across_levels(
    problem: PlanningProblem,
    *,
    capacity: float = 1.0,
    table: Sequence[Sequence[tuple[int, float]]] | None = None,
) -> Relaxation:
    """The LP across levels with ``capacity`` · N devices; a lower bound where capacity is 1.

    ``table`` replaces the options (n, ms of a layer) of each MetaOp.
    """
    master = Master(problem, capacity=capacity, table=table)
    solution = master.solve()
    layers = tuple(tuple(float(solution.x[v]) for v in columns) for columns in master.layers)
    return Relaxation(float(solution.fun), layers)


def level_bound_ms(metaops: Sequence[PlannedOp], devices: int, *, max_columns: int = 300) -> float:
    """The configuration LP of independent MetaOps: no schedule of them alone is shorter."""
    table = [options(m, devices) for m in metaops]
    layers = np.array([m.layers for m in metaops], float)
    columns = [[(i, k)] for i, row in enumerate(table) for k in range(len(row))]
    best_ms, best_duals = 0.0, np.zeros(len(metaops))
    for _ in range(max_columns):
        speeds = np.zeros((len(metaops), len(columns)))
        for j, column in enumerate(columns):
            for i, k in column:
                speeds[i, j] = 1.0 / table[i][k][1]
        solved = linprog(np.ones(len(columns)), A_ub=-speeds, b_ub=-layers, method="highs")
        newest = -np.asarray(solved.ineqlin.marginals)
        for weight in (_SMOOTHING, 0.0):
            duals = weight * best_duals + (1.0 - weight) * newest
            values = [[y / t for _, t in row] for y, row in zip(duals, table, strict=True)]
            value, column = knapsack(values, table, devices)
            bound_ms = float(layers @ duals) / max(value, 1e-300)
            if bound_ms > best_ms:
                best_ms, best_duals = bound_ms, duals / value
            if sum(values[i][k] * newest[i] / duals[i] for i, k in column if duals[i] > 0) > 1.0 + 1e-9:
                break
        if best_ms >= float(solved.fun) * (1.0 - _CLOSE):
            break
        columns.append(column)
    return best_ms


def bound_ms(problem: PlanningProblem, *, max_columns: int = 300) -> float:
    """The best bound here: configurations, dependencies and area in one LP.

    Each of at most ``max_columns`` iterations solves an LP and a knapsack; stopped early it is
    still a bound, at least that of ``across_levels``. 30 MetaOps on 32 devices: some seconds.
    """
    master = Master(problem, capacity=1.0, table=None)
    first = master.solve()
    best_ms, best_duals = float(first.fun), Duals.of(first)
    master.link()
    for _ in range(max_columns):
        solved = master.solve()
        newest = Duals.of(solved)
        for weight in (_SMOOTHING, 0.0):
            duals = (
                newest
                if weight == 0.0 or len(best_duals.ub) != len(newest.ub)
                else newest.mixed(best_duals, weight)
            )
            values = master.prices(duals)
            value, column = knapsack(values, master.table, problem.devices)
            excess = max(0.0, value - duals.ub[-1])
            found_ms = master.dual_value(duals) / (1.0 + excess)
            if found_ms > best_ms:
                best_ms, best_duals = found_ms, duals
            prices = master.prices(newest)
            if sum(prices[i][k] for i, k in column) > newest.ub[-1] + 1e-9:
                break
        if best_ms >= float(solved.fun) * (1.0 - _CLOSE):
            break
        master.add(column)
    return best_ms


def lower_bounds(problem: PlanningProblem, *, max_columns: int = 300) -> Bounds:
    """All bounds of a problem (seconds: the LPs are solved to about 1e-4)."""
    depth: dict[str, int] = {}
    for m in problem.metaops:
        depth[m.name] = 1 + max((depth[b] for b in m.after), default=-1)
    levels = [
        level_bound_ms(
            [m for m in problem.metaops if depth[m.name] == k], problem.devices, max_columns=max_columns
        )
        for k in range(1 + max(depth.values(), default=-1))
    ]
    across_ms = across_levels(problem).span_ms
    best_ms = bound_ms(problem, max_columns=max_columns)
    return Bounds(critical_path_ms(problem), across_ms, tuple(levels), max(best_ms, across_ms, *levels))
