"""What moves between ranks arrives as it was, whatever its dtype; who breaks off keeps nobody waiting."""

import time
from datetime import timedelta

import pytest
import torch

from lightning_spindle.runtime.messages import _DTYPES
from lightning_spindle.runtime.objects import broadcast_tensors
from lightning_spindle.runtime.transport import world_transport
from tests.support.ranks import run_ranks


def given() -> list[torch.Tensor]:
    numbers = torch.tensor([[0.0, 1.0, 2.5], [3.0, 100.0, 7.0]])
    return [numbers.to(dtype) for dtype in (*_DTYPES, torch.uint16)] + [torch.empty(0), torch.tensor(3.0)]


def test_each_dtype_is_sent_and_broadcast() -> None:
    """Gloo and NCCL reduce few dtypes; buffers of a model may have any."""

    def rank(index: int, size: int) -> None:
        transport = world_transport(timedelta(seconds=10))
        sent = given() if index == 0 else [torch.zeros_like(t) for t in given()]
        shared = [t.clone() for t in sent]
        for tag, tensor in enumerate(sent):
            (transport.send(tensor, 1, tag) if index == 0 else transport.receive(tensor, 0, tag)).wait()
        broadcast_tensors(shared, transport)
        for ours, expected in zip(sent + shared, given() * 2, strict=True):
            assert ours.dtype == expected.dtype
            assert torch.equal(ours, expected), expected.dtype

    run_ranks(rank, 2)


def test_rank_that_lost_one_connection_breaks_off_the_others() -> None:
    """Rank 2 waits for rank 0, which waits for rank 1, which fails; all of them go on running."""

    def rank(index: int, size: int) -> float:
        transport = world_transport(timedelta(seconds=20))
        start_s = time.monotonic()
        if index != 1:
            pending = transport.receive(torch.zeros(1), 1 if index == 0 else 0, tag=0)
            with pytest.raises(RuntimeError):
                pending.wait()
        transport.break_off()
        return time.monotonic() - start_s

    assert max(run_ranks(rank, 3, group_timeout_s=20)) < 10
