"""Scripts launched by tests as a user would launch them."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.ranks import free_port

ROOT = Path(__file__).parents[2]
_RUN_MARK = "SPINDLE_TEST_RUN"


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """How a script ended; ``leftovers`` are the command lines of processes that outlived it (now killed)."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool
    leftovers: tuple[str, ...]

    def check(self) -> "ScriptResult":
        """Return this result, or fail with the script's output if it did not end well."""
        if self.timed_out or self.returncode or self.leftovers:
            how = "NOHANG: killed at the limit" if self.timed_out else f"exit code {self.returncode}"
            left = f", left running: {self.leftovers}" if self.leftovers else ""
            tail = f"--- stdout\n{self.stdout[-6000:]}\n--- stderr\n{self.stderr[-6000:]}"
            raise AssertionError(f"script: {how} after {self.seconds:.1f} s{left}\n{tail}")
        return self


def run_script(
    path: str | Path,
    args: Sequence[str] = (),
    nproc: int | None = None,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> ScriptResult:
    """Launch a script as a user would and wait for it: ``python path`` or, with ``nproc``, torchrun.

    Without ``nproc`` a script that starts further processes (Lightning's launcher) does so by itself. All
    that the script started is ended with it: what outlives it is killed and reported, at the limit everything
    is. Never raises for what the script did; ``.check()`` does.
    """
    launcher = [sys.executable]
    if nproc is not None:
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", str(nproc)]
        launcher += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    mark = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), _RUN_MARK: mark}
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [environment.get("PYTHONPATH")]), str(ROOT)])
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [*launcher, str(path), *args],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            seconds = time.monotonic() - start
            leftovers = _kill_marked(mark, grace_s=0.0 if timed_out else 2.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        texts = out.read(), err.read()
    return ScriptResult(process.returncode, *texts, seconds, timed_out, () if timed_out else leftovers)


def _kill_marked(mark: str, grace_s: float) -> tuple[str, ...]:
    """Kill every process whose environment bears the mark; return those that outlived the grace."""
    limit = time.monotonic() + grace_s
    while time.monotonic() < limit and any(_marked(mark)):
        time.sleep(0.05)
    leftovers = []
    for pid, command in list(_marked(mark)):
        leftovers.append(command)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return tuple(leftovers)


def _marked(mark: str) -> Iterator[tuple[int, str]]:
    """Running processes started with the mark in their environment (Linux; elsewhere the session must do)."""
    needle = f"{_RUN_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield int(folder.name), command.strip()
        except OSError:
            continue
