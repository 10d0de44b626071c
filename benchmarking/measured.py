"""The measured mode: jobs in turns, a row for each, whatever becomes of it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarking import hardware
from benchmarking.earlier import kept
from benchmarking.jobs import Job, Launch, jobs_of
from benchmarking.launch import RESULT, JobFailed, run_job
from benchmarking.results import Losses, Row, append, largest_difference, whole
from lightning_spindle.planner.choice import TIME_LIMIT_S
from tasks.workloads import SMALL, task_names, workload_size

RESULTS, REPORT = "results.csv", "report.md"


@dataclass(slots=True)
class Sameness:
    """Holds every job's losses against those of the first that ended well.

    Args:
        steps: how many of the first steps are compared.
        tolerance: the largest difference allowed.
    """

    steps: int
    tolerance: float
    reference: tuple[Job, Losses] | None = None
    largest: float = 0.0
    """The largest difference within the tolerance so far."""

    def check(self, job: Job, losses: Losses) -> str:
        """What is wrong with a job's losses; empty if nothing is."""
        if self.reference is None:
            self.reference = (job, losses)
        difference = largest_difference(losses, self.reference[1], self.steps)
        if difference <= self.tolerance:
            self.largest = max(self.largest, difference)
            return ""
        return (
            f"losses differ from those of {self.reference[0]} by {difference:.2g} in the first {self.steps} "
            f"steps; {self.tolerance:g} is allowed"
        )


@dataclass(slots=True)
class Measurement:
    """What a benchmark found: rows in the order of the jobs, and how equal the losses were."""

    sameness: Sameness
    rows: list[Row] = field(default_factory=list)

    @property
    def failed(self) -> list[Row]:
        """Rows of jobs that do not count."""
        return [row for row in self.rows if row.error]


def measure(
    config: dict[str, Any], directory: Path, results: Path, say: Callable[[str], None]
) -> Measurement:
    """Run all jobs of a composed ``conf/benchmark.yaml`` but those that an earlier run has done.

    Args:
        config: as plain containers.
        directory: for the jobs' files, one folder each; those of an earlier run are there.
        results: the CSV file that rows are added to, each when its job has ended.
        say: is told of each job, in a line.

    Raises:
        ValueError: the configuration asks for what cannot be run, or the earlier run's jobs were others.
    """
    require_steps(config)
    require_tasks(config)
    require_time_limit(config)
    jobs = jobs_of(config["systems"], config["processes"], config["repeats"], config["system"])
    launches = [Launch(job, job_config(job, config), directory / "jobs" / job.folder) for job in jobs]
    earlier = kept(launches, results)
    measurement = Measurement(Sameness(**config["same_losses"]))
    started, done = datetime.now(), 0
    for number, launch in enumerate(launches, 1):
        before = earlier.get(launch.job)
        row = _measure(launch, config, results, measurement.sameness, before)
        if row != before:
            append(results, row)
        measurement.rows.append(row)
        when = "of an earlier run"
        if before is None:
            done += 1
            left_s = (datetime.now() - started).total_seconds() / done * (len(jobs) - len(earlier) - done)
            when = f"{left_s:.0f} s left"
        outcome = f"FAILED: {row.error}" if row.error else f"{row.step_ms:.1f} ms a step"
        say(f"[{number}/{len(jobs)}] {launch.job}: {outcome} ({when})")
    return measurement


def require_steps(config: dict[str, Any]) -> None:
    """Raises ValueError unless there are steps to time and steps to compare."""
    compared, total = config["same_losses"]["steps"], config["steps"] + config["warmup"]
    if config["steps"] < 1 or config["warmup"] < 0 or config["repeats"] < 1:
        raise ValueError("steps and repeats are at least 1, warmup at least 0")
    if not 1 <= compared <= total:
        raise ValueError(f"same_losses.steps={compared}: a job has {total} steps (steps + warmup)")


def require_tasks(config: dict[str, Any]) -> None:
    """Raises ValueError unless the workload has that size and so many tasks."""
    workload, own = config["workload"], config.get("tasks")
    if own:
        if workload["size"] is not None:
            raise ValueError(
                f"workload.size={workload['size']}: {workload['name']} has no sizes (model=… is one)"
            )
        known = list(own)
    else:
        size = workload["size"] or SMALL
        if size not in workload["sizes"]:
            raise ValueError(f"workload.size={size}: {workload['name']} has {', '.join(workload['sizes'])}")
        known = list(task_names(workload_size(workload["name"], workload["sizes"][size])))
    count = workload["tasks"]
    if count is not None and not (isinstance(count, int) and 1 <= count <= len(known)):
        raise ValueError(f"workload.tasks={count}: there are 1 to {len(known)}")


