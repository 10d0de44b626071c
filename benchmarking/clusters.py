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
        config: ``name``, ``devices`` (any number; the last island may be smaller), ``island_size``, and
            ``kind``, the name of one of ``lightning_spindle.costs.DEVICE_KINDS`` or its fields. ``islands``
            gives islands whose devices are connected in another way a link of their own, ``cores`` says
            that the devices of an island are processes that share so many cores.

    Raises:
        ValueError: for an unknown kind or setting, or a number out of range.
    """
    unknown = sorted(set(config) - {"name", "kind", "devices", "island_size", "islands", "cores"})
    if unknown:
        raise ValueError(f"cluster {config['name']}: unknown settings {', '.join(unknown)}")
    kind = _kind(config["kind"])
    whole = kind.cluster(config["devices"], config["island_size"])
    present = range(whole.island(whole.devices - 1) + 1)
    islands = {int(at): Link(**link) for at, link in config.get("islands", {}).items() if int(at) in present}
    cluster = replace(whole, islands=tuple(sorted(islands.items())), cores=config.get("cores"))
    return BuiltCluster(config["name"], kind, cluster)


def _kind(given: str | Mapping[str, Any]) -> DeviceKind:
    if isinstance(given, Mapping):
        return DeviceKind(**{**given, "inside": Link(**given["inside"])})
    if given not in DEVICE_KINDS:
        raise ValueError(f"no kind of device is called {given!r}; there are {', '.join(DEVICE_KINDS)}")
    return DEVICE_KINDS[given]
