"""What every figure's row begins with."""

from typing import Literal

from benchmarking.simulated import Cell

Head = tuple[str, str, str, int, str, int]


def head_of(cell: Cell, mode: Literal["simulated", "measured"] = "simulated") -> Head:
    """The fields of a ``CellRow``, as rows of ``results.csv`` have them."""
    row = cell.row("", mode=mode)
    return (row.date, row.mode, row.workload, row.tasks, row.cluster, row.devices)
