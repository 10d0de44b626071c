"""What simulated jobs found, as text that can stand in a README (Markdown)."""

from collections.abc import Sequence

from benchmarking.simulated import SimulatedRow
from benchmarking.tables import table

_HEAD = (
    "system",
    "iteration ms",
    "over DeepSpeed",
    "C* ms",
    "bound ms",
    "busy",
    "transfers",
    "sync",
    "peak GB",
    "planning s",
)


def report_simulated(rows: Sequence[SimulatedRow]) -> str:
    """A table for each workload and cluster, its jobs that failed below."""
    parts = []
    for cell in dict.fromkeys(row.key[:4] for row in rows):
        own = [row for row in rows if row.key[:4] == cell]
        parts.append(_cell(own))
    return "\n\n".join(parts)


def speedup(row: SimulatedRow, rows: Sequence[SimulatedRow]) -> float | None:
    """DeepSpeed's iteration on the same cell over the row's."""
    for other in rows:
        if other.system == "deepspeed" and other.key[:4] == row.key[:4] and other.iteration_ms:
            return other.iteration_ms / row.iteration_ms if row.iteration_ms else None
    return None


def name_of(row: SimulatedRow) -> str:
    """A system with its planner or setting."""
    if row.planner:
        return f"{row.system}:{row.planner}" + (f" ({row.setting})" if row.setting else "")
    return f"{row.system} ({row.setting})" if row.setting else row.system


def _cell(rows: Sequence[SimulatedRow]) -> str:
    first = rows[0]
    size = f" ({first.operators} operators, {first.metaops} MetaOps)" if first.operators else ""
    title = (
        f"Simulated {first.date[:10]}: {first.workload}, {first.tasks} tasks{size} "
        f"on {first.devices} devices of {first.cluster}"
    )
    lines = [
        (
            name_of(row),
            _number(row.iteration_ms, ".1f"),
            _number(speedup(row, rows), ".2f"),
            _number(row.c_star_ms, ".1f"),
            _number(row.bound_ms, ".1f"),
            _number(row.utilisation, ".1%"),
            _number(row.transfer_share, ".1%"),
            _number(row.sync_share, ".1%"),
            _number(None if row.memory_bytes is None else row.memory_bytes / 1e9, ".1f"),
            _number(row.planning_s, ".2f"),
        )
        for row in rows
        if not row.error
    ]
    failed = [f"FAILED {name_of(row)}: {row.error}" for row in rows if row.error]
    return "\n\n".join([title, *([table(_HEAD, lines)] if lines else []), *failed])


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
