"""Deliberate faults, and the tests that must turn red under each: ``make faults``.

A green test says little until it has been seen red. Each row of ``FAULTS`` replaces one function of ours and
names the tests that hold it; ``python -m tests.faults`` first sees all of them green, then runs each row's
tests with its fault in place and demands that every one of them fails (a collection error, a crash of pytest
or a hang does not count), and that the replacement was really called.

The fault is applied before any test module is imported, in the test process (whose forked ranks inherit it)
and in every Python process it launches. The replaced function is exchanged wherever a module of ours already
holds it: as its own name, under ``from ... import``, or as a value of a module-level dict.
"""

from collections.abc import Iterable

from tests.faults.fault import Fault, put_in_place
from tests.faults.rows import FAULTS

__all__ = ["FAULTS", "Fault", "apply_fault"]


def apply_fault(name: str, faults: Iterable[Fault] = FAULTS) -> None:
    """Put the fault of that name in place, in this process and in the Python processes it starts."""
    fault = next((fault for fault in faults if fault.name == name), None)
    if fault is None:
        raise ValueError(f"no fault is named {name!r}; there are {[f.name for f in faults]}")
    put_in_place(fault)
