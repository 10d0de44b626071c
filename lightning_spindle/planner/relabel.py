"""Placement made better as a whole: devices change names in a span of time, many at once.

The greedy pass (``placement.py``) decides run by run and cannot know what comes. Here the runs
that start in a window of time swap devices with each other: any permutation of the devices on
which nothing runs across the window's ends leaves the schedule as it is. Which permutation is
best towards the runs before and after the window is an assignment problem (every shard to a
device, bytes times links as costs), solved exactly (Jonker & Volgenant 1987); what the plan really
costs then, transfers and the synchronisation of parameters, decides whether it stays. Since it
also permutes the shards of one run, it finds in which order a group holds the rows.

It starts from several placements, the greedy one and ones whose groups are spread evenly over
islands (a MetaOp that gets more or fewer devices then moves data inside islands alone), and
goes on from the best, a few times after a random exchange (iterated local search, Lourenço,
Martin & Stützle 2003). Random numbers have a fixed seed; the budget counts assignment problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import lru_cache
from random import Random

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from lightning_spindle.planner.network import Groups, Network
from lightning_spindle.planner.problem import PlanningProblem
from lightning_spindle.planner.timing import PlacedRun
from lightning_spindle.planner.transfers import shares

Indices = NDArray[np.int64]
_LESS_MS = 1e-6
_BLOCKS = (1, 2, 4)
"""A random exchange swaps two blocks of so many devices."""
_WORSE = 0.03
"""Random exchanges go on from a placement that costs at most so much more than the best one."""
_CHAINS = 2
"""Random exchanges go on from so many of the starts."""
_MORE_MEMORY = 1.1
"""The fullest device may hold so much more than in the greedy placement."""


def relabel(
    placed: Sequence[PlacedRun],
    others: Sequence[PlacedRun],
    problem: PlanningProblem,
    steps: int,
    sync_weight: float,
) -> list[PlacedRun]:
    """The best placement found from ``placed``, and from ``placed`` and ``others`` spread over islands.

    Never costs more (transfers, and synchronisation times its weight) than ``placed``. Of the
    ``steps`` (assignment problems) half go to the starts, half to random exchanges.
    """
    network = Network([p.run for p in placed], problem, sync_weight)
    given = network.start(placed)
    limit = _MORE_MEMORY * network.memory(given)
    if problem.cluster.memory_bytes is not None:
        limit = min(limit, problem.cluster.memory_bytes)
    starts = [given]
    for names in _spreads(problem):
        for start in (given, network.start(others)):
            devices = [tuple(names[d] for d in group) for group in start]
            if network.feasible(devices) and network.memory(devices) <= limit:
                starts.append(devices)
    share = steps // 2 // len(starts)
    found = [_Relabelling(network, start, limit) for start in starts]
    for relabelling in found:
        relabelling.improve(share)
    found.sort(key=lambda r: r.cost_ms)
    budget = steps // 2 // min(_CHAINS, len(found))
    best = min((_kicked(r, budget, share) for r in found[:_CHAINS]), key=lambda r: r.cost_ms)
    return [PlacedRun(run, devices) for run, devices in zip(network.runs, best.devices, strict=True)]


def _kicked(start: _Relabelling, steps: int, most: int) -> _Relabelling:
    """The best of what random exchanges, each followed by at most ``most`` steps, lead to."""
    random = Random(0)
    best = now = start
    while steps > 0 and start.network.windows:
        kicked = now.kicked(random)
        steps -= 1 + kicked.improve(min(steps, most))
        if kicked.cost_ms < (1.0 + _WORSE) * best.cost_ms and kicked.fits(kicked.devices):
            now = kicked
            best = min(best, now, key=lambda r: r.cost_ms)
    return best


def _spreads(problem: PlanningProblem) -> Iterator[list[int]]:
    """Names of all devices that spread consecutive ones over 2, 4, ... neighbouring islands."""
    size, devices = problem.cluster.island_size, problem.devices
    islands = 2
    while (islands - 1) * size < devices:
        names: list[int] = []
        for first in range(0, devices, islands * size):
            block = range(first, min(first + islands * size, devices))
            names += [d for k in range(size) for d in block[k::size]]
        yield names
        islands *= 2


class _Relabelling:
    """A placement under improvement: ``devices[i]`` of the i-th run."""

    def __init__(self, network: Network, devices: Groups, memory_limit: float) -> None:
        self.network, self.memory_limit = network, memory_limit
        self.devices = list(devices)
        self.cost = [network.link_ms(k, devices) for k in range(len(network.links))]
        self.sync = network.sync_ms(devices)
        self.clock = 0
        """Counts changes, to know when a run last changed and when a window was last tried."""
        self.changed = [0] * len(devices)
        self.tried = [-1] * len(network.windows)

    @property
    def cost_ms(self) -> float:
        return sum(self.cost) + self.network.sync_weight * self.sync

    def improve(self, steps: int) -> int:
        """Tries windows until none of them helps any more; returns how many, at most ``steps``."""
        done, helped = 0, True
        while helped:
            helped = False
            for w in range(len(self.network.windows)):
                crossing = self._crossing(w)
                if not crossing:
                    continue
                if done == steps:
                    return done
                done += 1
                helped |= self._try(w, crossing)
        return done

    def kicked(self, random: Random) -> _Relabelling:
        """A copy in which two random blocks of devices swapped names in a random window."""
        network = self.network
        copied = copy(self)
        copied.devices, copied.cost = list(self.devices), list(self.cost)
        copied.changed, copied.tried = list(self.changed), list(self.tried)
        w = random.randrange(len(network.windows))
        size = random.choice(_BLOCKS)
        a, b = (size * random.randrange(max(1, network.problem.devices // size)) for _ in range(2))
        renamed = {a + k: b + k for k in range(size)} | {b + k: a + k for k in range(size)}
        if self._held(w).isdisjoint(renamed) and max(renamed) < network.problem.devices:
            devices, links = copied._renamed(w, renamed)
            cost = {k: network.link_ms(k, devices) for k in links}
            copied._accept(devices, cost, network.sync_ms(devices))
        return copied

    def fits(self, devices: Groups) -> bool:
        return self.network.memory(devices) <= self.memory_limit

    def _crossing(self, w: int) -> list[int]:
        """Links over the window's ends, where one of them costs and something changed since the last try."""
        lo, hi = self.network.windows[w].first, self.network.windows[w].last
        links, newest = [], -1
        for i in range(lo, hi):
            newest = max(newest, self.changed[i])
            for k in self.network.touching[i]:
                link = self.network.links[k]
                other = link.target if link.source == i else link.source
                if not lo <= other < hi:
                    links.append(k)
                    newest = max(newest, self.changed[other])
        stale = newest <= self.tried[w]
        return [] if stale or all(self.cost[k] == 0.0 for k in links) else links

    def _held(self, w: int) -> set[int]:
        """Devices that keep their names in a window."""
        network = self.network
        held = {d for k in network.windows[w].across for d in self.devices[k]}
        held.update(d for pin, group in zip(network.pins, self.devices, strict=True) if pin for d in group)
        return held

    def _try(self, w: int, crossing: Sequence[int]) -> bool:
        network = self.network
        self.tried[w] = self.clock
        devices, links = self._renamed(w, self._assign(w, crossing))
        cost = {k: network.link_ms(k, devices) for k in links}
        saved_ms = sum(self.cost[k] - new for k, new in cost.items())
        if saved_ms <= _LESS_MS:
            return False
        sync = network.sync_ms(devices)
        if saved_ms <= self.network.sync_weight * (sync - self.sync) + _LESS_MS:
            return False
        if not self.fits(devices):
            return False
        self._accept(devices, cost, sync)
        return True

    def _renamed(self, w: int, names: dict[int, int]) -> tuple[list[tuple[int, ...]], set[int]]:
        """Groups with the window's devices renamed, and the links whose ends differ."""
        lo, hi = self.network.windows[w].first, self.network.windows[w].last
        devices, links = list(self.devices), set[int]()
        for i in range(lo, hi):
            devices[i] = tuple(names.get(d, d) for d in devices[i])
            if devices[i] != self.devices[i]:
                links.update(self.network.touching[i])
        return devices, links

    def _accept(self, devices: list[tuple[int, ...]], cost: dict[int, float], sync: float) -> None:
        self.clock += 1
        for i, group in enumerate(devices):
            if group != self.devices[i]:
                self.changed[i] = self.clock
        self.devices, self.sync = devices, sync
        for k, new in cost.items():
            self.cost[k] = new

    def _assign(self, w: int, crossing: Sequence[int]) -> dict[int, int]:
        """The new name of each device of a window, best towards the runs outside."""
        network, cluster = self.network, self.network.problem.cluster
        lo, hi = network.windows[w].first, network.windows[w].last
        count = network.problem.devices
        mine, theirs, near, far = [], [], [], []
        for k in crossing:
            link = network.links[k]
            senders, receivers, parts = _pattern(
                len(self.devices[link.source]), len(self.devices[link.target])
            )
            ends = (
                np.array(self.devices[link.source])[senders],
                np.array(self.devices[link.target])[receivers],
            )
            inside = lo <= link.source < hi
            mine.append(ends[not inside])
            theirs.append(ends[inside])
            sizes = parts * link.bytes
            near.append(cluster.inside.latency_s + sizes / cluster.inside.bytes_per_s)
            far.append(cluster.between.latency_s + sizes / cluster.between.bytes_per_s)
        rows, columns = np.concatenate(mine), np.concatenate(theirs)
        near_s, far_s = np.concatenate(near), np.concatenate(far)
        gain = np.zeros((count, len(network.near)))
        np.add.at(gain, (rows, network.island[columns]), near_s - far_s)
        cost = gain @ network.near + np.bincount(rows, far_s, count)[:, None]
        np.add.at(cost, (rows, columns), -near_s)
        cost[np.diag_indices(count)] -= 1e-9
        held = self._held(w)
        free = [d for d in range(count) if d not in held]
        rows, columns = linear_sum_assignment(cost[np.ix_(free, free)])
        return {free[i]: free[j] for i, j in zip(rows, columns, strict=True)}


@lru_cache(maxsize=1024)
def _pattern(n: int, m: int) -> tuple[Indices, Indices, NDArray[np.float64]]:
    """``shares`` between groups of n and m devices, as arrays of shards."""
    senders, receivers, parts = zip(*shares(range(n), range(m)), strict=True)
    return np.array(senders), np.array(receivers), np.array(parts)
