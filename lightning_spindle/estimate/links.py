"""Measuring links: messages, sums over groups (paper, sections 3.2 and 3.5)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from lightning_spindle.costs import EXCHANGE_BYTES
from lightning_spindle.estimate.devices import synchronize
from lightning_spindle.estimate.samples import LinkSamples, fit_link
from lightning_spindle.runtime.objects import number_of_rank_zero
from lightning_spindle.runtime.transport import Ranks, Transport

MESSAGE_BYTES = (64, 64 * 2**10, 4 * 2**20)
REDUCE_BYTES = (EXCHANGE_BYTES, 64 * 2**10, 4 * 2**20)
MOST_REPEATS = 100
_TAG = 1


class PreparedTransport(Transport, Protocol):
    """A transport whose groups are created beforehand, by all ranks together."""

    def prepare(self, groups: Iterable[Ranks]) -> None: ...


def measure_links(
    transport: PreparedTransport,
    device: torch.device,
    budget_s: float = 2.0,
    *,
    island_size: int | None = None,
) -> LinkSamples:
    """The α-β model of messages and of sums, as rank 0 saw them; a collective call.

    Messages go between ranks 0 and 1, and between the first two islands where there are
    several. Sums are taken over the first 2, 4, 8, ... ranks and over all. The returned
    figures are rank 0's on rank 0 alone; a caller hands them on. The budget is a target:
    each size is tried twice at least. One process has links that cost nothing.
    """
    size = transport.size
    if size == 1:
        return LinkSamples()
    counts = sorted({size, *(2**k for k in range(1, size.bit_length()) if 2**k <= size)})
    groups = [tuple(range(n)) for n in counts]
    transport.prepare(groups)
    island = size if island_size is None else min(island_size, size)
    peers = {"inside": 1 if island > 1 else None, "between": island if island < size else None}
    tries = len(groups) * len(REDUCE_BYTES) + sum(p is not None for p in peers.values()) * len(MESSAGE_BYTES)
    bench = _LinkBench(transport, device, budget_s / tries)
    links = {
        name: fit_link([(b, bench.message_s(peer, b)) for b in MESSAGE_BYTES])
        for name, peer in peers.items()
        if peer is not None
    }
    sums = {len(g): [(b, bench.all_reduce_s(g, b)) for b in REDUCE_BYTES] for g in groups}
    return LinkSamples(
        links.get("inside", links.get("between", LinkSamples().inside)),
        links.get("between"),
        {n: fit_link(points) for n, points in sums.items()},
        sums[size][0][1],
    )


class _LinkBench:
    """Repeats one communication while ``budget_s`` allows; every rank calls its methods alike."""

    def __init__(self, transport: Transport, device: torch.device, budget_s: float) -> None:
        self._transport = transport
        self._device = device
        self._budget_s = budget_s

    def message_s(self, peer: int, size_bytes: int) -> float:
        """One way between rank 0 and ``peer``: half of there and back."""
        transport = self._transport
        table = torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)

        def there_and_back() -> None:
            if transport.rank == 0:
                transport.send(table, peer, _TAG).wait()
                transport.receive(table, peer, _TAG).wait()
            elif transport.rank == peer:
                transport.receive(table, 0, _TAG).wait()
                transport.send(table, 0, _TAG).wait()

        return self._median_s(there_and_back) / 2

    def all_reduce_s(self, ranks: Ranks, size_bytes: int) -> float:
        table = torch.zeros(size_bytes // 4, dtype=torch.float32, device=self._device)

        def reduce() -> None:
            if self._transport.rank in ranks:
                self._transport.all_reduce(table, ranks).wait()

        return self._median_s(reduce)

    def _median_s(self, call: Callable[[], None]) -> float:
        """Median seconds of a call; how often is rank 0's decision, from the second call's time."""
        self._timed(call)
        first = self._timed(call)
        wanted = int(min(MOST_REPEATS, self._budget_s / max(first, 1e-9))) - 2
        repeats = number_of_rank_zero(self._transport, self._device, max(1, wanted))
        times = sorted([first, *(self._timed(call) for _ in range(repeats))])
        number_of_rank_zero(self._transport, self._device, 0)
        return max(times[len(times) // 2], 1e-9)

    def _timed(self, call: Callable[[], None]) -> float:
        synchronize(self._device)
        start = time.perf_counter()
        call()
        synchronize(self._device)
        return time.perf_counter() - start
