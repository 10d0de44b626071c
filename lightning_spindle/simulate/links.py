"""Links that messages and sums share: those of each device, and those between islands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_spindle.cluster import Cluster

OUT, IN = 0, 1
SAME_TIME_S = 1e-10
"""What is less apart happens at one moment: sums of times differ in their last digits."""


@dataclass(slots=True, eq=False)
class Transfer:
    """A message or a sum: what it takes of which links, and how far it is.

    ``position`` in the program's order. ``seconds`` on idle links; ``senders`` and ``receivers`` are
    the same devices for a sum. ``uplink_bytes`` leave the island of each sender, and come into that of
    each receiver, where these are several islands. ``version`` tells a planned end from one that no
    longer holds.
    """

    position: int
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    seconds: float = 0.0
    uplink_bytes: float = 0.0
    uplinks: tuple[tuple[int, int], ...] = ()
    """Islands and directions."""
    start_s: float = 0.0
    version: int = 0
    _left_s: float = 0.0
    _since_s: float = 0.0
    _speed: float = 1.0

    @property
    def demand_bytes_per_s(self) -> float:
        """What it would take of each of its uplinks, were it alone."""
        return self.uplink_bytes / self.seconds if self.seconds > 0 else 0.0

    def begin(self, now_s: float) -> None:
        """It has its devices' links, and nothing slows it yet."""
        self.start_s = self._since_s = now_s
        self._left_s = self.seconds

    def go_on(self, now_s: float, speed: float) -> float:
        """Proceeds at ``speed`` (1: as on idle links); when it will end."""
        self._left_s -= (now_s - self._since_s) * self._speed
        self._since_s, self._speed = now_s, speed
        self.version += 1
        return now_s + max(0.0, self._left_s) / speed


def uplinks_of(
    senders: Iterable[int], receivers: Iterable[int], cluster: Cluster
) -> tuple[tuple[int, int], ...]:
    """The ways out of and into islands that data take from senders to receivers; none inside one."""
    out = {cluster.island(r) for r in senders}
    into = {cluster.island(r) for r in receivers}
    if len(out | into) <= 1:
        return ()
    return (*((i, OUT) for i in sorted(out)), *((i, IN) for i in sorted(into)))


class Links:
    """Who uses which link when.

    * Into and out of each device transfers go one at a time, in the order in which they were posted by
      all who take part, those of one moment in the program's order; one that waits for one of its
      devices keeps later ones waiting.
    * The transfers that leave (or enter) an island share ``cluster.uplink_bytes_per_s``: where they
      would take more together, all go slower by the same factor; the slowest of its uplinks decides
      for each.

    ``planned`` is called whenever an end is known anew; the caller hands it back to ``end`` at that time
    unless the transfer's ``version`` has changed since.
    """

    def __init__(self, cluster: Cluster, planned: Callable[[float, Transfer], None]) -> None:
        self._capacity = cluster.uplink_bytes_per_s
        self._planned = planned
        self._queues: dict[tuple[int, int], deque[Transfer]] = {}
        self._crossing: dict[tuple[int, int], dict[Transfer, float]] = {}
        """Transfers under way on each uplink, and their demands."""
        self._posted: list[Transfer] = []
        self._posted_s = 0.0

    def post(self, transfer: Transfer, now_s: float) -> None:
        """All who take part are ready; it starts by ``settle`` at the earliest."""
        self._posted.append(transfer)
        self._posted_s = now_s

    def unsettled(self, next_s: float) -> bool:
        """Whether ``settle`` is due before something that happens at ``next_s``."""
        return bool(self._posted) and next_s > self._posted_s + SAME_TIME_S

    def settle(self) -> None:
        """A moment is over: what was posted in it gets in line."""
        posted = sorted(self._posted, key=lambda t: t.position)
        self._posted = []
        for transfer in posted:
            for key in self._devices(transfer):
                self._queues.setdefault(key, deque()).append(transfer)
        for transfer in posted:
            self._try(transfer, self._posted_s)

    def end(self, transfer: Transfer, now_s: float) -> None:
        """The planned end is there: the next in line start."""
        self._change(transfer, now_s, joins=False)
        waiting: dict[Transfer, None] = {}
        for key in self._devices(transfer):
            queue = self._queues[key]
            queue.popleft()
            if queue:
                waiting[queue[0]] = None
        for other in waiting:
            self._try(other, now_s)

    def _devices(self, transfer: Transfer) -> list[tuple[int, int]]:
        return [(r, OUT) for r in transfer.senders] + [(r, IN) for r in transfer.receivers]

    def _try(self, transfer: Transfer, now_s: float) -> None:
        if all(self._queues[key][0] is transfer for key in self._devices(transfer)):
            transfer.begin(now_s)
            self._planned(transfer.go_on(now_s, 1.0), transfer)
            self._change(transfer, now_s, joins=True)

    def _change(self, transfer: Transfer, now_s: float, joins: bool) -> None:
        """A transfer joins or leaves its uplinks; those whose speed changes get new ends."""
        affected: dict[Transfer, None] = {}
        for uplink in transfer.uplinks:
            present = self._crossing.setdefault(uplink, {})
            before = sum(present.values())
            if joins:
                present[transfer] = transfer.demand_bytes_per_s
            else:
                del present[transfer]
            if max(before, sum(present.values())) > self._capacity:
                affected.update(dict.fromkeys(present))
        for other in affected:
            self._planned(other.go_on(now_s, self._speed(other)), other)

    def _speed(self, transfer: Transfer) -> float:
        loads = [sum(self._crossing[uplink].values()) for uplink in transfer.uplinks]
        return min(1.0, self._capacity / max(loads))
