"""A job in a process of its own: nothing of one job, launch variables above all, is left for the next."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMMAND = (sys.executable, "-m", "benchmarking.job")
JOB, RESULT, LOG = "job.json", "result.json", "log.txt"

# What Lightning's launcher and torchrun leave behind; with these set a job would join a world or be one rank.
_LAUNCH_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|NODE_RANK|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|PL_.*"
)
_RAISED = re.compile(
    r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*)$", re.MULTILINE
)


class JobFailed(Exception):
    """A job ended without a result; the message says how, in a line."""


def run_job(
    job: dict[str, Any], folder: Path, timeout_s: float, command: Sequence[str] = COMMAND
) -> dict[str, Any]:
    """Run ``command`` on ``folder``, which has the job in ``job.json`` and gets ``result.json``.

    What the job and its ranks print goes to ``log.txt`` there. What an earlier job left there is removed.

    Returns:
        The job's result (see ``benchmarking.job``).

    Raises:
        JobFailed: it raised, was killed, or was not done in time. Nothing of it is left running.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / JOB).write_text(json.dumps(job, indent=1))
    with (folder / LOG).open("w") as log:
        process = subprocess.Popen(
            [*command, str(folder.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise JobFailed(f"not done after {timeout_s:g} s") from None
        finally:
            _kill_group(process)
    if code != 0 or not (folder / RESULT).exists():
        raise JobFailed(_reason(code, (folder / LOG).read_text()))
    return json.loads((folder / RESULT).read_text())


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _LAUNCH_VARIABLES.fullmatch(name)}
    return {**kept, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """The job's ranks are in its process group and end with it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _reason(code: int, log: str) -> str:
    """The first exception of the log: others are often its consequences."""
    raised = _RAISED.search(log)
    if raised:
        return raised.group(1)[:500]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    last = [line for line in log.splitlines() if line.strip()][-1:]
    return ": ".join([how, *last])[:500]
