"""Sweeps: what was done before is not done again, and how long the rest takes is said."""

import time
from collections.abc import Iterable, Sequence
from math import prod

from hydra.core.override_parser.overrides_parser import OverridesParser

from benchmarking.rows import SimulatedRow


def jobs_of(arguments: Sequence[str]) -> int:
    """How many jobs Hydra makes of a command line's overrides.

    >>> jobs_of(["-m", "planner=spindle,search", "cluster.devices=8,16,32", "seed=1"])
    6
    """
    given = [a for a in arguments if "=" in a and not a.startswith("-")]
    swept = [o for o in OverridesParser.create().parse_overrides(given) if o.is_sweep_override()]
    return prod(len(list(o.sweep_iterator())) for o in swept)


class Progress:
    """Says which job of a sweep has ended, and when the last one will have at this speed."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.done, self.started_s = jobs, 0, time.monotonic()

    def line(self, what: str) -> str:
        """Call once for each job, when it has ended."""
        self.done += 1
        left_s = (time.monotonic() - self.started_s) / self.done * (self.jobs - self.done)
        return f"[{self.done}/{self.jobs}] {what} ({left_s:.0f} s left)" if self.jobs > 1 else what


def latest(rows: Iterable[SimulatedRow]) -> list[SimulatedRow]:
    """Of each job its last row, for jobs that failed are done again; cells and systems as they first came."""
    found: dict[tuple[object, ...], SimulatedRow] = {}
    for row in rows:
        found[row.key] = row
    cells = list(dict.fromkeys(row.cell for row in found.values()))
    return sorted(found.values(), key=lambda row: cells.index(row.cell))
