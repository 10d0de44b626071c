"""What an earlier run of a measured benchmark left in its directory, and what of it still counts."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarking import hardware
from benchmarking.jobs import Job
from benchmarking.launch import JOB, RESULT
from benchmarking.results import Row, read_rows


@dataclass(frozen=True, slots=True)
class Launch:
    """A job with what its processes are told, and the folder of its files."""

    job: Job
    told: dict[str, Any]
    folder: Path

    def place(self, results: Path) -> str:
        """The folder as a row names it."""
        return os.path.relpath(self.folder, results.parent)


def kept(launches: Iterable[Launch], results: Path) -> dict[Job, Row]:
    """Rows of an earlier time that still count: of repeats in which every job ended well on this machine.

    Ratios compare launches that ran beside one another: other repeats are done again as a whole.

    Raises:
        ValueError: there are files of a job that was told something else.
    """
    rows = {row.folder: row for row in read_rows(results, Row)}
    here = (hardware.cores(), hardware.cpu_name(), hardware.torch_version())
    found: dict[Job, Row] = {}
    cut: set[int] = set()
    for launch in launches:
        row = rows.get(launch.place(results))
        if not _ran(launch) or row is None or row.error or (row.cores, row.cpu, row.torch) != here:
            cut.add(launch.job.repeat)
        else:
            found[launch.job] = row
    return {job: row for job, row in found.items() if job.repeat not in cut}


def _ran(launch: Launch) -> bool:
    """Whether the job's result is there."""
    if (launch.folder / JOB).exists():
        told, now = json.loads((launch.folder / JOB).read_text()), json.loads(json.dumps(launch.told))
        if told != now:
            differing = sorted(key for key in told.keys() | now.keys() if told.get(key) != now.get(key))
            raise ValueError(
                f"{launch.folder} has a job of other settings ({', '.join(differing)}): give this benchmark "
                f"another directory (hydra.run.dir=…, in a sweep hydra.sweep.dir=…)"
            )
    return (launch.folder / RESULT).exists()
