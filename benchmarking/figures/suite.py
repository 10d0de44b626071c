"""The cells that figures are made of, each planned and simulated once for all figures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarking.baselines import SYSTEMS as BASELINES
from benchmarking.cells import cell_of, of_tasks
from benchmarking.figures.style import workload_title
from benchmarking.simulated import Cell, Planning, Result, attempted, simulate_baseline, simulate_spindle


@dataclass(frozen=True, slots=True)
class Refusal:
    """A system that cannot run a cell, and why."""

    cell: Cell
    system: str
    reason: str

    def __str__(self) -> str:
        names = tasks_of(self.cell)
        only = f" ({names[0]})" if len(names) == 1 else ""
        where = f"{workload_title(self.cell.workload, self.cell.tasks)}{only}"
        return f"{self.system}, {where} on {self.cell.costs.cluster.devices} devices: {self.reason}"


@dataclass(slots=True)
class Suite:
    """A composed ``conf/benchmark.yaml`` with ``mode=figures``, as plain containers."""

    config: Mapping[str, Any]
    refusals: list[Refusal] = field(default_factory=list)
    """Of what was asked for, each once: no figure leaves a system out unnoticed."""
    _results: dict[tuple[Cell, str], Result] = field(default_factory=dict)

    def of_one_figure(self) -> "Suite":
        """The same with the same results, and refusals of its own."""
        return replace(self, refusals=[])

    def cases(self, figure: str) -> Any:
        """What the configuration says of a figure's cases."""
        return self.config["cases"][figure]

    def cells(self, figure: str) -> Iterator[Cell]:
        """Of a figure whose cases are a list: each workload, number of tasks and number of devices."""
        for case in self.cases(figure):
            for tasks in case["tasks"]:
                for devices in case["devices"]:
                    sharded = case.get("shard_optimizer_state", False)
                    yield self.cell(case["workload"], devices, tasks, sharded)

    def cell(
        self, workload: str, devices: int, tasks: int | None = None, shard_optimizer_state: bool = False
    ) -> Cell:
        """A workload's first tasks (None: all) on a cluster of so many devices.

        The optimizer's state is also sharded where the configuration says so of all cells.

        Raises:
            ValueError: there is no such workload, or there are not so many tasks.
        """
        known = self.config["workloads"]
        if workload not in known:
            raise ValueError(f"no figures are made of {workload!r}; there are {', '.join(known)}")
        return cell_of(
            {
                "workload": {**known[workload]["workload"], "tasks": tasks},
                "cluster": {**self.config["cluster"], "devices": devices},
                "shard_optimizer_state": shard_optimizer_state
                or self.config.get("shard_optimizer_state", False),
            }
        )

    def result(self, cell: Cell, system: str) -> Result:
        """What a planner's name, or a baseline's, comes to on a cell; a row with an error if it refuses."""
        key = (cell, system)
        if key not in self._results:
            if system in BASELINES:
                job = partial(simulate_baseline, cell, system)
                self._results[key] = attempted(cell.row(system), job)
            else:
                planning = Planning(system, self.config["planner"]["time_limit_s"], self.config["seed"])
                job = partial(simulate_spindle, cell, planning)
                self._results[key] = attempted(planning.row(cell), job)
        found = self._results[key]
        if found.row.error:
            self.refuse(cell, system, found.row.error)
        return found

    def refuse(self, cell: Cell, system: str, reason: str) -> None:
        """Note what a figure found out by itself, not by asking for a ``result``."""
        refusal = Refusal(cell, system, reason)
        if refusal not in self.refusals:
            self.refusals.append(refusal)


def tasks_of(cell: Cell) -> tuple[str, ...]:
    """The names of a cell's tasks in their order."""
    return tuple(dict.fromkeys(o.task for o in cell.graph.operators))


def part_of(cell: Cell, tasks: Sequence[str]) -> Cell:
    """The same cluster with some of a cell's tasks."""
    costs = replace(cell.costs, graph=of_tasks(cell.graph, tasks))
    return replace(cell, tasks=len(tasks), costs=costs)