def require_time_limit(config: dict[str, Any]) -> None:
    """Raises ValueError for a limit of planning that the strategy does not have."""
    limit_s = config["planner"]["time_limit_s"]
    if limit_s != TIME_LIMIT_S:
        raise ValueError(
            f"planner.time_limit_s={limit_s}: SpindleStrategy, and so mode=measured, has no other limit than "
            f"{TIME_LIMIT_S:g} s"
        )


def unmeasured(config: dict[str, Any], failure: Exception) -> Row:
    """The row of a benchmark that cannot be begun."""
    nothing = Job(",".join(map(str, config["systems"])), 0, 0)
    readable = {key: whole(config[key]) for key in ("seed", "steps", "warmup")}
    readable["workload"] = {**config["workload"], "tasks": whole(config["workload"]["tasks"])}
    return _row(nothing, {**config, **readable}, {}, f"{type(failure).__name__}: {failure}", "", _now())


def _measure(
    launch: Launch, config: dict[str, Any], results: Path, sameness: Sameness, before: Row | None
) -> Row:
    """Run one job, unless it was ``before``; its row says what went wrong, if anything did."""
    job, date = launch.job, _now()
    found: dict[str, Any] = {}
    try:
        if before is None:
            found = run_job(launch.told, launch.folder, config["timeout_s"])
        else:
            found, date = json.loads((launch.folder / RESULT).read_text()), before.date
        error = _problem(job, found, sameness)
    except JobFailed as failure:
        error = str(failure)
    return _row(job, config, found, error, launch.place(results), date)


def _row(job: Job, config: dict[str, Any], found: dict[str, Any], error: str, folder: str, date: str) -> Row:
    """What a job ``found``, or why it counts for nothing."""
    times = {} if error else found  # that of other work than was asked for is no number to keep
    return Row(
        date=date,
        workload=config["workload"]["name"],
        mode=config["mode"]["name"],
        tasks=config["workload"]["tasks"],
        size=config["workload"]["size"] or "",
        seed=config["seed"],
        system=job.system,
        planner=planner_of(job, config),
        planned_by=found.get("planned_by", ""),
        processes=job.processes,
        repeat=job.repeat,
        live_ranks=found.get("live_ranks"),
        step_ms=times.get("step_ms"),
        step_ms_fastest=times.get("step_ms_fastest"),
        step_ms_slowest=times.get("step_ms_slowest"),
        predicted_ms=found.get("predicted_ms"),
        iteration_ms=found.get("iteration_ms"),
        planning_s=found.get("planning_s"),
        steps=config["steps"],
        warmup=config["warmup"],
        parameters=found.get("parameters"),
        threads=found.get("threads"),
        cores=hardware.cores(),
        cpu=hardware.cpu_name(),
        torch=hardware.torch_version(),
        error=error,
        folder=folder,
    )


def _now() -> str:
    return datetime.now().isoformat(timespec="seconds")


def planner_of(job: Job, config: dict[str, Any]) -> str:
    """The job's own, or the configuration's; empty for a system that plans nothing."""
    plans = config["system"].get(job.kind, {}).get("plans")
    return (job.planner or config["planner"]["name"]) if plans else ""


def _problem(job: Job, found: dict[str, Any], sameness: Sameness) -> str:
    if found["live_ranks"] != job.processes:
        return f"{found['live_ranks']} ranks answered, not {job.processes}"
    return sameness.check(job, found["losses"])


def job_config(job: Job, config: dict[str, Any]) -> dict[str, Any]:
    """All that a job's processes need to know; workloads with sizes have neither ``tasks`` nor ``model``."""
    system, tasks = config["system"][job.kind], config.get("tasks") or {}
    shared = {"shard_optimizer_state": config["shard_optimizer_state"]} if system["plans"] else {}
    return {
        "strategy": system["strategy"],
        "options": {**shared, **system["options"]},
        "plans": system["plans"],
        "planner": planner_of(job, config),
        "processes": job.processes,
        "tasks": dict(islice(tasks.items(), config["workload"]["tasks"])),
        "model": config.get("model"),
        **{key: config[key] for key in ("workload", "optimization", "trainer", "seed", "steps", "warmup")},
    }
