"""Collectives in the α-β model: latencies of a tree, bytes of a ring over the slowest link."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_spindle.cluster import Cluster, Link


def reduce_scatter_s(size_bytes: float, devices: Sequence[int], cluster: Cluster) -> float:
    """Summing ``size_bytes`` over a device group, of which each device gets its part."""
    return _half_ring_s(size_bytes, len(devices), ring_link(devices, cluster))


def all_gather_s(size_bytes: float, devices: Sequence[int], cluster: Cluster) -> float:
    """Parts that make up ``size_bytes`` become known on all devices of a group."""
    return _half_ring_s(size_bytes, len(devices), ring_link(devices, cluster))


def all_reduce_s(size_bytes: float, devices: Sequence[int], cluster: Cluster) -> float:
    """Summing ``size_bytes`` over a device group: a reduce-scatter and an all-gather."""
    return 2.0 * _half_ring_s(size_bytes, len(devices), ring_link(devices, cluster))


def ring_bytes(size_bytes: float, members: int) -> float:
    """What each member of a group sends, and gets, in an all-reduce."""
    return 2.0 * (members - 1) / members * size_bytes


def ring_link(devices: Sequence[int], cluster: Cluster) -> Link:
    """Latency and rate of a group's ring: of its island's links, or of its way between islands.

    Members of an island share the way to others; the island with the fewest members decides.
    """
    members: dict[int, int] = {}
    for d in devices:
        members[cluster.island(d)] = members.get(cluster.island(d), 0) + 1
    inside = [cluster.inside_of(island) for island, count in members.items() if count > 1]
    if len(members) <= 1:
        return inside[0] if inside else cluster.inside
    rates = [link.bytes_per_s for link in inside]
    rate = min(cluster.crossing_bytes_per_s(min(members.values())), cluster.uplink_bytes_per_s, *rates)
    return Link(cluster.between.latency_s, rate)


def _half_ring_s(size_bytes: float, n: int, link: Link) -> float:
    if n < 2:
        return 0.0
    return math.ceil(math.log2(n)) * link.latency_s + (n - 1) / n * size_bytes / link.bytes_per_s
