"""Devices, islands and links of a cluster (paper, section 3.5)."""

from __future__ import annotations

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
    """

    devices: int
    island_size: int
    inside: Link
    between: Link
    memory_bytes: int | None = None
    cores: int | None = None

    def __post_init__(self) -> None:
        if self.devices < 1 or self.island_size < 1:
            raise ValueError(f"invalid cluster: {self.devices} devices in islands of {self.island_size}")
        if self.cores is not None and self.cores < 1:
            raise ValueError(f"invalid cluster: {self.cores} cores")

    def island(self, device: int) -> int:
        """The island of a device."""
        return device // self.island_size

    def link(self, source: int, target: int) -> Link:
        """The link that a message between two different devices takes."""
        return self.inside if self.island(source) == self.island(target) else self.between

    def group_link(self, devices: Iterable[int]) -> Link:
        """The slowest link among a group of devices."""
        return self.inside if len({self.island(d) for d in devices}) <= 1 else self.between

    @classmethod
    def ideal(cls, devices: int) -> Cluster:
        """A cluster whose links cost nothing: the case of the bare planner cells."""
        free = Link(0.0, float("inf"))
        return cls(devices, devices, free, free)
