"""Compare systems: ``python benchmark.py``, options in ``conf/benchmark.yaml`` and its groups.

Mode ``measured`` prints the step time of one process under Spindle over that of plain Lightning, and on
several processes that of Lightning's DDPStrategy over Spindle's, with the same global batches and losses.
``results.csv`` in the run's directory has a row for every job. The exit code is 1 if a job failed.
"""

import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from benchmarking.measured import RESULTS, measure
from benchmarking.report import report

REPORT = "report.md"
_failures: list[str] = []
"""Of all runs of a sweep, which an exception would end."""


def measured(config: dict[str, Any], directory: Path, results: Path) -> bool:
    """Measure and print; whether every job ended well."""
    measurement = measure(config, directory, results, lambda line: print(line, flush=True))
    text = report(measurement, config["overhead_target"])
    (directory / REPORT).write_text(f"{text}\n")
    print(f"\n{text}\n\nRows: {results}", flush=True)
    return not measurement.failed


MODES = {"measured": measured}


@hydra.main(config_path="conf", config_name="benchmark", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Compose and run; a sweep's runs add their rows to one file."""
    config: Any = OmegaConf.to_container(composed, resolve=True)
    about = HydraConfig.get()
    directory = Path(about.runtime.output_dir).absolute()
    shared = Path(about.sweep.dir).absolute() if about.mode == RunMode.MULTIRUN else directory
    if not MODES[config["mode"]["name"]](config, directory, shared / RESULTS):
        _failures.append(str(directory))


if __name__ == "__main__":
    main()
    sys.exit(f"Jobs failed: see {', '.join(_failures)}" if _failures else 0)
