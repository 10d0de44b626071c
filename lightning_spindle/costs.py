"""What an iteration's parts cost: seconds of operators, messages and collectives, and bytes.

``Costs`` is what the simulator asks. ``MeasuredCosts`` answers from samples taken on the
devices, ``AnalyticCosts`` from FLOPs and bytes, for clusters that nobody has at hand.

Sizes in an ``OperatorGraph`` hold for its example batch of B rows; what has rows scales
with them. Times are seconds (``_s``), samples milliseconds (``_ms``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_spindle.cluster import Cluster, Link
from lightning_spindle.graph import Operator, OperatorGraph, Parameter, Value

EXCHANGE_BYTES = 1024
"""What the exchange of losses and logged values carries, about."""


@dataclass(frozen=True, eq=False)
class Costs(ABC):
    """Times and sizes for the programs of one graph on one cluster.

    ``state_factor``: bytes held for each byte of a trainable parameter (parameter,
    gradient, two moments: 4); a frozen one is held once.
    """

    graph: OperatorGraph
    cluster: Cluster
    state_factor: float = field(default=4.0, kw_only=True)

    def __post_init__(self) -> None:
        values, parameters = self.graph.value_map(), self.graph.parameter_map()
        trainable = {p.name for p in self.graph.parameters if p.trainable}
        carrying = self.graph.gradient_values(trainable)
        leading = self.graph.loss_operators()
        products = {
            o.name: (bool(trainable.intersection(o.parameters)) + bool(carrying.intersection(o.inputs)))
            * (o.name in leading)
            for o in self.graph.operators
        }
        object.__setattr__(self, "_operators", self.graph.operator_map())
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_parameters", parameters)
        object.__setattr__(self, "_products", products)
        object.__setattr__(self, "_rows", dict(self.graph.rows))

    _operators: Mapping[str, Operator] = field(init=False, repr=False)
    _values: Mapping[str, Value] = field(init=False, repr=False)
    _parameters: Mapping[str, Parameter] = field(init=False, repr=False)
    _products: Mapping[str, int] = field(init=False, repr=False)
    _rows: Mapping[str, int] = field(init=False, repr=False)

    @abstractmethod
    def operator_s(self, operator: str, rows: int, backward: bool) -> float:
        """One device's time for an operator at ``rows`` rows, undisturbed by others."""

    @abstractmethod
    def all_reduce_s(self, size_bytes: int, devices: Sequence[int]) -> float:
        """Summing ``size_bytes`` over a device group."""

    @abstractmethod
    def optimizer_s(self, parameter_bytes: int) -> float:
        """One optimizer step over a device's trainable parameters."""

    def message_s(self, size_bytes: float, source: int, target: int) -> float:
        """A message between two different devices on idle links."""
        return self.cluster.link(source, target).seconds(size_bytes)

    def exchange_s(self, devices: Sequence[int]) -> float:
        """Losses and logged values become known on all devices."""
        return self.all_reduce_s(EXCHANGE_BYTES, devices) if len(devices) > 1 else 0.0

    def example_rows(self, task: str) -> int:
        """Rows of the batch for which the graph's sizes hold; 1 for a task without a batch."""
        return self._rows.get(task, 1)

    def has_backward(self, operator: str) -> bool:
        """Whether gradients pass through an operator, or end in its parameters."""
        return self._products[operator] > 0

    def value_bytes(self, value: str, task: str, rows: int) -> float:
        """Bytes of ``rows`` rows of a value; all of it where it has no rows."""
        v = self._values[value]
        return v.bytes if v.dim is None else v.bytes * rows / self.example_rows(task)

    def activation_bytes(self, operator: str, rows: int) -> float:
        """What an operator keeps from forward to backward for ``rows`` rows; 0 without a backward."""
        o = self._operators[operator]
        return o.activation_bytes * rows / self.example_rows(o.task) if self.has_backward(operator) else 0.0

    def trainable_bytes(self, parameters: Iterable[str]) -> int:
        return sum(p.bytes for name in parameters if (p := self._parameters.get(name)) and p.trainable)

    def held_bytes(self, parameters: Iterable[str]) -> float:
        """What parameters take on a device that holds them, gradients and optimizer state included."""
        found = [p for name in parameters if (p := self._parameters.get(name))]
        return sum(p.bytes * (self.state_factor if p.trainable else 1.0) for p in found)


