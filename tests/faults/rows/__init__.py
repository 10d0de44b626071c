"""The table of faults, by the part of the project that they are put into."""

from tests.faults.fault import Fault
from tests.faults.rows import capture, coarse, engine, planning, programs, strategy, suite

FAULTS: tuple[Fault, ...] = (
    *capture.FAULTS,
    *coarse.FAULTS,
    *planning.FAULTS,
    *programs.FAULTS,
    *engine.FAULTS,
    *strategy.FAULTS,
    *suite.FAULTS,
)
