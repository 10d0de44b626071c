"""A network in virtual time: when the transfers end that ranks have posted.

A fluid model, moved from one change to the next: each transfer holds ports of its devices, of which each
carries one transfer, and flows through the uplinks of islands, which all that are under way share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_spindle.costs import Costs

Port = tuple[str, int]
ONE_MOMENT_S = 1e-10
"""Clocks that differ by less show the same time."""


@dataclass(slots=True, eq=False)
class Posted:
    """A transfer or collective, by its place in the program: ``end_s`` is None until it has ended."""

    place: int
    parties: int
    seconds: float
    ports: frozenset[Port] = frozenset()
    uplinks: frozenset[Port] = frozenset()
    rate: float = 0.0
    """Bytes a second that it takes of each uplink when alone."""
    left_s: float = 0.0
    speed: float = 1.0
    end_s: float | None = None
    posted_s: dict[int, float] = field(default_factory=dict)
    """When each rank posted it."""


class Network:
    """Transfers between the devices of ``costs.cluster``; times never go back.

    What all have posted by the same moment is started in the order of the program.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._now_s = 0.0
        self._posts: dict[tuple[int, int], int] = {}
        self._known: dict[tuple[int, int], Posted] = {}
        self._fresh: list[Posted] = []
        self._waiting: list[Posted] = []
        self._moving: list[Posted] = []

    def message(self, now_s: float, rank: int, place: int, source: int, target: int, size: float) -> Posted:
        """``rank``, one of its ends, posts a message."""
        islands = self._costs.cluster.island(source), self._costs.cluster.island(target)
        seconds = self._costs.message_s(size, source, target)
        crosses = islands[0] != islands[1]
        posted = Posted(
            place,
            2,
            seconds,
            frozenset({("out", source), ("in", target)}),
            frozenset({("up", islands[0]), ("down", islands[1])}) if crosses else frozenset(),
            size / seconds if seconds > 0 else 0.0,
        )
        return self._post(now_s, rank, posted)

    def sum(self, now_s: float, rank: int, place: int, ranks: Sequence[int], size: int) -> Posted:
        """``rank`` posts its part of summing a bucket."""
        seconds, carried = self._costs.all_reduce_s(size, ranks), self._costs.uplink_bytes(size, ranks)
        return self._collective(now_s, rank, place, ranks, seconds, carried)

    def broadcast(self, now_s: float, rank: int, place: int, ranks: Sequence[int], size: int) -> Posted:
        """``rank`` gives new values of parameters, or is there to get them."""
        seconds = self._costs.broadcast_s(size, ranks)
        carried = self._costs.broadcast_uplink_bytes(size, ranks)
        return self._collective(now_s, rank, place, ranks, seconds, carried)

    def _collective(
        self, now_s: float, rank: int, place: int, ranks: Sequence[int], seconds: float, carried: float
    ) -> Posted:
        islands = {self._costs.cluster.island(r) for r in ranks} if carried else set()
        posted = Posted(
            place,
            len(ranks),
            seconds,
            frozenset((way, r) for r in ranks for way in ("out", "in")),
            frozenset((way, i) for i in islands for way in ("up", "down")),
            carried / seconds if seconds > 0 else 0.0,
        )
        return self._post(now_s, rank, posted)

    def exchange(self, now_s: float, rank: int, place: int, ranks: Sequence[int]) -> Posted:
        """``rank`` comes to the exchange of results."""
        return self._post(now_s, rank, Posted(place, len(ranks), self._costs.exchange_s(ranks)))

    def barrier(self, now_s: float, rank: int, parties: int) -> Posted:
        """``rank`` comes to a meeting of all that costs nothing."""
        return self._post(now_s, rank, Posted(-1, parties, 0.0))

    def settle(self, until_s: float) -> bool:
        """Starts what was posted before something that happens at ``until_s``; whether there was any."""
        if not self._fresh or until_s <= self._now_s + ONE_MOMENT_S:
            return False
        self._waiting += sorted(self._fresh, key=lambda p: p.place)
        self._fresh = []
        self._start()
        return True

    def next_end_s(self) -> float:
        """When the next transfer ends if nothing is posted before; infinite where nothing moves."""
        return min((self._now_s + p.left_s / p.speed for p in self._moving), default=math.inf)

    def end_next(self) -> None:
        """Moves on to ``next_end_s`` and ends what ends there."""
        first = min(self._moving, key=lambda p: p.left_s / p.speed)
        self._flow(self._now_s + first.left_s / first.speed)
        self._moving.remove(first)
        first.end_s = self._now_s
        self._start()

    def _post(self, now_s: float, rank: int, made: Posted) -> Posted:
        """The n-th time that a rank posts something is the n-th of every other's."""
        count = self._posts[made.place, rank] = self._posts.get((made.place, rank), 0) + 1
        posted = self._known.setdefault((made.place, count), made)
        posted.posted_s[rank] = now_s
        if len(posted.posted_s) == posted.parties:
            del self._known[made.place, count]
            self._flow(now_s)
            posted.left_s = posted.seconds
            self._fresh.append(posted)
        return posted

    def _flow(self, until_s: float) -> None:
        passed_s = max(0.0, until_s - self._now_s)
        for p in self._moving:
            p.left_s = max(0.0, p.left_s - passed_s * p.speed)
        self._now_s += passed_s

    def _start(self) -> None:
        """Starts what can start, in the order in which it became ready, and shares the uplinks."""
        taken = {port for p in self._moving for port in p.ports}
        waiting: list[Posted] = []
        for p in self._waiting:
            (self._moving if taken.isdisjoint(p.ports) else waiting).append(p)
            taken |= p.ports
        self._waiting = waiting
        loads: dict[Port, float] = {}
        for p in self._moving:
            for uplink in p.uplinks:
                loads[uplink] = loads.get(uplink, 0.0) + p.rate
        capacity = self._costs.cluster.uplink_bytes_per_s
        for p in self._moving:
            worst = max((loads[u] for u in p.uplinks), default=0.0)
            p.speed = min(1.0, capacity / worst) if worst > 0 else 1.0