@dataclass(frozen=True, eq=False)
class MeasuredCosts(Costs):
    """Costs from samples taken on the devices.

    ``samples``: operator to rows to (forward_ms, backward_ms), piecewise linear in rows
    between samples and straight on beyond them (α-β: a latency and a time a row); one
    sample alone scales with the rows. ``collectives``: group size to (latency_s,
    bytes_per_s) of an all-reduce, piecewise linear between the sizes measured.
    ``optimizer_s_per_byte`` is the step's time for a byte of trainable parameters.

    Raises:
        ValueError: an operator of the graph has no sample; a time is not a number >= 0.
    """

    samples: Mapping[str, Mapping[int, tuple[float, float]]]
    collectives: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    optimizer_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for o in self.graph.operators:
            if not self.samples.get(o.name):
                raise ValueError(f"no sample of operator {o.name}: measure it at one number of rows at least")
            for rows, times in self.samples[o.name].items():
                if rows < 1 or not all(math.isfinite(t) and t >= 0 for t in times):
                    raise ValueError(f"invalid sample of operator {o.name}: {times} ms at {rows} rows")
        curves = {
            (name, backward): sorted((float(n), times[backward] / 1e3) for n, times in of.items())
            for name, of in self.samples.items()
            for backward in (False, True)
        }
        object.__setattr__(self, "_curves", curves)
        latencies = sorted((float(n), latency_s) for n, (latency_s, _) in self.collectives.items())
        paces = sorted((float(n), 1.0 / bytes_per_s) for n, (_, bytes_per_s) in self.collectives.items())
        object.__setattr__(self, "_latencies", latencies)
        object.__setattr__(self, "_paces", paces)

    _curves: Mapping[tuple[str, bool], list[tuple[float, float]]] = field(init=False, repr=False)
    _latencies: list[tuple[float, float]] = field(init=False, repr=False)
    _paces: list[tuple[float, float]] = field(init=False, repr=False)

    def operator_s(self, operator: str, rows: int, backward: bool) -> float:
        if rows <= 0:
            return 0.0
        curve = self._curves[operator, backward]
        if len(curve) == 1:
            return curve[0][1] * rows / curve[0][0]
        return _along(curve, rows)

    def all_reduce_s(self, size_bytes: int, devices: Sequence[int]) -> float:
        n = len(devices)
        if n < 2:
            return 0.0
        if not self._latencies:
            return _ring_s(size_bytes, n, self.cluster.group_link(devices))
        if len(self._latencies) == 1:
            return self._latencies[0][1] + size_bytes * self._paces[0][1]
        return _along(self._latencies, n) + size_bytes * _along(self._paces, n)

    def optimizer_s(self, parameter_bytes: int) -> float:
        return self.optimizer_s_per_byte * parameter_bytes


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A device by its data sheet; ``p2p`` and ``uplink`` rates as measured on such clusters.

    ``uplink_bytes_per_s``: what all devices of an island together reach to other islands.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    p2p_bytes_per_s: float
    across_bytes_per_s: float = 8.1e9
    uplink_bytes_per_s: float = 44.7e9
    inside_latency_s: float = 20e-6
    across_latency_s: float = 64e-6

    def cluster(self, devices: int, island_size: int = 8) -> Cluster:
        """``devices`` of this kind, NVLink inside islands and InfiniBand between them."""
        inside = Link(self.inside_latency_s, self.p2p_bytes_per_s)
        between = Link(self.across_latency_s, self.across_bytes_per_s)
        return Cluster(devices, island_size, inside, between, self.memory_bytes)


_GB = 10**9
_NVLINK_SHARE = 0.77
"""Share of NVLink's printed rate that an all-reduce in one node was measured to reach."""

