"""Compare systems: ``python benchmark.py``, options in ``conf/benchmark.yaml`` and its groups.

Mode ``measured`` prints the step time of one process under Spindle over that of plain Lightning, and on
several processes that of Lightning's DDPStrategy over Spindle's, with the same global batches and losses.
Mode ``simulated`` plans a full workload for a cluster that nobody has at hand and simulates an iteration of
the program that would run there, beside DeepSpeed and Megatron-LM.
Mode ``emulated`` holds such a simulation against the real engine, which runs the same program on virtual
devices; it fails where their iterations differ by more than 2 %.
Mode ``figures`` makes the paper's figures of such simulations (``figures=[scaling,end_to_end]``, by default
all; ``conf/mode/figures.yaml`` has their cases).

``results.csv`` in the run's directory, or the sweep's, has a row for every job; ``report.md`` there tells
what they found, with a figure at the end of a simulated sweep. Where the directory (``hydra.sweep.dir=…``,
``hydra.run.dir=…``) has rows of an earlier time, only what is missing or failed is done; measured jobs by
whole repeats, for ratios compare launches that ran beside one another. The exit code is 1 if a job failed.
"""

import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from benchmarking import setups
from benchmarking.cells import cell_of
from benchmarking.emulated import emulate_spindle
from benchmarking.figures.making import make_figures
from benchmarking.measured import REPORT, RESULTS, measure, unmeasured
from benchmarking.report import report
from benchmarking.report_simulated import report_simulated
from benchmarking.results import Row, append, read_rows
from benchmarking.rows import SimulatedRow
from benchmarking.simulated import (
    Cell,
    Planning,
    Result,
    attempted,
    reason,
    refused,
    simulate_baseline,
    simulate_spindle,
)
from benchmarking.sweep import Progress, jobs_of

_failures: list[str] = []
"""Of all runs of a sweep, which an exception would end."""


@cache
def _progress() -> Progress:
    """Of the whole command."""
    return Progress(jobs_of(sys.argv[1:]))


def measured(config: dict[str, Any], directory: Path, results: Path) -> bool:
    """Measure and print; whether every job ended well."""
    measurement = measure(config, directory, results, lambda line: print(line, flush=True))
    text = report(measurement, config["overhead_target"])
    (directory / REPORT).write_text(f"{text}\n")
    print(f"\n{text}\n\nRows: {results}", flush=True)
    _end(f"{config['workload']['name']}, {len(measurement.rows)} jobs")
    return not measurement.failed


Job = tuple[SimulatedRow, Callable[[], Result]]
"""What the row is if the job refuses, and the job."""


def simulated(config: dict[str, Any], directory: Path, results: Path) -> bool:
    """Plan, simulate and print; whether every job ended well."""
    planning = _planning(config)

    def jobs(cell: Cell) -> Iterable[Job]:
        yield planning.row(cell), partial(simulate_spindle, cell, planning)
        for system in config["baselines"]:
            yield cell.row(system), partial(simulate_baseline, cell, system)

    return _do(jobs, config, directory, results)


def emulated(config: dict[str, Any], directory: Path, results: Path) -> bool:
    """Plan, simulate, emulate and print; whether every job ended well."""
    torch.set_num_threads(1)  # of each of the ranks, which are threads themselves
    planning = _planning(config)

    def jobs(cell: Cell) -> Iterable[Job]:
        yield planning.row(cell, "emulated"), partial(emulate_spindle, cell, planning)

    return _do(jobs, config, directory, results)


def _planning(config: dict[str, Any]) -> Planning:
    return Planning(config["planner"]["name"], config["planner"]["time_limit_s"], config["seed"])


def _do(
    jobs_on: Callable[[Cell], Iterable[Job]], config: dict[str, Any], directory: Path, results: Path
) -> bool:
    """Those jobs on the configuration's cell that have no row yet."""
    if _progress().jobs == 1:
        wanted, on = config["workload"]["name"], config["cluster"]
        print(f"{wanted} on {on['devices']} devices of {on['name']}: capturing, planning …", flush=True)
    cell = cell_of(config)
    setups.keep(results, config["workload"], config["cluster"])
    known = {row.key: row for row in read_rows(results, SimulatedRow) if not row.error}
    rows: list[SimulatedRow] = []
    earlier = True
    for blank, job in jobs_on(cell):
        row = known.get(blank.key)
        if row is None:
            row = attempted(blank, job, Exception).row
            append(results, row)
            earlier = False
        rows.append(row)
    text = report_simulated(rows)
    (directory / REPORT).write_text(f"{text}\n")
    if _progress().jobs == 1:
        print(f"\n{text}\n\nRows: {results}", flush=True)
    what = f"{cell.workload}, {cell.tasks} tasks, {rows[0].devices} devices, {config['planner']['name']}"
    _end(f"{what}, of an earlier run" if earlier else what)
    return not any(row.error for row in rows)


def _end(what: str) -> None:
    """Of one of a sweep's jobs."""
    if _progress().jobs > 1:
        print(_progress().line(what), flush=True)


def figures(config: dict[str, Any], directory: Path, results: Path) -> bool:
    """Make the paper's figures; whether each could be made."""
    good = make_figures(config, Path(config["into"] or directory), lambda line: print(line, flush=True))
    _end("figures")
    return good


MODES = {"measured": measured, "simulated": simulated, "emulated": emulated, "figures": figures}


def attempt(config: dict[str, Any], directory: Path, results: Path) -> bool:
    """What the mode does; a configuration that it refuses leaves a row, so that a sweep goes on."""
    mode = config["mode"]["name"]
    try:
        return MODES[mode](config, directory, results)
    except Exception as failure:
        if mode == "figures":
            error = reason(failure)
        else:
            row = unmeasured(config, failure) if mode == "measured" else refused(config, failure)
            error = row.error
            _add(results, row)
    (directory / REPORT).write_text(f"FAILED: {error}\n")
    print(_progress().line(f"FAILED: {error}"), flush=True)
    return False


def _add(results: Path, row: SimulatedRow | Row) -> None:
    """The row of a job that failed, unless it failed because the table is of another kind."""
    try:
        append(results, row)
    except ValueError as other:
        print(f"No row: {other}", flush=True)


@hydra.main(config_path="conf", config_name="benchmark", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Compose and run; a sweep's runs add their rows to one file."""
    config: Any = OmegaConf.to_container(composed, resolve=True)
    about = HydraConfig.get()
    directory = Path(about.runtime.output_dir).absolute()
    shared = Path(about.sweep.dir).absolute() if about.mode == RunMode.MULTIRUN else directory
    if not attempt(config, directory, shared / RESULTS):
        _failures.append(str(directory))


if __name__ == "__main__":
    main()
    sys.exit(f"Jobs failed: see {', '.join(_failures)}" if _failures else 0)
