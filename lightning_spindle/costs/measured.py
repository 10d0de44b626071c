"""Costs from samples taken on the devices."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_spindle.costs.base import Costs
from lightning_spindle.costs.collectives import all_reduce_s


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
            return all_reduce_s(size_bytes, devices, self.cluster)
        if len(self._latencies) == 1:
            return self._latencies[0][1] + size_bytes * self._paces[0][1]
        return _along(self._latencies, n) + size_bytes * _along(self._paces, n)

    def optimizer_s(self, parameter_bytes: int) -> float:
        return self.optimizer_s_per_byte * parameter_bytes


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
