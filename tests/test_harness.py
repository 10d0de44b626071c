"""The harness itself: ranks that raise, die and hang end in time, show why, and leave nothing behind."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, RankHang, run_ranks, run_threads, watch_ranks
from tests.support.scripts import run_script


def total(rank: int, size: int, factor: float = 1.0) -> torch.Tensor:
    value = torch.tensor([rank * factor], dtype=torch.float64)
    dist.all_reduce(value)
    return value


def test_results_come_back_by_rank() -> None:
    base = 10

    def body(rank: int, size: int, factor: float) -> tuple[int, float, str]:
        return base + rank, total(rank, size, factor).item(), os.environ["RANK"]

    assert run_ranks(body, 3, 2.0) == [(10, 6.0, "0"), (11, 6.0, "1"), (12, 6.0, "2")]


def test_tensors_come_back() -> None:
    for value in run_ranks(total, 2):
        assert torch.equal(value, torch.tensor([1.0], dtype=torch.float64))


def test_eight_ranks_are_quick() -> None:
    start = time.monotonic()
    run_ranks(total, 8)
    assert time.monotonic() - start < 10


def test_without_a_group_ranks_make_their_own() -> None:
    def body(rank: int, size: int) -> float:
        assert not dist.is_initialized()
        dist.init_process_group("gloo")  # from the environment variables, as torchrun's
        return total(rank, size).item()

    assert run_ranks(body, 2, init_group=False) == [1.0, 1.0]


def test_a_rank_that_raises_is_shown_and_the_others_are_killed() -> None:
    def body(rank: int, size: int) -> None:
        if rank == 1:
            raise ValueError("no rows for the encoder")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 raised ValueError\('no rows for the encoder'\)") as caught:
        run_ranks(body, 3)
    assert 'raise ValueError("no rows for the encoder")' in str(caught.value)
    assert time.monotonic() - start < 10


def test_a_result_that_does_not_pickle_is_an_error() -> None:
    with pytest.raises(RankError, match="rank 0 raised"):
        run_ranks(lambda rank, size: threading.Lock(), 1)


def test_a_rank_that_is_killed_is_named_with_its_signal() -> None:
    def body(rank: int, size: int) -> None:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankError, match=r"rank \d (was killed by SIGKILL|raised)"):
        run_ranks(body, 3)


def test_ranks_that_hang_fail_with_their_stacks() -> None:
    def where_it_waits(rank: int, size: int) -> None:
        if rank == 0:
            time.sleep(600)

    start = time.monotonic()
    with pytest.raises(RankHang, match="NOHANG") as caught:
        run_ranks(where_it_waits, 2, timeout_s=2.0)
    assert time.monotonic() - start < 8
    assert "rank 0 was still running" in str(caught.value)
    assert "where_it_waits" in str(caught.value)
    assert [outcome.hung for outcome in caught.value.outcomes] == [True, False]


@pytest.mark.parametrize("moment", ["at once", "while they wait"])
@pytest.mark.parametrize("call", ["recv", "all_reduce"])
def test_watching_lets_the_peers_notice(moment: str, call: str) -> None:
    def body(rank: int, size: int) -> None:
        if rank == 0:
            time.sleep(0.5 if moment == "while they wait" else 0.0)
            raise RuntimeError("first")
        if call == "recv":
            dist.recv(torch.zeros(1), src=0)
        else:
            dist.all_reduce(torch.zeros(1))

    outcomes = watch_ranks(body, 2, timeout_s=30.0)
    assert outcomes[0].error == "RuntimeError('first')"
    assert outcomes[1].error is not None
    assert not outcomes[1].hung
    assert [outcome.exitcode for outcome in outcomes] == [1, 1]
    assert outcomes[1].seconds < 20


def test_watching_a_killed_rank() -> None:
    def body(rank: int, size: int) -> int:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    killed, fine = watch_ranks(body, 2)
    assert killed.exitcode == -signal.SIGKILL
    assert not killed.ok
    assert fine.ok
    assert fine.value == 1


def test_watching_a_stopped_rank_ends_at_the_limit() -> None:
    def body(rank: int, size: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    outcomes = watch_ranks(body, 2, timeout_s=2.0)
    assert [outcome.hung for outcome in outcomes] == [False, True]


def test_wrong_order_of_sends_is_ended_by_the_group() -> None:
    def body(rank: int, size: int) -> None:
        dist.send(torch.ones(1 << 20), dst=1 - rank)
        dist.recv(torch.zeros(1 << 20), src=1 - rank)

    with pytest.raises(RankError, match=r"rank \d raised"):
        run_ranks(body, 2, group_timeout_s=3.0, timeout_s=20.0)


def test_threads_send_and_reduce() -> None:
    def body(rank: int, size: int, group: dist.ProcessGroup, shift: int) -> tuple[float, float]:
        mine = torch.tensor([float(rank + shift)])
        group.allreduce([mine]).wait()
        received = torch.zeros(1)
        if rank % 2 == 0:
            group.send([torch.tensor([float(rank)])], rank + 1, 7).wait()
        else:
            group.recv([received], rank - 1, 7).wait()
        return mine.item(), received.item()

    results = run_threads(body, 8, 1)
    assert [total for total, _ in results] == [36.0] * 8
    assert [received for _, received in results] == [0, 0, 0, 2, 0, 4, 0, 6]


def test_a_thread_that_raises_is_shown() -> None:
    def body(rank: int, size: int, group: dist.ProcessGroup) -> None:
        if rank == 1:
            raise KeyError("edge 3")
        group.barrier().wait()

    with pytest.raises(RankError, match=r"rank 1 raised KeyError\('edge 3'\)"):
        run_threads(body, 2, group_timeout_s=2.0)


SCRIPT = """
import os, sys, time, subprocess
print("args", *sys.argv[1:])
if "group" in sys.argv:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}")  # one piece: the ranks share the output
    dist.destroy_process_group()
if "leave" in sys.argv:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if "hang" in sys.argv:
    time.sleep(600)
if "fail" in sys.argv:
    sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_alone(script: Path) -> None:
    assert run_script(script, ["one"]).check().stdout == "args one\n"
    failed = run_script(script, ["fail"])
    assert failed.returncode == 3
    with pytest.raises(AssertionError, match="exit code 3"):
        failed.check()


def test_a_script_that_hangs_or_leaves_a_process(script: Path) -> None:
    hung = run_script(script, ["hang", "leave"], timeout_s=3.0)
    assert hung.timed_out
    assert hung.seconds < 12
    left = run_script(script, ["leave"])
    assert len(left.leftovers) == 1
    with pytest.raises(AssertionError, match="left running"):
        left.check()


@pytest.mark.scripts
def test_a_script_under_torchrun(script: Path) -> None:
    done = run_script(script, ["group"], nproc=2).check()
    assert "rank 0 of 2" in done.stdout
    assert "rank 1 of 2" in done.stdout
