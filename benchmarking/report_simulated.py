"""What simulated and emulated jobs found, as text that can stand in a README (Markdown)."""

from collections.abc import Sequence

from benchmarking.rows import SimulatedRow
from benchmarking.tables import table


def report_simulated(rows: Sequence[SimulatedRow]) -> str:
    """A table for each mode, workload and cluster, its jobs that failed below."""
    parts = []
    for cell in dict.fromkeys(row.cell for row in rows):
        own = [row for row in rows if row.cell == cell]
        parts.append(_cell(own))
    return "\n\n".join(parts)


def speedup(row: SimulatedRow, rows: Sequence[SimulatedRow]) -> float | None:
    """DeepSpeed's iteration on the same cell over the row's."""
    for other in rows:
        if other.system == "deepspeed" and other.cell == row.cell and other.simulated_ms:
            return other.simulated_ms / row.simulated_ms if row.simulated_ms else None
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
        f"{first.mode.capitalize()} {first.date[:10]}: {first.workload}, {first.tasks} tasks{size} "
        f"on {first.devices} devices of {first.cluster}{f' ({first.kind})' if first.kind else ''}"
    )
    swept = {"limit s": [row.time_limit_s for row in rows], "seed": [row.seed for row in rows]}
    told = [name for name, values in swept.items() if len(set(values) - {None}) > 1]
    lines = [
        {
            "system": name_of(row),
            **{name: _number(swept[name][k], "g") for name in told},
            **(_emulated(row) if row.mode == "emulated" else _simulated(row, rows)),
        }
        for k, row in enumerate(rows)
        if not row.error
    ]
    found = [table(list(lines[0]), [list(line.values()) for line in lines])] if lines else []
    failed = [f"FAILED {name_of(row)}: {row.error}" for row in rows if row.error]
    return "\n\n".join([title, *found, *failed])


def _simulated(row: SimulatedRow, rows: Sequence[SimulatedRow]) -> dict[str, str]:
    """Columns of a table."""
    return {
        "iteration ms": _number(row.simulated_ms, ".1f"),
        "over DeepSpeed": _number(speedup(row, rows), ".2f"),
        "C* ms": _number(row.c_star_ms, ".1f"),
        "bound ms": _number(row.bound_ms, ".1f"),
        "busy": _number(row.utilisation, ".1%"),
        "transfers": _number(row.transfer_share, ".1%"),
        "sync": _number(row.sync_share, ".1%"),
        "peak GB": _number(None if row.memory_bytes is None else row.memory_bytes / 1e9, ".1f"),
        "planning s": _number(row.planning_s, ".2f"),
    }


def _emulated(row: SimulatedRow) -> dict[str, str]:
    """Columns of a table."""
    return {
        "simulated ms": _number(row.simulated_ms, ".2f"),
        "emulated ms": _number(row.emulated_ms, ".2f"),
        "difference": _number(row.difference, "+.3%"),
        "planning s": _number(row.planning_s, ".2f"),
        "emulating s": _number(row.emulating_s, ".1f"),
    }


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
