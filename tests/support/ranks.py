"""Ranks for tests: forked processes and threads; ``scripts.py`` launches them as a user would.

Forking is what makes tests of many ranks affordable (0.1 s for 8 ranks, where starting Python and importing
torch takes seconds each), and it has one condition: the parent has imported everything and computed nothing
on more than one thread. ``tests/conftest.py`` sees to the one thread.

Every function here returns or raises within its limit, and leaves no process behind.
"""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "RankError",
    "RankHang",
    "RankOutcome",
    "free_port",
    "run_ranks",
    "run_threads",
    "watch_ranks",
]

GROUP_TIMEOUT_S = 15.0


class RankError(AssertionError):
    """A rank raised or died. ``outcomes`` holds every rank's end."""

    def __init__(self, message: str, outcomes: "tuple[RankOutcome, ...]") -> None:
        super().__init__(message)
        self.outcomes = outcomes


class RankHang(RankError):
    """NOHANG: ranks were still running at the limit; the message shows where each of them stood."""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How one rank ended.

    ``exitcode`` is the process's (negative: the signal that killed it; None for a thread or a rank still
    alive at the limit). ``error`` is ``repr`` of what it raised, ``traceback`` its text. ``seconds`` is the
    time from the start to this rank's result, exception or death; ``hung`` says that the limit ended it,
    ``stopped`` that the failure of another rank did.
    """

    rank: int
    value: Any = None
    error: str | None = None
    traceback: str | None = None
    exitcode: int | None = None
    seconds: float = 0.0
    hung: bool = False
    stopped: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None and not self.hung and not self.stopped and self.exitcode in (0, None)

    def describe(self) -> str:
        if self.hung:
            how = "was still running at the limit"
        elif self.error is not None:
            how = f"raised {self.error}"
        elif self.exitcode is not None and self.exitcode < 0:
            how = f"was killed by {signal.Signals(-self.exitcode).name}"
        elif self.exitcode:
            how = f"exited with {self.exitcode}"
        else:
            how = "finished"
        text = f"rank {self.rank} {how} after {self.seconds:.1f} s"
        return f"{text}\n{self.traceback.rstrip()}" if self.traceback else text


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    init_group: bool = True,
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on forked ranks and return the results by rank.

    ``fn`` may be a closure; its results travel back pickled. Each rank has torchrun's environment variables
    and, unless ``init_group`` is off, a gloo default group. A rank keeps its group until all have finished.

    Raises:
        RankError: a rank raised or died. The first to do so is shown and the others are killed at once.
        RankHang: ranks were still running after ``timeout_s``.
    """
    outcomes = _watch(fn, world_size, args, timeout_s, group_timeout_s, init_group, stop_at_failure=True)
    if any(outcome.hung for outcome in outcomes):
        stuck = "\n\n".join(outcome.describe() for outcome in outcomes)
        raise RankHang(f"NOHANG: not all of {world_size} ranks ended in {timeout_s:g} s\n{stuck}", outcomes)
    # A death comes first: its peers may have noticed it before its parent did.
    failed = sorted(
        (o for o in outcomes if not (o.ok or o.stopped)), key=lambda o: (o.error is not None, o.seconds)
    )
    if failed:
        raise RankError(f"of {world_size} ranks, {failed[0].describe()}", outcomes)
    return [outcome.value for outcome in outcomes]


def watch_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    init_group: bool = True,
) -> tuple[RankOutcome, ...]:
    """Like ``run_ranks`` for ranks that are expected to fail: nobody is killed before the limit.

    A rank that raises exits at once, as a script would, and its peers are left to notice. Returns each rank's
    outcome with the time it took, and raises nothing: ``hung`` marks those that the limit ended.
    """
    return _watch(fn, world_size, args, timeout_s, group_timeout_s, init_group, stop_at_failure=False)