A800 = DeviceKind("A800-80GB", 312e12, 2.0e12, 80 * _GB, 200e9 * _NVLINK_SHARE)
A100 = DeviceKind("A100-80GB", 312e12, 2.0e12, 80 * _GB, 300e9 * _NVLINK_SHARE)
H100 = DeviceKind("H100-80GB", 989e12, 3.35e12, 80 * _GB, 450e9 * _NVLINK_SHARE)
H200 = DeviceKind("H200-141GB", 989e12, 4.8e12, 141 * _GB, 450e9 * _NVLINK_SHARE)
DEVICE_KINDS = {kind.name: kind for kind in (A800, A100, H100, H200)}


@dataclass(frozen=True, eq=False)
class AnalyticCosts(Costs):
    """Costs from FLOPs and bytes: a roofline whose efficiency grows with the work of a call.

    1 / efficiency = ``floor`` + ``spread`` * sqrt(peak / 312 TFLOP/s / GFLOP of the call), fitted
    to public profiles of transformer layers on A800s (66 % of peak at d 4096, sequence
    2048; 57 % at d 2560; 37 % at d 1600, sequence 1024), within 3 % of each. A call lasts
    at least its kernels' launches (``kernels`` of ``launch_s``). Backward: as many products
    of forward's size as there are gradients to compute (of the parameters, of the inputs).
    """

    kind: DeviceKind = A800
    floor: float = 1.08
    spread: float = 13.5
    kernels: int = 12
    launch_s: float = 5e-6

    def operator_s(self, operator: str, rows: int, backward: bool) -> float:
        o = self._operators[operator]
        products = self._products[operator] if backward else 1
        if rows <= 0 or products == 0:
            return 0.0
        share = rows / self.example_rows(o.task)
        flops = o.forward_flops * share
        read = sum(self._parameters[p].bytes for p in o.parameters)
        written = sum(self._values[v].bytes for v in (*o.inputs, *o.outputs)) + o.activation_bytes
        memory_s = (read + written * share) / self.kind.memory_bytes_per_s
        return products * max(self._compute_s(flops), memory_s, self.kernels * self.launch_s)

    def _compute_s(self, flops: float) -> float:
        if flops <= 0:
            return 0.0
        pace = self.kind.flops_per_s / A800.flops_per_s
        return flops / self.kind.flops_per_s * (self.floor + self.spread * math.sqrt(pace * 1e9 / flops))

    def all_reduce_s(self, size_bytes: int, devices: Sequence[int]) -> float:
        """Ring over the slowest link; the members of an island share its way to others."""
        n = len(devices)
        if n < 2:
            return 0.0
        link = self.cluster.group_link(devices)
        islands: dict[int, int] = {}
        for d in devices:
            islands[self.cluster.island(d)] = islands.get(self.cluster.island(d), 0) + 1
        if len(islands) > 1:
            rate = min(islands.values()) * link.bytes_per_s
            rate = max(link.bytes_per_s, min(rate, self.kind.uplink_bytes_per_s))
            link = Link(link.latency_s, rate)
        return _ring_s(size_bytes, n, link)

    def optimizer_s(self, parameter_bytes: int) -> float:
        """Adam reads parameter, gradient and two moments, and writes three of them."""
        if parameter_bytes <= 0:
            return 0.0
        return self.launch_s + 7 * parameter_bytes / self.kind.memory_bytes_per_s


def _ring_s(size_bytes: float, n: int, link: Link) -> float:
    """All-reduce: latencies of a tree, bytes of a ring."""
    return 2 * math.ceil(math.log2(n)) * link.latency_s + 2 * (n - 1) / n * size_bytes / link.bytes_per_s


def _along(curve: Sequence[tuple[float, float]], x: float) -> float:
    """Piecewise linear through two points or more, its end pieces straight on, never below 0.

    An end piece that falls is taken as level: fewer rows never cost more by extrapolation.
    """
    k = min(max(bisect_left(curve, (x,)), 1), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[k - 1], curve[k]
    slope = (y1 - y0) / (x1 - x0)
    if x < x0 or x > x1:
        slope = max(0.0, slope)
    return max(0.0, y0 + (x - x0) * slope if x <= x1 else y1 + (x - x1) * slope)
