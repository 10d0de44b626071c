"""What a sweep leaves at its end: one report of all its jobs, and a figure of those that were simulated."""

import logging
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from benchmarking.figures.speedups import speedup_figure
from benchmarking.figures.style import save
from benchmarking.measured import REPORT, RESULTS
from benchmarking.report_simulated import report_simulated
from benchmarking.results import read_rows
from benchmarking.simulated import SimulatedRow
from benchmarking.sweep import latest

FIGURE = "speedup.png"
_log = logging.getLogger(__name__)


class SweepReport(Callback):
    """Hydra's callback (``hydra.callbacks`` of ``conf/benchmark.yaml``)."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Of everything that lies in the sweep's directory, also from a time before."""
        directory = Path(config.hydra.sweep.dir).absolute()
        if config.mode.name == "measured":
            reports = sorted(directory.glob(f"*/{REPORT}"), key=lambda path: (len(path.parent.name), path))
            text = "\n\n".join(path.read_text().strip() for path in reports)
            (directory / REPORT).write_text(f"{text}\n")
        else:
            report_sweep(directory)
        _log.info("Report: %s", directory / REPORT)


def report_sweep(directory: Path) -> None:
    """Tables of simulated and emulated jobs, of each its latest row.

    Simulated ones have a figure if matplotlib is there.
    """
    rows = latest(read_rows(directory / RESULTS, SimulatedRow))
    parts = [report_simulated(rows)]
    if simulated := [row for row in rows if row.mode == "simulated"]:
        try:
            save(speedup_figure(simulated), directory / FIGURE)
            parts.insert(0, f"![Speedup over DeepSpeed]({FIGURE})")
        except ModuleNotFoundError as missing:
            parts.insert(0, f"No figure: {missing}")
    (directory / REPORT).write_text("\n\n".join(parts) + "\n")
