"""Runs a fault's tests and says whether each of them turned red."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.fault import Fault

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a fault's tests said; ``problem`` is empty if every one of them turned red."""

    fault: Fault
    problem: str
    seconds: float
    output: str


def judge(fault: Fault, root: Path = ROOT, timeout_s: float = TIMEOUT_S) -> Verdict:
    """Run the fault's tests with the fault in place."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        mark = Path(folder) / "reached"
        environment = {"SPINDLE_FAULT": fault.name, "SPINDLE_FAULT_REACHED": str(mark)}
        code, output = run_pytest(fault.tests, environment, root, timeout_s)
        reached = mark.exists()
    failed = [line.split()[1] for line in output.splitlines() if line.startswith("FAILED ")]
    green = [test for test in fault.tests if not any(_is_case(node, test) for node in failed)]
    if code is None:
        problem = f"still running after {timeout_s:g} s"
    elif code not in (0, 1):
        problem = f"pytest ended with {code}, not with a failed test"
    elif green:
        problem = f"not noticed by {', '.join(green)}" + ("" if reached else " (never called)")
    elif not reached:
        problem = "red, but the replacement was never called"
    else:
        problem = ""
    return Verdict(fault, problem, time.monotonic() - start, output)


def _is_case(node: str, test: str) -> bool:
    return node == test or node.startswith((f"{test}[", f"{test}::"))


def run_pytest(
    tests: Sequence[str], environment: dict[str, str], root: Path, timeout_s: float
) -> tuple[int | None, str]:
    """The exit code of pytest on these tests, None if it did not end in time, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-rfE", "--tb=short", "--color=no"]
    command += ["-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command,
        cwd=root,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output
    return process.returncode, output
