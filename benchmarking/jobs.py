"""Which jobs a measured benchmark consists of."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """One process launch: a system trains on some processes.

    ``system`` is a key of the configuration's ``system``, or ``"<key>:<planner>"``.
    """

    system: str
    processes: int
    repeat: int

    @property
    def kind(self) -> str:
        """The system without its planner."""
        return self.system.partition(":")[0]

    @property
    def planner(self) -> str:
        """The planner that was asked for; empty: the system's own choice."""
        return self.system.partition(":")[2]

    @property
    def folder(self) -> str:
        """A name for the job's files."""
        return f"{self.repeat}-{self.system.replace(':', '-')}-{self.processes}"

    def __str__(self) -> str:
        plural = "es" if self.processes != 1 else ""
        return f"{self.system} on {self.processes} process{plural}, repeat {self.repeat}"


@dataclass(frozen=True, slots=True)
class Launch:
    """A job with what its processes are told, and the folder of its files."""

    job: Job
    told: dict[str, Any]
    folder: Path

    def place(self, results: Path) -> str:
        """The folder as a row names it."""
        return os.path.relpath(self.folder, results.parent)


def jobs_of(
    systems: Sequence[str], processes: Sequence[int], repeats: int, known: Mapping[str, Mapping[str, Any]]
) -> tuple[Job, ...]:
    """Every system on every number of processes that it can run on, in turns: a repeat has each once.

    Raises:
        ValueError: for a system that is not known, a planner for one that plans nothing, or nothing to do.
    """
    for system in systems:
        kind, _, planner = system.partition(":")
        if kind not in known:
            raise ValueError(f"there is no system {system!r}; there are {', '.join(known)}: say systems=[…]")
        if planner and not known[kind].get("plans"):
            raise ValueError(f"system {system!r}: {kind} has no planner")
    jobs = tuple(
        job
        for repeat in range(repeats)
        for count in processes
        for job in (Job(system, count, repeat) for system in systems)
        if _runs_on(known[job.kind], count)
    )
    if not jobs:
        raise ValueError(f"no system of {list(systems)} runs on any of {list(processes)} processes")
    return jobs


def _runs_on(system: Mapping[str, Any], processes: int) -> bool:
    most = system.get("most_processes")
    return system.get("fewest_processes", 1) <= processes and (most is None or processes <= most)
