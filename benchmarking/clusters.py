"""Clusters of ``conf/cluster``: devices by their data sheets, and the links between them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_spindle.cluster import Cluster, Link
from lightning_spindle.costs import DEVICE_KINDS, DeviceKind


@dataclass(frozen=True, slots=True)
class BuiltCluster:
    """A cluster of equal devices, with what its results are filed under."""

    name: str
    kind: DeviceKind
    cluster: Cluster


def build_cluster(config: Mapping[str, Any]) -> BuiltCluster:
    """The cluster that a composed ``cluster`` group describes.

    Args:
        config: ``name``, ``devices`` (the last island may be smaller), ``island_size`` (None: all devices
            are one island), and ``kind``, the name of one of ``lightning_spindle.costs.DEVICE_KINDS`` or
            its fields. ``cores`` says that the devices of an island are processes that share so many
            cores. ``second_half`` is a link between devices of one island in the second half of the
            islands; where their number is odd, the one in the middle is like those of the first.

    Raises:
        ValueError: for an unknown kind or setting, a number out of range, or a ``second_half`` without
            two devices in one island.
    """
    unknown = sorted(set(config) - {"name", "kind", "devices", "island_size", "second_half", "cores"})
    if unknown:
        raise ValueError(f"cluster {config['name']}: unknown settings {', '.join(unknown)}")
    kind = _kind(config["kind"])
    cluster = replace(kind.cluster(config["devices"], _island_size(config)), cores=config.get("cores"))
    if "second_half" in config:
        cluster = replace(
            cluster, islands=_second_half(config["name"], cluster, Link(**config["second_half"]))
        )
    return BuiltCluster(config["name"], kind, cluster)


def _island_size(config: Mapping[str, Any]) -> int:
    given: int | None = config["island_size"]
    return int(config["devices"]) if given is None else given


def _second_half(name: str, cluster: Cluster, link: Link) -> tuple[tuple[int, Link], ...]:
    """``Cluster.islands`` with that link in each island of the second half."""
    islands = cluster.island(cluster.devices - 1) + 1
    first = islands - islands // 2
    if min(cluster.island_size, cluster.devices - first * cluster.island_size) < 2:
        raise ValueError(
            f"cluster {name}: of {cluster.devices} devices in islands of {cluster.island_size} no two are in "
            f"one island of the second half of the islands, whose links are to differ; take more devices"
        )
    return tuple((island, link) for island in range(first, islands))


def _kind(given: str | Mapping[str, Any]) -> DeviceKind:
    if isinstance(given, Mapping):
        return DeviceKind(**{**given, "inside": Link(**given["inside"])})
    if given not in DEVICE_KINDS:
        raise ValueError(f"no kind of device is called {given!r}; there are {', '.join(DEVICE_KINDS)}")
    return DEVICE_KINDS[given]
