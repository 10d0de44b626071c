"""Whether the orderings that the paper finds hold in ours, counted cell by cell."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from benchmarking.figures.comparing import ComparedRow
from benchmarking.figures.style import workload_title

Cells = Mapping[tuple[str, int, int], Mapping[str, float]]
"""Speedup over DeepSpeed by system, of each workload, number of tasks and devices that DeepSpeed can run."""


def orderings(rows: Sequence[ComparedRow]) -> str:
    """A line for each ordering: in how many cells it holds, and where it does not."""
    cells: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in rows:
        if row.speedup is not None:
            cells.setdefault((row.workload, row.tasks, row.devices), {})[row.name] = row.speedup
    lines = [
        *(_ahead(cells, planner) for planner in ("spindle", "search")),
        *(_between(cells, planner) for planner in ("spindle", "search")),
        _weak(cells),
        *(_grows(cells, planner, axis) for planner in ("spindle", "search") for axis in ("tasks", "devices")),
    ]
    return "\n".join(f"* {line}" for line in lines)


def _ahead(cells: Cells, planner: str) -> str:
    holds = {
        cell: planner in own
        and all(own[planner] >= value for name, value in own.items() if name not in ("spindle", "search"))
        for cell, own in cells.items()
    }
    return _verdict(f"Spindle (planner {planner}) is ahead of all other systems", holds)


def _between(cells: Cells, planner: str) -> str:
    holds = {
        cell: 1.0 <= own["optimus"] <= own[planner]
        for cell, own in cells.items()
        if "optimus" in own and planner in own
    }
    return _verdict(f"Optimus is between DeepSpeed and Spindle (planner {planner})", holds)


def _weak(cells: Cells) -> str:
    holds = {cell: own["uniform"] <= 1.0 for cell, own in cells.items() if "uniform" in own}
    return _verdict("Uniform is behind DeepSpeed", holds)


def _grows(cells: Cells, planner: str, axis: str) -> str:
    """Between neighbours along an axis, all else equal; named after the larger one."""
    place = {"tasks": 1, "devices": 2}[axis]
    lines: dict[tuple[object, ...], list[tuple[str, int, int]]] = {}
    for cell, own in cells.items():
        if planner in own:
            lines.setdefault((*cell[:place], *cell[place + 1 :]), []).append(cell)
    holds = {
        larger: cells[larger][planner] >= cells[smaller][planner]
        for line in lines.values()
        for smaller, larger in pairwise(line)
    }
    return _verdict(f"Spindle's gain (planner {planner}) grows with {axis}", holds)


def _verdict(claim: str, holds: Mapping[tuple[str, int, int], bool]) -> str:
    count = f"{claim}: in {sum(holds.values())} of {len(holds)}"
    exceptions = [
        f"{workload_title(workload, tasks)} on {devices}"
        for (workload, tasks, devices), true in holds.items()
        if not true
    ]
    return f"{count}; not: {'; '.join(exceptions)}" if exceptions else count
