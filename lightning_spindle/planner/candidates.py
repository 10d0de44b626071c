"""Device groups for one run, best first (the guidelines of section 3.5 as one order).

1. Least communication: transfers of the run's inputs, and the synchronisation that the run
   adds for its parameters. Both are cheap inside an island, so islands follow from the costs.
2. Fewest inputs on other devices, fewest islands, contiguous and aligned groups (which also
   keeps the number of process groups small).
3. Fewest parameters that a device would have to hold anew; most memory left; lowest devices.

Where memory is what counts, 3 comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import accumulate, combinations
from math import comb

from lightning_spindle.planner.memory import Memory, Need, bit_set
from lightning_spindle.planner.problem import PlanningProblem
from lightning_spindle.planner.sync import Sync
from lightning_spindle.planner.transfers import BOTH_WAYS, Inputs, arranged, transfer_ms

Groups = Iterator[tuple[int, ...]]
_EXACT = 64
"""So many groups are all compared; of more, windows of the free devices and the best-placed ones."""
_SHORT_LIST = 8
_MANY_WINDOWS = 64


def rank(
    n: int,
    free: Sequence[int],
    inputs: Inputs,
    need: Need,
    memory: Memory,
    *,
    balance: bool,
    sync_weight: float,
) -> Groups:
    """Groups of n of the free devices, best first, each in the order of its shards; at most _EXACT."""
    cluster = memory.problem.cluster
    if n == len(free):
        return iter((arranged(free, inputs, cluster),))
    view = _View(n, free, inputs, need, memory, balance, sync_weight)
    if comb(len(free), n) <= _EXACT:
        groups = [tuple(free[i] for i in c) for c in combinations(range(len(free)), n)]
        ranked: Iterable[tuple[int, ...]] = sorted(groups, key=view.key)
    else:
        ranked = view.windows()
    return (arranged(group, inputs, cluster) for group in ranked)


class _View:
    """What is asked of many groups for the same run, computed once for each device."""

    def __init__(
        self,
        n: int,
        free: Sequence[int],
        inputs: Inputs,
        need: Need,
        memory: Memory,
        balance: bool,
        sync_weight: float,
    ) -> None:
        self.n, self.free, self.need, self.memory, self.balance = n, free, need, memory, balance
        self.sync_weight = sync_weight
        self.cluster = memory.problem.cluster
        self.given = inputs
        self.inputs = [(size, devices, frozenset(devices)) for size, devices in inputs]
        self.island = {d: self.cluster.island(d) for d in free}
        self.cost = self._inputs_ms()
        self.moved = [0] * len(free)
        for _, _, held in self.inputs:
            self.moved = [count + (d not in held) for count, d in zip(self.moved, free, strict=True)]
        self.missing = need.state_bytes.tolist()
        self.left = memory.left_after(need).tolist()
        self.added = _Added(need, memory.problem)

    def windows(self) -> Groups:
        """Short list by sums over the devices, then compared as ``key`` does; then the others."""
        n, free, island = self.n, self.free, self.island
        cost, moved = [0.0, *accumulate(self.cost)], [0, *accumulate(self.moved)]
        missing = [0.0, *accumulate([self.missing[d] for d in free])]
        sync_ms = [
            self.sync_weight * self.added.sync.spread_ms(self.added.bytes, n, k) for k in range(1, n + 1)
        ]
        rough: list[tuple[tuple[float, ...], int]] = []
        for i in self._starts():
            j = i + n
            islands = 1 + island[free[j - 1]] - island[free[i]]
            communication = round(cost[j] - cost[i] + sync_ms[min(islands, n) - 1], 6)
            parts = (communication, moved[j] - moved[i], islands, _crookedness(free[i], free[j - 1], n))
            if self.balance:
                rough.append(((-min([self.left[d] for d in free[i:j]]), *parts), i))
            else:
                rough.append(((*parts, missing[j] - missing[i]), i))
        best = [i for _, i in nsmallest(_EXACT, rough)]
        groups = [tuple(free[i : i + n]) for i in best[:_SHORT_LIST]]
        close = sorted({*groups, *self._well_placed()}, key=self.key)
        yield from close
        for i in best[_SHORT_LIST:]:
            group = tuple(free[i : i + n])
            if group not in close:
                yield group

    def key(self, group: tuple[int, ...]) -> tuple[object, ...]:
        """The order of groups; the docstring of this file in the same sequence."""
        order = arranged(group, self.given, self.cluster)
        moved_ms = sum(transfer_ms(size, source, order, self.cluster) for size, source in self.given)
        communication = round(moved_ms + self.sync_weight * self.added.ms(group), 6)
        elsewhere = sum(d not in held for _, _, held in self.inputs for d in group)
        islands = len({self.island[d] for d in group})
        crooked = _crookedness(group[0], group[-1], len(group))
        held = (
            sum(self.missing[d] for d in group),
            -min(self.left[d] for d in group),
        )
        if self.balance:
            return (-min(self.left[d] for d in group), held[0], communication, elsewhere, crooked, group)
        return (communication, elsewhere, islands, crooked, *held, group)

    def _well_placed(self) -> list[tuple[int, ...]]:
        """The n devices nearest to the inputs, and the n with the most memory left, wherever they are.

        Also, for each input, devices in the islands where its rows are.
        """
        at = range(len(self.free))
        missing = [self.missing[d] for d in self.free]
        keys = list(zip((round(c, 9) for c in self.cost), self.moved, missing, at, strict=True))
        near = [i for *_, i in nsmallest(self.n, keys)]
        found = [tuple(sorted(self.free[i] for i in near))]
        if self.need.state_bytes.any() or self.need.activation_bytes:
            found.append(
                tuple(sorted(d for _, d in nsmallest(self.n, ((-self.left[d], d) for d in self.free))))
            )
        found += [self._beside(source) for _, source in self.given]
        return found

    def _beside(self, source: Sequence[int]) -> tuple[int, ...]:
        """As many devices of each island as rows are there; the source's own first, evenly chosen."""
        own: dict[int, list[int]] = {}
        other: dict[int, list[int]] = {}
        held = set(source)
        for d in self.free:
            if d not in held:
                other.setdefault(self.island[d], []).append(d)
        for d in source:
            if d in self.island:
                own.setdefault(self.island[d], []).append(d)
        quotas: dict[int, int] = {}
        for shard in range(self.n):
            home = self.cluster.island(source[shard * len(source) // self.n])
            quotas[home] = quotas.get(home, 0) + 1
        found: list[int] = []
        for home, quota in quotas.items():
            mine = own.get(home, [])
            step = max(1, len(mine) // quota)
            found += (mine[::step][:quota] + other.get(home, []))[:quota]
        if len(found) < self.n:
            taken = set(found)
            left = sorted((d not in held, d) for d in self.free if d not in taken)
            found += [d for _, d in left[: self.n - len(found)]]
        return tuple(sorted(found))

    def _starts(self) -> Sequence[int]:
        """Where windows begin: anywhere; among many free devices at gaps, blocks and the inputs."""
        free, last = self.free, len(self.free) - self.n
        if last < _MANY_WINDOWS:
            return range(last + 1)
        near = {d for _, source, _ in self.inputs for d in (source[0], source[-1] + 1 - self.n)}
        block = max(8, 1 << (self.n - 1).bit_length())
        return [
            i
            for i in range(last + 1)
            if i == last or free[i] % block == 0 or free[i] in near or (i > 0 and free[i - 1] != free[i] - 1)
        ]

    def _inputs_ms(self) -> list[float]:
        """What each device's part of the inputs takes to arrive, averaged over the source's devices."""
        total = [0.0] * len(self.free)
        inside, between = self.cluster.inside, self.cluster.between
        for size, source, held in self.inputs:
            parts = (size / self.n, size / self.n - size / max(self.n, len(source)))
            inside_ms, between_ms = (
                [BOTH_WAYS * 1e3 * link.seconds(part) if part > 0 else 0.0 for part in parts]
                for link in (inside, between)
            )
            near = {self.cluster.island(source[0]), self.cluster.island(source[-1])}
            for i, d in enumerate(self.free):
                total[i] += (inside_ms if self.island[d] in near else between_ms)[d in held]
        return total


class _Added:
    """How much the synchronisation grows when a group holds the parameters of a run too."""

    def __init__(self, need: Need, problem: PlanningProblem) -> None:
        self.sync = Sync(problem)
        self.parts = [(holders, size) for holders, size in need.parameters if size > 0]
        self.before = self._ms(0)
        self.bytes = sum(size for _, size in self.parts)

    def ms(self, group: Sequence[int]) -> float:
        return self._ms(bit_set(group)) - self.before if self.parts else 0.0

    def _ms(self, group: int) -> float:
        return 1e3 * sum(size * self.sync.seconds_a_byte(holders | group) for holders, size in self.parts)


def _crookedness(first: int, last: int, n: int) -> int:
    """0 for an aligned contiguous group, 1 for another contiguous one, 2 for the rest."""
    if last - first != n - 1:
        return 2
    block = 1 << (n - 1).bit_length()
    return int(first % block != 0)
