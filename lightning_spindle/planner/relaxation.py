"""The linear programs behind the bounds, as sparse matrices, and the knapsack that prices columns.

Legend: MetaOp i, its k-th option (n devices, T ms a layer), C the makespan in ms.
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


def options(op: PlannedOp, devices: int) -> tuple[tuple[int, float], ...]:
    """(n, T(n) in ms) of the allocations worth using: n ascending, T strictly falling."""
    found: list[tuple[int, float]] = []
    for n, time in op.times:
        if n <= devices and (not found or time.total_ms < found[-1][1]):
            found.append((n, time.total_ms))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Duals:
    """The duals of a solved program, all of ``ub`` ≥ 0; the last of them is that of Σ z ≤ C."""

    ub: NDArray[np.float64]
    eq: NDArray[np.float64]

    @classmethod
    def of(cls, solved: Any) -> Duals:
        return cls(-np.asarray(solved.ineqlin.marginals), np.asarray(solved.eqlin.marginals))

    def mixed(self, other: Duals, weight: float) -> Duals:
        return Duals((1 - weight) * self.ub + weight * other.ub, (1 - weight) * self.eq + weight * other.eq)


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


class Master:
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
        """The optimum, as scipy's ``OptimizeResult``."""
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

    def prices(self, duals: Duals) -> list[list[float]]:
        return [[float(duals.ub[r]) for r in rows] for rows in self.links]

    def dual_value(self, duals: Duals) -> float:
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


def knapsack(
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
