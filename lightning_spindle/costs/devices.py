"""Devices by their data sheets, and what a pass over an operator takes on one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_spindle.cluster import Cluster, Link
from lightning_spindle.costs.state import FULL, State

KERNEL_S = 5e-6
"""Starting a kernel."""
EAGER_OP_S = 10e-6
"""Starting an operation from Python: an operator lasts as long as that takes, however few its rows."""
EAGER_OPS = 12
"""Operations of one of our operators, about: a transformer layer's."""

_FLOOR, _SPREAD = 1.04, 26.0
_FITTED_FLOPS_PER_S = 312e12


@dataclass(frozen=True, slots=True)
class Work:
    """One pass over an operator on one device: ``moved_bytes`` are read from memory or written to it."""

    flops: float
    moved_bytes: float
    operations: int = EAGER_OPS


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A device by its data sheet; ``inside`` is the link between two of one island, as measured."""

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    inside: Link

    def cluster(self, devices: int, island_size: int = 8) -> Cluster:
        """``devices`` of this kind in nodes that are connected as the paper's (400 Gb/s InfiniBand).

        Rates between nodes are those of public profiles of an A800 cluster, in which all eight
        devices of a node talked at the same time.
        """
        return Cluster(
            devices,
            island_size,
            self.inside,
            Link(64e-6, _CROSSING[0][1]),
            self.memory_bytes,
            uplink_bytes_per_s=8 * _CROSSING[0][1],
            crossing=_CROSSING,
        )


_CROSSING = ((1, 8.1e9), (2, 16.2e9), (4, 20.8e9), (8, 44.7e9))
"""Bus bandwidth of an all-reduce over two nodes by a group's members in each."""
_GB = 10**9
_NVLINK_SHARE = 0.77
"""Share of NVLink's printed rate that an all-reduce in one node was measured to reach."""


def _nvlink(printed_bytes_per_s: float) -> Link:
    return Link(20e-6, printed_bytes_per_s * _NVLINK_SHARE)


A800 = DeviceKind("A800-80GB", 312e12, 2.0e12, 80 * _GB, _nvlink(200e9))
A100 = DeviceKind("A100-80GB", 312e12, 2.0e12, 80 * _GB, _nvlink(300e9))
H100 = DeviceKind("H100-80GB", 989e12, 3.35e12, 80 * _GB, _nvlink(450e9))
H200 = DeviceKind("H200-141GB", 989e12, 4.8e12, 141 * _GB, _nvlink(450e9))
DEVICE_KINDS = {kind.name: kind for kind in (A800, A100, H100, H200)}


def pass_s(work: Work, kind: DeviceKind) -> float:
    """A pass over an operator, undisturbed: a roofline whose efficiency grows with the work of a call.

    The longest of computing, moving bytes and starting operations. Peak over reached FLOP/s is
    ``1.04 + 26 sqrt(p / GFLOP)`` with p the peak over 312 TFLOP/s, so that devices of another speed
    are as efficient at equal time. The two numbers are fitted to public profiles of transformer
    layers on A800s: forward of a layer (d 4096, 2560, 1600) at batch 4, and of two layers with
    embedding and head at batch 1 to 16; within 8 % of each (``tests/test_costs.py``).
    """
    moving_s = work.moved_bytes / kind.memory_bytes_per_s
    return max(_computing_s(work.flops, kind), moving_s, work.operations * EAGER_OP_S)


def _computing_s(flops: float, kind: DeviceKind) -> float:
    if flops <= 0:
        return 0.0
    pace = kind.flops_per_s / _FITTED_FLOPS_PER_S
    return flops / kind.flops_per_s * (_FLOOR + _SPREAD * math.sqrt(pace * 1e9 / flops))


def optimizer_step_s(parameter_bytes: float, kind: DeviceKind, state: State = FULL) -> float:
    """One step of Adam over ``parameter_bytes`` of parameters, in one kernel: moving its state."""
    if parameter_bytes <= 0:
        return 0.0
    return KERNEL_S + state.moved_by_step() * parameter_bytes / kind.memory_bytes_per_s
