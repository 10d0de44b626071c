"""What an iteration's parts cost: seconds of operators, messages and collectives, and bytes.

``Costs`` is what the simulator asks. ``MeasuredCosts`` answers from samples taken on the
devices, ``AnalyticCosts`` from FLOPs and bytes, for clusters that nobody has at hand; the
functions that it is made of (``pass_s``, ``all_gather_s``, …) serve whoever divides the work
in another way.
"""

from lightning_spindle.costs.analytic import AnalyticCosts
from lightning_spindle.costs.base import EXCHANGE_BYTES, Costs
from lightning_spindle.costs.collectives import all_gather_s, all_reduce_s, reduce_scatter_s, ring_bytes
from lightning_spindle.costs.devices import (
    A100,
    A800,
    DEVICE_KINDS,
    H100,
    H200,
    DeviceKind,
    Work,
    optimizer_step_s,
    pass_s,
)
from lightning_spindle.costs.measured import MeasuredCosts
from lightning_spindle.costs.state import FULL, MIXED, State

__all__ = [
    "A100",
    "A800",
    "DEVICE_KINDS",
    "EXCHANGE_BYTES",
    "FULL",
    "H100",
    "H200",
    "MIXED",
    "AnalyticCosts",
    "Costs",
    "DeviceKind",
    "MeasuredCosts",
    "State",
    "Work",
    "all_gather_s",
    "all_reduce_s",
    "optimizer_step_s",
    "pass_s",
    "reduce_scatter_s",
    "ring_bytes",
]
