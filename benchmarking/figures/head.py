"""What every figure's row begins with: of when it is, what kind, and of which cell."""

from dataclasses import dataclass
from typing import Literal

from benchmarking.simulated import Cell


@dataclass(frozen=True, slots=True)
class FigureRow:
    """``mode`` is "simulated" (on the cluster's cost model) or "measured" (wall clock of this machine)."""

    date: str
    mode: str
    workload: str
    tasks: int
    cluster: str
    devices: int


Head = tuple[str, str, str, int, str, int]


def head_of(cell: Cell, mode: Literal["simulated", "measured"] = "simulated") -> Head:
    """The fields of a ``FigureRow``, as rows of ``results.csv`` have them."""
    row = cell.row("", mode=mode)
    return (row.date, row.mode, row.workload, row.tasks, row.cluster, row.devices)
