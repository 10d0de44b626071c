"""What a measured benchmark found, as text that can stand in a README (Markdown)."""

from collections.abc import Sequence

from benchmarking.measured import Measurement
from benchmarking.results import Row, Spread, ratio, spread
from benchmarking.tables import table

_HEAD = ("system", "processes", "live ranks", "step ms", "predicted ms", "iteration ms", "planning s")


def report(measurement: Measurement, overhead_target: float) -> str:
    """Tables of step times and ratios, the losses' agreement, and the jobs that failed."""
    rows = measurement.rows
    parts = [_title(rows), _times(rows)]
    ratios = _ratios(rows, overhead_target)
    if ratios:
        parts.append(table(("ratio", "processes", "median (min to max)"), ratios))
    parts.append(_losses(measurement))
    failed = [
        f"FAILED {row.system}, {row.processes} processes, repeat {row.repeat}: {row.error}"
        for row in measurement.failed
    ]
    return "\n\n".join([*parts, *(["\n".join(failed)] if failed else [])])


def _title(rows: Sequence[Row]) -> str:
    row = next((row for row in rows if not row.error), rows[0])
    repeats = len({row.repeat for row in rows})
    size = f", {row.parameters / 1e6:.1f} M parameters" if row.parameters else ""
    return (
        f"Measured {row.date[:10]}: {row.workload}{size}; {row.cores} cores ({row.cpu}), torch {row.torch}, "
        f"one thread a process; {repeats} repeats of {row.steps} steps after {row.warmup} untimed; "
        "median (min to max)"
    )


def _kinds(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Systems and processes, as they first come."""
    return list(dict.fromkeys((row.system, row.processes) for row in rows))


def _of(rows: Sequence[Row], system: str, processes: int) -> list[Row]:
    return [row for row in rows if (row.system, row.processes) == (system, processes)]


def _times(rows: Sequence[Row]) -> str:
    lines = []
    for system, processes in _kinds(rows):
        own = _of(rows, system, processes)
        ranks = sorted({row.live_ranks for row in own if row.live_ranks is not None})
        columns = [spread(own, name) for name in ("step_ms", "predicted_ms", "iteration_ms", "planning_s")]
        live = ", ".join(map(str, ranks))
        lines.append((system, str(processes), live, *(_shown(column, 1) for column in columns)))
    return table(_HEAD, lines)


def _ratios(rows: Sequence[Row], overhead_target: float) -> list[tuple[str, str, str]]:
    """Others over plain Lightning on one process, DDP over others on several."""
    found = []
    for system, processes in _kinds(rows):
        if processes == 1 and system != "plain":
            name = f"{system} over plain (target: at most {overhead_target:g})"
            value = ratio(_of(rows, system, 1), _of(rows, "plain", 1))
        elif processes > 1 and system != "ddp":
            name = f"ddp over {system}"
            value = ratio(_of(rows, "ddp", processes), _of(rows, system, processes))
        else:
            continue
        if value is not None:
            found.append((name, str(processes), _shown(value, 3)))
    return found


def _losses(measurement: Measurement) -> str:
    sameness = measurement.sameness
    if sameness.reference is None:
        return "No job ended well: no losses to compare."
    if len(_kinds(measurement.rows)) == 1:
        return "One system only: its losses were compared with no other's."
    unequal = sum(row.error.startswith("losses differ") for row in measurement.rows)
    verdict = "differ, see below" if unequal else "agree"
    return (
        f"Losses of the first {sameness.steps} steps {verdict}: within {sameness.tolerance:g} of those of "
        f"{sameness.reference[0]}, the largest accepted difference is {sameness.largest:.1g}."
    )


def _shown(value: Spread | None, digits: int) -> str:
    if value is None:
        return ""
    if value.low == value.high:
        return f"{value.middle:.{digits}f}"
    return f"{value.middle:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})"
