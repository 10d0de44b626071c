"""Rows of ``results.csv``, and what is computed from them."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Row:
    """One job. What it did not get to is None; ``error`` is empty where it counts."""

    date: str
    workload: str
    mode: str
    tasks: int | None
    """The first so many; None: all."""
    size: str
    """Empty: the workload's own for training."""
    seed: int
    system: str
    planner: str
    """Of Spindle; "auto" chooses."""
    planned_by: str
    """The planner whose plan ran."""
    processes: int
    repeat: int
    live_ranks: int | None
    """Ranks that answered a collective in the job."""
    step_ms: float | None
    """Median time of a step after the warm-up, as Lightning's loop sees it."""
    step_ms_fastest: float | None
    step_ms_slowest: float | None
    predicted_ms: float | None
    """The iteration that the plan promised (from first forward to last optimizer step)."""
    iteration_ms: float | None
    """That iteration as it was measured: the step without loading, hooks and the loop."""
    planning_s: float | None
    """Capture, measuring and planning before the first step."""
    steps: int
    warmup: int
    parameters: int | None
    threads: int | None
    cores: int
    cpu: str
    torch: str
    error: str
    folder: str
    """Of the job's files, seen from the rows' own. A job that is done again has a second row with it."""


def append(path: Path, row: "DataclassInstance") -> None:
    """Write the row at the end of a CSV file, which gets a head if it is new.

    Raises:
        ValueError: the file has rows of another kind.
    """
    new = not path.exists()
    if not new:
        _require_kind(path, type(row))
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(row)])
        if new:
            writer.writeheader()
        writer.writerow(asdict(row))


def read_rows(path: Path, kind: type[R]) -> list[R]:
    """The rows of a CSV file, none where there is no file.

    Raises:
        ValueError: the file has rows of another kind.
    """
    if not path.exists():
        return []
    _require_kind(path, kind)
    hints = get_type_hints(kind)
    with path.open(newline="") as file:
        return [
            kind(**{f.name: _value(line[f.name], hints[f.name]) for f in fields(kind)})
            for line in csv.DictReader(file)
        ]


def whole(given: object) -> int:
    """What was asked for as a column of whole numbers can have it: 0 where it was none."""
    return given if isinstance(given, int) else 0


def has_rows(path: Path, kind: "type[DataclassInstance]") -> bool:
    """Whether there is such a file, with rows of that kind."""
    if not path.exists():
        return False
    with path.open(newline="") as file:
        return next(csv.reader(file), None) == [field.name for field in fields(kind)]


def _require_kind(path: Path, kind: "type[DataclassInstance]") -> None:
    if not has_rows(path, kind):
        raise ValueError(f"{path} has rows of another kind (mode): give this one another directory")


def _value(text: str, kind: Any) -> Any:
    """A cell's text as its column's type; empty is None where that may be."""
    optional = type(None) in get_args(kind)
    if optional and text == "":
        return None
    plain = next((k for k in get_args(kind) if k is not type(None)), kind) if optional else kind
    return plain(text)


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of a value over repeats, with its extremes."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None where there are no values."""
        return cls(median(values), min(values), max(values)) if values else None


def spread(rows: Iterable[Row], column: str) -> Spread | None:
    """Of a column of the rows that count."""
    values = [getattr(row, column) for row in rows if not row.error]
    return Spread.of([value for value in values if value is not None])


def ratio(over: Iterable[Row], under: Iterable[Row]) -> Spread | None:
    """Step times of ``over`` divided by those of ``under``, repeat by repeat."""
    divisors = {row.repeat: row.step_ms for row in under if not row.error and row.step_ms}
    return Spread.of(
        [
            row.step_ms / divisors[row.repeat]
            for row in over
            if not row.error and row.step_ms and row.repeat in divisors
        ]
    )


Losses = Mapping[str, Sequence[float]]
"""Task → loss of each step."""


def largest_difference(losses: Losses, reference: Losses, steps: int) -> float:
    """Between two jobs' losses over the first steps, relative where a loss is above 1.

    Infinite where a task or a step is missing, or a loss is not a number.
    """
    if losses.keys() != reference.keys() or not losses:
        return float("inf")
    worst = 0.0
    for task, expected in reference.items():
        if min(len(expected), len(losses[task])) < steps:
            return float("inf")
        for a, b in zip(losses[task][:steps], expected[:steps], strict=True):
            difference = abs(a - b) / max(1.0, abs(b))
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst
