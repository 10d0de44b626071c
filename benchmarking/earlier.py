"""What an earlier run of a measured benchmark left in its directory, and what of it still counts."""

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarking import hardware
from benchmarking.jobs import Job, Launch
from benchmarking.launch import JOB, RESULT
from benchmarking.results import Row, read_rows


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
        _require_same(launch)
        row = rows.get(launch.place(results))
        if (
            not (launch.folder / RESULT).exists()
            or row is None
            or row.error
            or (row.cores, row.cpu, row.torch) != here
        ):
            cut.add(launch.job.repeat)
        else:
            found[launch.job] = row
    return {job: row for job, row in found.items() if job.repeat not in cut}


def _require_same(launch: Launch) -> None:
    """Raises ValueError where an earlier job was told something else than this one is."""
    if not (launch.folder / JOB).exists():
        return
    told, now = json.loads((launch.folder / JOB).read_text()), json.loads(json.dumps(launch.told))
    if told != now:
        differing = sorted(key for key in told.keys() | now.keys() if told.get(key) != now.get(key))
        raise ValueError(
            f"{launch.folder} has a job of other settings ({', '.join(differing)}): give this benchmark "
            f"another directory (hydra.run.dir=…, in a sweep hydra.sweep.dir=…)"
        )
