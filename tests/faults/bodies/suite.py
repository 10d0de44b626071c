"""What faults in the benchmark suite put in place of functions."""

import os
from typing import Any

from tests.faults.bodies import Function


def leaves_out_the_number_of_ranks(original: Function) -> Function:
    """The shard's gradient as it is: the mean over ranks divides it once too often."""

    def faulty(gradient: Any, start: int, rows: int, ranks: int) -> Any:
        return gradient[start : start + rows]

    return faulty


def contrasts_own_rows(original: Function) -> Function:
    """Nothing is gathered: each process's rows are contrasted with themselves."""

    def faulty(self: Any, samples: Any, texts: Any, labels: Any) -> Any:
        return samples, texts, labels

    return faulty


def gives_own_environment(original: Function) -> Function:
    """A job starts with all variables of this process."""

    def faulty() -> dict[str, str]:
        return dict(os.environ)

    return faulty


def slows_the_third_and_fourth_island(original: Function) -> Function:
    """What is the second half of four islands, whatever their number."""

    def faulty(name: str, cluster: Any, link: Any) -> Any:
        return tuple((island, link) for island in (2, 3) if island <= cluster.island(cluster.devices - 1))

    return faulty


def gives_every_device_a_core(original: Function) -> Function:
    """Devices take what the slowest of them takes alone."""

    def faulty(self: Any, alone_s: Any) -> Any:
        return max(alone_s)

    return faulty


def sums_in_the_first_group_alone(original: Function) -> Function:
    """The other islands' links do not matter."""

    def faulty(self: Any, size_bytes: float) -> Any:
        self.tensor_groups, groups = self.tensor_groups[:1], self.tensor_groups
        try:
            return original(self, size_bytes)
        finally:
            self.tensor_groups = groups

    return faulty


def keeps_each_job_alone(original: Function) -> Function:
    """A job that ended well counts, whatever became of its repeat."""

    def faulty(launches: Any, results: Any) -> Any:
        return {job: row for launch in launches for job, row in original([launch], results).items()}

    return faulty


def lets_failures_out(original: Function) -> Function:
    """A figure that fails ends those after it."""

    def faulty(name: str, suite: Any, directory: Any) -> Any:
        made = original(name, suite, directory)
        if made.error:
            raise RuntimeError(made.error)
        return made

    return faulty


def names_the_planner_alone(original: Function) -> Function:
    """Neither seed nor time limit tell a job from another."""

    def faulty(self: Any, cell: Any, mode: str = "simulated") -> Any:
        return cell.row("spindle", self.planner, mode=mode)

    return faulty


def lets_defects_out(original: Function) -> Function:
    """Refusals alone are a row."""

    def faulty(row: Any, job: Any, failures: Any) -> Any:
        return original(row, job)

    return faulty


def takes_the_system_s_planner(original: Function) -> Function:
    """The configuration's planner counts for nothing."""

    def faulty(job: Any, config: Any) -> str:
        return job.planner

    return faulty
