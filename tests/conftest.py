"""Fixtures around every test: what a test started or changed, it ends and puts back.

Torch is not imported here, so that tests of the pure part start at once.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: ranks are forked from this process

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("spindle", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("spindle")

# Lightning, torch and matplotlib write these themselves; they are put back but are no test's fault.
ENV_OF_OTHERS = {
    "CUDA_MODULE_LOADING",
    "CUDA_DEVICE_ORDER",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "WORLD_SIZE",
}
THREADS_OF_OTHERS = ("pytest_timeout", "QueueFeederThread", "TMonitor", "Tqdm", "asyncio_")


def pytest_configure(config: pytest.Config) -> None:
    fault = os.environ.get("SPINDLE_FAULT")
    if fault:
        from tests.faults import apply_fault

        apply_fault(fault)
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        # Workers tell their warnings, whose modules xdist imports in a thread for each worker: two that
        # import Lightning at the same time wait for each other.
        import lightning.pytorch  # noqa: F401
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def restore_environment() -> Iterator[None]:
    """Put environment variables back, and fail on those that a test left set."""
    before = dict(os.environ)
    yield
    leaked = {
        name: value
        for name, value in os.environ.items()
        if before.get(name) != value and name not in ENV_OF_OTHERS
    }
    os.environ.clear()
    os.environ.update(before)
    assert not leaked, f"the test left environment variables: {leaked}"


@pytest.fixture(autouse=True)
def restore_torch(restore_environment: None) -> Iterator[None]:
    """One thread, no process group and the default dtype, whatever the test before did."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    yield
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.set_default_dtype(torch.float32)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def no_leftover_threads(restore_torch: None) -> Iterator[None]:
    """Fail on Python threads that outlive their test."""
    before = set(threading.enumerate())
    yield

    def leaked() -> list[str]:
        threads = (t for t in threading.enumerate() if t not in before and t.is_alive())
        return [
            t.name
            for t in threads
            if not t.name.startswith(THREADS_OF_OTHERS) and not type(t).__name__.startswith(THREADS_OF_OTHERS)
        ]

    limit = time.monotonic() + 2.0
    while leaked() and time.monotonic() < limit:
        time.sleep(0.02)
    assert not leaked(), f"the test left threads: {leaked()}"


@pytest.fixture(autouse=True)
def no_leftover_processes(no_leftover_threads: None) -> Iterator[None]:
    """Kill and fail on child processes that outlive their test."""
    before = set(_children())
    yield
    limit = time.monotonic() + 2.0
    while (left := set(_children()) - before) and time.monotonic() < limit:
        time.sleep(0.02)
    commands = [_command(pid) for pid in left]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not left, f"the test left processes: {commands}"


def _children() -> list[int]:
    """Running children of this process, without multiprocessing's own helper."""
    multiprocessing.active_children()  # reaps
    from multiprocessing.resource_tracker import _resource_tracker

    helpers = {getattr(_resource_tracker, "_pid", None)}
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        pid = int(folder.name)
        if int(parent) == os.getpid() and state != "Z" and pid not in helpers:
            children.append(pid)
    return children


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return str(pid)