def _watch(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout_s: float,
    group_timeout_s: float,
    init_group: bool,
    stop_at_failure: bool,
) -> tuple[RankOutcome, ...]:
    """Fork the ranks, collect what they report, and end them all."""
    fork = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    ends: dict[int, RankOutcome] = {}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        sys.stdout.flush()
        sys.stderr.flush()
        environment = _environment(world_size)
        start = time.monotonic()
        try:
            for rank in range(world_size):
                ours, theirs = fork.Pipe()
                body = (fn, rank, world_size, args, theirs, [*pipes, ours], Path(folder), environment)
                process = fork.Process(target=_rank_main, args=(*body, group_timeout_s, init_group))
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            deadline = start + timeout_s
            stopping = False
            while len(ends) < world_size and time.monotonic() < deadline:
                running = {pipes[rank]: rank for rank in range(world_size) if rank not in ends}
                for pipe in wait(list(running), timeout=max(0.0, deadline - time.monotonic())):
                    rank = running[pipe]  # type: ignore[index]
                    ends[rank] = _receive(rank, pipes[rank], processes[rank], time.monotonic() - start)
                if stop_at_failure and not all(end.ok for end in ends.values()):
                    deadline = min(deadline, time.monotonic() + 0.2)  # who else fails by itself?
                    stopping = True
            seconds = time.monotonic() - start
            if not stopping:
                for rank in sorted(set(range(world_size)) - set(ends)):
                    stack = _stack_of(processes[rank], _stack_file(Path(folder), rank))
                    ends[rank] = RankOutcome(rank, seconds=seconds, traceback=stack, hung=True)
            if all(end.ok for end in ends.values()):
                for pipe in pipes:
                    pipe.send(None)
                for process in processes:
                    process.join(5.0)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()
        for rank, process in enumerate(processes):
            end = ends.get(rank)
            if end is None:
                ends[rank] = RankOutcome(rank, seconds=seconds, stopped=True)
            elif end.ok and process.exitcode != 0 and all(e.ok for e in ends.values()):
                ends[rank] = replace(end, error="an exit that did not end cleanly", exitcode=process.exitcode)
            process.close()
    return tuple(ends[rank] for rank in range(world_size))


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    pipe: Connection,
    not_mine: Sequence[Connection],
    folder: Path,
    environment: Mapping[str, str],
    group_timeout_s: float,
    init_group: bool,
) -> None:
    """The life of a forked rank. Ends the process itself, so that nothing of the parent's is run again."""
    gc.freeze()  # the parent's garbage stays: a process group of ranks that were threads has no threads here
    _die_with_parent()
    for other in not_mine:
        other.close()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    stacks = _stack_file(folder, rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    code = 0
    try:
        if init_group:
            store = dist.FileStore(str(folder / "store"), world_size)
            timeout = timedelta(seconds=group_timeout_s)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        message = pickle.dumps((fn(rank, world_size, *args), None, None))
    except BaseException as error:
        message = pickle.dumps((None, repr(error), traceback.format_exc()))
        code = 1
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        pipe.send_bytes(message)
    if code == 0:
        with contextlib.suppress(EOFError, ConnectionResetError):
            pipe.recv()  # until every rank has finished: a closed socket could still hold a peer's last bytes
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_with_parent() -> None:
    """A test run that is killed takes its ranks along (Linux's PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _receive(rank: int, pipe: Connection, process: BaseProcess, seconds: float) -> RankOutcome:
    """The report in the pipe, or the exit code of a rank that died without one."""
    try:
        value, error, trace = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        process.join(5.0)
        return RankOutcome(rank, exitcode=process.exitcode, seconds=seconds)
    exitcode = 0 if error is None else 1
    return RankOutcome(rank, value, error, trace, exitcode, seconds)


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack{rank}"


def _stack_of(process: BaseProcess, file: Path) -> str:
    """Where a rank that does not end stands now, as far as it will say."""
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, signal.SIGUSR1)
    seen, limit = 0, time.monotonic() + 1.0
    while time.monotonic() < limit and process.is_alive():
        time.sleep(0.05)
        size = file.stat().st_size if file.exists() else 0
        if size and size == seen:  # written to its end
            return file.read_text()
        seen = size
    return "(no stack: stopped, or inside a call that takes no signals)"


def _environment(world_size: int) -> dict[str, str]:
    """What torchrun would set, without RANK and LOCAL_RANK."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCH_GLOO_LAZY_INIT": "0",  # docs/decisions/0001-eager-gloo-connections.md
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_threads(
    fn: Callable[[int, int, Any], Any],
    size: int,
    *args: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float = GROUP_TIMEOUT_S,
) -> list[Any]:
    """Run ``fn(rank, size, process_group, *args)`` on threads and return the results by rank.

    Each thread has its own ``ProcessGroupGloo`` over one shared store: real sends and collectives for 32
    ranks in half a second, and no default group. Threads cannot be killed, so when a rank raises, the others
    are waited for until their group times out.

    Raises:
        RankError: a rank raised; the first to do so is shown.
        RankHang: ranks were still running after ``timeout_s``. They go on, as daemons.
    """
    store = dist.HashStore()
    ends: dict[int, RankOutcome] = {}
    start = time.monotonic()

    def body(rank: int) -> None:
        try:
            scope = dist.PrefixStore("threads", store)
            group = dist.ProcessGroupGloo(scope, rank, size, timedelta(seconds=group_timeout_s))
            value = fn(rank, size, group, *args)
            ends[rank] = RankOutcome(rank, value, seconds=time.monotonic() - start)
        except BaseException as error:
            seconds = time.monotonic() - start
            ends[rank] = RankOutcome(rank, None, repr(error), traceback.format_exc(), seconds=seconds)

    threads = [threading.Thread(target=body, args=(r,), name=f"rank{r}", daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, start + timeout_s - time.monotonic()))
    frames = sys._current_frames()
    for rank, thread in enumerate(threads):
        if rank not in ends:
            frame = frames.get(thread.ident or -1)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else None
            ends[rank] = RankOutcome(rank, traceback=stack, seconds=timeout_s, hung=True)
    outcomes = tuple(ends[rank] for rank in range(size))
    failed = sorted((o for o in outcomes if o.error is not None), key=lambda o: o.seconds)
    if failed:
        raise RankError(f"of {size} ranks, {failed[0].describe()}", outcomes)
    if any(outcome.hung for outcome in outcomes):
        stuck = "\n\n".join(outcome.describe() for outcome in outcomes)
        raise RankHang(f"NOHANG: not all of {size} ranks ended in {timeout_s:g} s\n{stuck}", outcomes)
    return [outcome.value for outcome in outcomes]
