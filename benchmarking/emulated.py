"""The emulated mode: the simulator held against the engine on virtual devices.

The program that the simulated mode would simulate is also run by the real engine, with real messages between
ranks that are threads (``lightning_spindle.emulate``).
"""

import time
from dataclasses import replace

from benchmarking.rows import SimulatedRow
from benchmarking.simulated import Cell, Planning, Result, simulate_spindle
from lightning_spindle.emulate import emulate

TOLERANCE = 0.02
"""How far a simulated iteration may be from the emulated one, relative to that."""


def emulate_spindle(cell: Cell, planning: Planning) -> Result:
    """As ``simulate_spindle``, and the same program emulated; the timeline is the emulated one.

    A difference beyond ``TOLERANCE`` is the row's error.
    """
    simulated = simulate_spindle(cell, planning)
    assert simulated.plan is not None
    assert simulated.row.simulated_ms is not None
    started_s = time.perf_counter()
    timeline = emulate(cell.step.program(simulated.plan), cell.costs)
    emulating_s = time.perf_counter() - started_s
    emulated_ms = timeline.span_s * 1e3
    row = replace(
        simulated.row,
        mode="emulated",
        emulated_ms=emulated_ms,
        difference=simulated.row.simulated_ms / emulated_ms - 1.0,
        emulating_s=emulating_s,
    )
    return replace(simulated, row=replace(row, error=_too_far(row)), timeline=timeline)


def _too_far(row: SimulatedRow) -> str:
    """What is wrong with a row; empty if nothing is."""
    assert row.difference is not None
    if abs(row.difference) <= TOLERANCE:
        return ""
    times = f"simulated {row.simulated_ms:.2f} ms, emulated {row.emulated_ms:.2f} ms"
    return f"{times}: {row.difference:+.1%}, more than {TOLERANCE:.0%}"
