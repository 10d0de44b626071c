"""What it costs to sum gradients over the devices that hold a parameter (paper, section 3.6)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lightning_spindle.plan import Run
from lightning_spindle.planner.memory import Memory, bits
from lightning_spindle.planner.problem import PlanningProblem
from lightning_spindle.planner.timing import UnplacedRun

SYNC_WEIGHT = 0.05
"""What a millisecond of gradient synchronisation counts beside one of transfers: most of it overlaps
with the backward of other layers."""
FULL_SYNC_WEIGHT = 1.0
"""The same where sums take longer than the backward, as they do between islands: nothing is hidden."""


class Sync:
    """All-reduce time of parameters: 2 (k - 1)/k of their bytes, over the slowest link.

    Where holders divide optimizer state, half as much again: their new values are gathered. Across
    islands the island with the fewest members decides.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        self.cluster = problem.cluster
        self.passes = 3.0 if problem.shard_optimizer_state else 2.0
        self.known: dict[int, float] = {}

    def seconds_a_byte(self, holders: int) -> float:
        """``holders`` as a bit set."""
        found = self.known.get(holders)
        if found is None:
            found = self.known[holders] = self._over(holders.bit_count(), self._fewest(holders))
        return found

    def spread_ms(self, size: float, n: int, islands: int) -> float:
        """Over n devices, spread evenly over islands."""
        return 1e3 * size * self._over(n, max(1, n // islands) if islands > 1 else 0)

    def _fewest(self, holders: int) -> int:
        """Members in the island that has the fewest; 0 where all are in one."""
        size, last = self.cluster.island_size, holders.bit_length() - 1
        if holders == 0 or self.cluster.island((holders & -holders).bit_length() - 1) == last // size:
            return 0
        counts = np.add.reduceat(bits(holders, last + 1), np.arange(0, last + 1, size), dtype=np.int64)
        return int(counts[counts > 0].min())

    def _over(self, k: int, fewest: int) -> float:
        if k < 2:
            return 0.0
        cluster = self.cluster
        rate = cluster.inside.bytes_per_s
        if fewest:
            rate = min(rate, cluster.crossing_bytes_per_s(fewest), cluster.uplink_bytes_per_s)
        return self.passes * (k - 1) / k / rate


def sync_per_device_ms(runs: Iterable[Run], problem: PlanningProblem) -> tuple[float, ...]:
    """All-reduce time of the parameters that each device holds."""
    memory = Memory(problem)
    for r in runs:
        unplaced = UnplacedRun(r.metaop, r.first, r.last, len(r.devices), r.start_ms, r.end_ms)
        memory.take(unplaced, r.devices)
    by_holders: dict[int, float] = {}
    for name, holders in memory.holders.items():
        if name in problem.frozen:
            continue
        by_holders[holders] = by_holders.get(holders, 0.0) + memory.sizes.get(name, 0)
    sync, total = Sync(problem), np.zeros(problem.devices)
    for holders, size in sorted(by_holders.items()):
        total += 1e3 * size * sync.seconds_a_byte(holders) * bits(holders, problem.devices)
    return tuple(total.tolist())
