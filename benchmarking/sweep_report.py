"""What a sweep leaves at its end: one report of all its jobs, and a figure of those that were simulated."""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from benchmarking.figures.speedups import speedup_figure
from benchmarking.figures.style import save
from benchmarking.measured import REPORT, RESULTS
from benchmarking.report_simulated import report_simulated
from benchmarking.results import has_rows, read_rows
from benchmarking.rows import SimulatedRow
from benchmarking.sweep import latest

FIGURE = "speedup.png"
_log = logging.getLogger(__name__)


class SweepReport(Callback):
    """Hydra's callback (``hydra.callbacks`` of ``conf/benchmark.yaml``)."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Of everything that lies in the sweep's directory, also from a time before."""
        directory = Path(config.hydra.sweep.dir).absolute()
        if has_rows(directory / RESULTS, SimulatedRow):
            report_sweep(directory)
        else:  # measured, or figures
            reports = sorted(directory.glob(f"*/{REPORT}"), key=lambda path: (len(path.parent.name), path))
            text = "\n\n".join(path.read_text().strip() for path in reports)
            (directory / REPORT).write_text(f"{text}\n")
        _log.info("Report: %s", directory / REPORT)


def report_sweep(directory: Path) -> None:
    """Tables of simulated and emulated jobs, of each its latest row.

    Simulated ones have a figure if matplotlib is there.
    """
    rows = latest(read_rows(directory / RESULTS, SimulatedRow))
    parts = [report_simulated(rows)]
    if simulated := [row for row in rows if row.mode == "simulated"]:
        parts.insert(0, _drawn(simulated, directory))
    (directory / REPORT).write_text("\n\n".join(parts) + "\n")


def _drawn(rows: Sequence[SimulatedRow], directory: Path) -> str:
    """The figure's link, or why there is none."""
    bars = Counter((row.workload, row.tasks, row.cluster, row.devices, row.name) for row in rows)
    if max(bars.values()) > 1:
        return "No figure: jobs differ in more than workload, tasks, cluster, devices and system."
    try:
        save(speedup_figure(rows), directory / FIGURE)
    except ModuleNotFoundError as missing:
        return f"No figure: {missing}"
    return f"![Speedup over DeepSpeed]({FIGURE})"
