"""Devices, islands and links of a cluster (paper, section 3.5)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Time of a message in the α-β model: ``latency_s`` plus bytes over ``bytes_per_s``."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bytes_per_s <= 0:
            raise ValueError(f"invalid link: latency {self.latency_s} s, {self.bytes_per_s} bytes/s")

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Cluster:
    """``devices`` equal devices in islands of ``island_size`` (the last may be smaller).

    ``cores`` is the number of device workloads that one island can run at full speed at
    the same time: None for GPUs, the number of CPU cores where ranks share a machine.
    ``memory_bytes`` of each device, None where nobody knows.

    ``uplink_bytes_per_s``: what all devices of an island together send to other islands, and as
    much get from them. ``crossing``: (members, rate) of a sum over several islands with so many
    members in each, ascending; ``between``'s rate where none was measured. ``islands``: (island,
    link) where devices are not connected by ``inside``.

    Raises:
        ValueError: "invalid cluster: …", with the number that is out of range.
    """

    devices: int
    island_size: int
    inside: Link
    between: Link
    memory_bytes: int | None = None
    cores: int | None = None
    uplink_bytes_per_s: float = math.inf
    crossing: tuple[tuple[int, float], ...] = ()
    islands: tuple[tuple[int, Link], ...] = ()

    def __post_init__(self) -> None:
        if self.devices < 1 or self.island_size < 1:
            raise ValueError(f"invalid cluster: {self.devices} devices in islands of {self.island_size}")
        if self.cores is not None and self.cores < 1:
            raise ValueError(f"invalid cluster: {self.cores} cores")
        if self.uplink_bytes_per_s < self.between.bytes_per_s:
            raise ValueError(
                f"invalid cluster: an uplink of {self.uplink_bytes_per_s:g} bytes/s is slower than one link "
                f"between islands ({self.between.bytes_per_s:g} bytes/s)"
            )
        members = [n for n, _ in self.crossing]
        if any(n < 1 or rate <= 0 for n, rate in self.crossing) or members != sorted(set(members)):
            raise ValueError(f"invalid cluster: rates {self.crossing} of sums over several islands")

    def island(self, device: int) -> int:
        """The island of a device."""
        return device // self.island_size

    def inside_of(self, island: int) -> Link:
        """The link between two devices of an island."""
        return dict(self.islands).get(island, self.inside) if self.islands else self.inside

    def link(self, source: int, target: int) -> Link:
        """The link that a message between two different devices takes."""
        island = self.island(source)
        return self.inside_of(island) if island == self.island(target) else self.between

    def group_link(self, devices: Iterable[int]) -> Link:
        """The link that a group of devices needs: its island's, or that between islands."""
        islands = {self.island(d) for d in devices}
        return self.inside_of(next(iter(islands), 0)) if len(islands) <= 1 else self.between

    def crossing_bytes_per_s(self, members: int) -> float:
        """Rate of a sum over several islands with so many members in each, linear between measured ones."""
        if not self.crossing:
            return self.between.bytes_per_s
        k = bisect_left(self.crossing, (members,))
        if k == len(self.crossing) or k == 0:
            return self.crossing[min(k, len(self.crossing) - 1)][1]
        (n0, rate0), (n1, rate1) = self.crossing[k - 1], self.crossing[k]
        return rate0 + (rate1 - rate0) * (members - n0) / (n1 - n0)

    @classmethod
    def ideal(cls, devices: int) -> Cluster:
        """A cluster whose links cost nothing: the case of the bare planner cells."""
        free = Link(0.0, float("inf"))
        return cls(devices, devices, free, free)
