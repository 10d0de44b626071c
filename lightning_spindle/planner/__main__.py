"""Plans one cell from the command line.

python -m lightning_spindle.planner CELL.json --planner NAME --out PLAN.json [--time-limit S] [--seed N]
python -m lightning_spindle.planner --compare CELL.json [--time-limit S] [--seed N]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_spindle.planner import DEFAULT_TIME_LIMIT_S, PLANNERS, load_cell, plan


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_spindle.planner", description="Plans a cell.")
    parser.add_argument("cell", help="cell to plan (JSON)")
    parser.add_argument("--planner", default="spindle", choices=list(PLANNERS))
    parser.add_argument("--out", help="where the plan goes (JSON); without it the plan is printed as a table")
    parser.add_argument(
        "--gantt",
        action="store_true",
        help="print a Gantt chart too, the plan's figures, and where it lost time",
    )
    parser.add_argument("--compare", action="store_true", help="run all planners and print them side by side")
    parser.add_argument("--time-limit", type=float, default=DEFAULT_TIME_LIMIT_S, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 where the cell cannot be read or planned."""
    options = _parser().parse_args(arguments)
    try:
        problem = load_cell(options.cell)
        if options.compare:
            from lightning_spindle.planner.comparison import compare

            _write(compare(problem, time_limit_s=options.time_limit, seed=options.seed))
            return 0
        result = plan(problem, options.planner, time_limit_s=options.time_limit, seed=options.seed)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if options.out:
        Path(options.out).write_text(result.to_json() + "\n")
    else:
        _write(str(result))
    if options.gantt:
        from lightning_spindle.planner.comparison import describe
        from lightning_spindle.planner.report import gantt

        _write(gantt(result))
        _write(describe(result, problem))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
