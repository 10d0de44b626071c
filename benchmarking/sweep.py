"""Sweeps: what was done before is not done again, and how long the rest takes is said."""

import csv
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser

from benchmarking.simulated import SimulatedRow


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


def read_rows(path: Path) -> list[SimulatedRow]:
    """The rows of a CSV file, none where there is no file."""
    if not path.exists():
        return []
    hints = get_type_hints(SimulatedRow)
    with path.open(newline="") as file:
        return [
            SimulatedRow(**{f.name: _value(line[f.name], hints[f.name]) for f in fields(SimulatedRow)})
            for line in csv.DictReader(file)
        ]


def latest(rows: Iterable[SimulatedRow]) -> list[SimulatedRow]:
    """Of each job its last row, for jobs that failed are done again; cells and systems as they first came."""
    found: dict[tuple[object, ...], SimulatedRow] = {}
    for row in rows:
        found[row.key] = row
    cells = list(dict.fromkeys(row.cell for row in found.values()))
    return sorted(found.values(), key=lambda row: cells.index(row.cell))


def _value(text: str, kind: Any) -> Any:
    """A cell's text as its column's type; empty is None where that may be."""
    optional = type(None) in get_args(kind)
    if optional and text == "":
        return None
    plain = next((k for k in get_args(kind) if k is not type(None)), kind) if optional else kind
    return plain(text)
