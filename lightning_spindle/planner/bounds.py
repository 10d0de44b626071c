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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

from lightning_spindle.planner.problem import PlannedOp, PlanningProblem

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


def options(op: PlannedOp, devices: int) -> tuple[tuple[int, float], ...]:
    """(n, T(n) in ms) of the allocations worth using: n ascending, T strictly falling."""
    found: list[tuple[int, float]] = []
    for n, time in op.times:
        if n <= devices and (not found or time.total_ms < found[-1][1]):
            found.append((n, time.total_ms))
    return tuple(found)


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
    master = _Master(problem, capacity=capacity, table=table)
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
            value, column = _knapsack(values, table, devices)
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
    master = _Master(problem, capacity=1.0, table=None)
    first = master.solve()
    best_ms, best_duals = float(first.fun), _Duals.of(first)
    master.link()
    for _ in range(max_columns):
        solved = master.solve()
        newest = _Duals.of(solved)
        for weight in (_SMOOTHING, 0.0):
            duals = (
                newest
                if weight == 0.0 or len(best_duals.ub) != len(newest.ub)
                else newest.mixed(best_duals, weight)
            )
            values = master.prices(duals)
            value, column = _knapsack(values, master.table, problem.devices)
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


@dataclass(frozen=True, slots=True)
class _Duals:
    """Signs such that all of ``ub`` are ≥ 0; the last of them is that of Σ z ≤ C."""

    ub: NDArray[np.float64]
    eq: NDArray[np.float64]

    @classmethod
    def of(cls, solved: Any) -> _Duals:
        return cls(-np.asarray(solved.ineqlin.marginals), np.asarray(solved.eqlin.marginals))

    def mixed(self, other: _Duals, weight: float) -> _Duals:
        return _Duals((1 - weight) * self.ub + weight * other.ub, (1 - weight) * self.eq + weight * other.eq)


@dataclass(slots=True)
class _Entries:
    """A sparse matrix under construction."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, column: int, value: float) -> None:
        self.rows.append(row)
        self.columns.append(column)
        self.values.append(value)

    def matrix(self, rows: int, columns: int) -> csr_array:
        return csr_array((self.values, (self.rows, self.columns)), shape=(rows, columns))


class _Master:
    """The LP across levels, and the rows and columns of configurations on top of it.

    Columns: C, the end of each MetaOp, layers x[m][k], then one time z for each configuration.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        *,
        capacity: float,
        table: Sequence[Sequence[tuple[int, float]]] | None,
    ) -> None:
        metaops = problem.metaops
        self.table = table if table is not None else [options(m, problem.devices) for m in metaops]
        self.counts = np.array([m.layers for m in metaops], float)
        index = {m.name: i for i, m in enumerate(metaops)}
        self.size = 1 + len(metaops)
        self.layers: list[list[int]] = []
        for row in self.table:
            self.layers.append(list(range(self.size, self.size + len(row))))
            self.size += len(row)
        self.ub, self.height = _Entries(), 0
        for i, m in enumerate(metaops):
            for before in sorted(index[b] for b in m.after) or (None,):
                self._chain(i, before)
            self._row({1 + i: 1.0, 0: -1.0})
        area = {v: n * t for vs, row in zip(self.layers, self.table, strict=True)
                for v, (n, t) in zip(vs, row, strict=True)}  # fmt: skip
        self._row({**area, 0: -problem.devices * capacity})
        self.eq = _Entries()
        for i, columns in enumerate(self.layers):
            for v in columns:
                self.eq.add(i, v, 1.0)
        self.links: list[list[int]] = []

    def solve(self) -> Any:
        cost = np.zeros(self.size)
        cost[0] = 1.0
        solved = linprog(
            cost,
            A_ub=self.ub.matrix(self.height, self.size),
            b_ub=np.zeros(self.height),
            A_eq=self.eq.matrix(len(self.counts), self.size),
            b_eq=self.counts,
            method="highs",
        )
        assert solved.status == 0, f"the LP is feasible and bounded, yet HiGHS says: {solved.message}"
        return solved

    def link(self) -> None:
        """Adds: the configurations cover the layers' times, within C; each option alone to start with."""
        for columns, row in zip(self.layers, self.table, strict=True):
            self.links.append([])
            for v, (_, t) in zip(columns, row, strict=True):
                self.links[-1].append(self._row({v: t}))
        self._row({0: -1.0})
        for i, row in enumerate(self.table):
            for k in range(len(row)):
                self.add([(i, k)])

    def add(self, column: Sequence[tuple[int, int]]) -> None:
        """A configuration: pairs (MetaOp, option)."""
        for i, k in column:
            self.ub.add(self.links[i][k], self.size, -1.0)
        self.ub.add(self.height - 1, self.size, 1.0)
        self.size += 1

    def prices(self, duals: _Duals) -> list[list[float]]:
        return [[float(duals.ub[r]) for r in rows] for rows in self.links]

    def dual_value(self, duals: _Duals) -> float:
        return float(self.counts @ duals.eq)

    def _chain(self, i: int, before: int | None) -> None:
        row = {v: t for v, (_, t) in zip(self.layers[i], self.table[i], strict=True)}
        row[1 + i] = -1.0
        if before is not None:
            row[1 + before] = 1.0
        self._row(row)

    def _row(self, entries: dict[int, float]) -> int:
        for column, value in entries.items():
            self.ub.add(self.height, column, value)
        self.height += 1
        return self.height - 1


def _knapsack(
    values: Sequence[Sequence[float]], table: Sequence[Sequence[tuple[int, float]]], devices: int
) -> tuple[float, list[tuple[int, int]]]:
    """At most one option (n, _) for each MetaOp, n summing to at most ``devices``, of the largest value."""
    best = np.zeros(devices + 1)
    chosen: list[NDArray[np.int64]] = []
    for worth, row in zip(values, table, strict=True):
        new, choice = best.copy(), np.full(devices + 1, -1)
        for k, (n, _) in enumerate(row):
            if worth[k] > 0:
                candidate = best[: devices + 1 - n] + worth[k]
                better = candidate > new[n:]
                new[n:][better] = candidate[better]
                choice[n:][better] = k
        best = new
        chosen.append(choice)
    left, column = devices, []
    for i in range(len(table) - 1, -1, -1):
        k = int(chosen[i][left])
        if k >= 0:
            column.append((i, k))
            left -= table[i][k][0]
    return float(best[devices]), column
