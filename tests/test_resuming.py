"""A measured benchmark that was cut short goes on in its directory."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import benchmark
from benchmarking import measured
from benchmarking.launch import JobFailed, run_job
from benchmarking.results import Row, append, read_rows
from tests.support.workloads import composed

FOUR_JOBS = ("systems=[plain,spindle,ddp]", "processes=[1,2]", "steps=2", "warmup=1", "same_losses.steps=3")
NAMES = ["plain-1", "spindle-1", "spindle-2", "ddp-2"]
CODE = """
import json, sys
job = json.load(open(sys.argv[1] + "/job.json"))
losses = {"a": [2.0, 1.5, 1.0 + 2e-6 * (job["strategy"] == "ddp")]}
found = {"live_ranks": job["processes"], "step_ms": 100.0, "losses": losses}
json.dump(found, open(sys.argv[1] + "/result.json", "w"))
"""


class Launched:
    """Runs jobs in processes of their own, small ones; ``before`` may stop one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folders: list[str] = []
        self.before: Callable[[str], None] = lambda folder: None

    def run(self, job: dict[str, Any], folder: Path, timeout_s: float) -> dict[str, Any]:
        self.before(folder.name)
        self.folders.append(folder.name)
        return run_job(job, folder, timeout_s, (sys.executable, "-c", CODE))

    def benchmark(self, *overrides: str) -> bool:
        self.folders.clear()
        config = composed(*FOUR_JOBS, "repeats=3", *overrides)
        return benchmark.measured(config, self.directory, self.directory / "results.csv")

    def rows(self) -> list[Row]:
        return read_rows(self.directory / "results.csv", Row)


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    launched = Launched(tmp_path)
    monkeypatch.setattr(measured, "run_job", launched.run)
    return launched


def repeats(*numbers: int) -> list[str]:
    return [f"{number}-{name}" for number in numbers for name in NAMES]


def test_a_repeat_that_was_cut_short_is_measured_again(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(folder: str) -> None:
        if folder == "1-spindle-2":
            raise KeyboardInterrupt

    launched.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        launched.benchmark()
    first = launched.rows()
    assert [row.folder for row in first] == [f"jobs/{name}" for name in repeats(0, 1)[:6]]

    launched.before = lambda folder: None
    capsys.readouterr()
    assert launched.benchmark()
    assert launched.folders == repeats(1, 2)
    assert launched.rows()[: len(first)] == first, "nothing that was measured is lost"
    assert [row.folder for row in launched.rows()[len(first) :]] == [f"jobs/{name}" for name in repeats(1, 2)]
    said = capsys.readouterr().out
    assert said.count("of an earlier run") == 4
    assert "[5/12] plain on 1 process, repeat 1: 100.0 ms a step" in said
    assert "3 repeats" in (launched.directory / "report.md").read_text()

    assert launched.benchmark()
    assert launched.folders == []


def test_a_repeat_with_a_failed_job_is_measured_again(launched: Launched) -> None:
    def fail(folder: str) -> None:
        if folder == "1-ddp-2":
            raise JobFailed("RuntimeError: no more ports")

    launched.before = fail
    assert not launched.benchmark()
    assert [row.error for row in launched.rows() if row.error] == ["RuntimeError: no more ports"]
    launched.before = lambda folder: None
    assert launched.benchmark()
    assert launched.folders == repeats(1)


def test_more_repeats_are_added(launched: Launched) -> None:
    assert launched.benchmark("repeats=1")
    assert launched.benchmark("repeats=2")
    assert launched.folders == repeats(1)
    assert len(launched.rows()) == 8


def test_rows_of_another_machine_do_not_count(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched.benchmark("repeats=1")
    monkeypatch.setattr(measured.hardware, "cpu_name", lambda: "another")
    assert launched.benchmark("repeats=1")
    assert launched.folders == repeats(0)


def test_losses_of_an_earlier_run_are_compared_again(launched: Launched) -> None:
    assert launched.benchmark("repeats=1")
    assert not launched.benchmark("repeats=1", "same_losses.tolerance=1e-7")
    assert launched.folders == []
    assert "losses differ from those of plain" in launched.rows()[-1].error


def test_jobs_of_other_settings_are_an_error(launched: Launched) -> None:
    assert launched.benchmark("repeats=1")
    with pytest.raises(ValueError, match=r"0-plain-1 has a job of other settings \(seed, steps\): give this"):
        launched.benchmark("steps=3", "seed=5")
    assert launched.folders == []
    assert len(launched.rows()) == 4


def test_a_job_s_folder_has_nothing_of_an_earlier_job(tmp_path: Path) -> None:
    """A job that ends without a result has none, whatever there was."""
    told = {"processes": 1, "strategy": "ddp"}
    assert run_job(told, tmp_path / "job", 60, (sys.executable, "-c", CODE))["live_ranks"] == 1
    with pytest.raises(JobFailed, match="exit code 0"):
        run_job(told, tmp_path / "job", 60, (sys.executable, "-c", ""))


def test_rows_of_another_kind_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("date,workload\n2026-11-30,quickstart\n")
    with pytest.raises(ValueError, match="rows of another kind"):
        read_rows(tmp_path / "results.csv", Row)


def test_rows_are_read_as_they_were_written(launched: Launched) -> None:
    assert launched.benchmark("repeats=1")
    rows = launched.rows()
    for row in rows:
        append(launched.directory / "again.csv", row)
    assert read_rows(launched.directory / "again.csv", Row) == rows
    assert rows[0].live_ranks == 1
    assert rows[0].predicted_ms is None
