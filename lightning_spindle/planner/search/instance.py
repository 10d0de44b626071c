"""A planning problem as arrays, for the search's inner loop.

Legend: MetaOp m and option k are indices; n devices, l layers, d milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_spindle.cluster import Link
from lightning_spindle.planner.problem import PlannedOp, PlanningProblem
from lightning_spindle.planner.relaxation import options
from lightning_spindle.planner.sync import Sync
from lightning_spindle.planner.transfers import BOTH_WAYS, flow_bytes

_STRIDE = 6
Slice = tuple[int, int, float, int, int]
"""(m, n, d, l, k): l layers of MetaOp m on n devices, its k-th option, for d ms. A plain tuple,
as the inner loop unpacks tens of thousands a second."""

Order = list[Slice]
"""Slices in the order in which they get devices; dependencies go forward. A MetaOp's slices
cover its layers one after the other, so which layers a slice runs follows from the order."""


@dataclass(frozen=True, slots=True)
class Instance:
    """What the search asks of a problem, by index; MetaOps in topological order.

    ``layer_ms`` includes the synchronisation of the layer's parameters and ``slice_ms`` what
    each run costs beside its layers: receiving its inputs. Both are estimates made without
    knowing the devices, and exact (nothing) where links cost nothing.
    """

    names: tuple[str, ...]
    devices: int
    layers: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    """MetaOps whose end, if it is known, the first slice waits for: dependencies and equal pins."""
    not_before: tuple[frozenset[int], ...]
    """A slice may not be ordered before slices of these: its dependencies and the MetaOp itself."""
    not_after: tuple[frozenset[int], ...]
    allocations: tuple[tuple[int, ...], ...]
    layer_ms: tuple[tuple[float, ...], ...]
    slice_ms: tuple[tuple[float, ...], ...]
    pinned: tuple[bool, ...]
    """Runs as one slice: MetaOps of one pin share a device and must not overlap."""
    tail_ms: tuple[float, ...]
    """The longest chain of MetaOps after this one, each at its fastest."""
    least_mean_ms: float
    """No schedule keeps the devices busy for less than this on average."""
    grain_ms: float
    """What one layer adds to the makespan on average: the scale of temperatures."""
    stride: int
    """Slices between two states that decoding can resume from."""
    least_ms: float
    """No schedule is shorter: the above, and the longest chain."""

    def slice(self, m: int, k: int, l: int) -> Slice:
        return (m, self.allocations[m][k], self.slice_ms[m][k] + l * self.layer_ms[m][k], l, k)

    def table(self) -> list[list[tuple[int, float]]]:
        """(n, ms of a layer) for each option of each MetaOp."""
        return [list(zip(n, ms, strict=True)) for n, ms in zip(self.allocations, self.layer_ms, strict=True)]


def instance(problem: PlanningProblem, *, exposed: float = 1.0) -> Instance:
    """Raises nothing: a problem is checked when it is made. O(metaops x (allocations + dependencies)).

    ``exposed``: share of a layer's synchronisation that lengthens it; the rest runs beside the backward
    of other layers.
    """
    metaops = problem.metaops
    index = {m.name: i for i, m in enumerate(metaops)}
    before = [tuple(index[b] for b in m.after) for m in metaops]
    followers: list[list[int]] = [[] for _ in metaops]
    for i, names in enumerate(before):
        for b in names:
            followers[b].append(i)
    costs = _LinkCosts(problem, exposed)
    rows = [_options(m, costs, problem.devices) for m in metaops]
    fastest = [m.layers * min(ms for _, ms, _ in row) for m, row in zip(metaops, rows, strict=True)]
    least = sum(m.layers * min(n * ms for n, ms, _ in row) for m, row in zip(metaops, rows, strict=True))
    tails = [0.0] * len(metaops)
    for i in range(len(metaops) - 1, -1, -1):
        tails[i] = max((fastest[j] + tails[j] for j in followers[i]), default=0.0)
    return Instance(
        names=tuple(m.name for m in metaops),
        devices=problem.devices,
        layers=tuple(m.layers for m in metaops),
        before=tuple(b + p for b, p in zip(before, _partners(metaops), strict=True)),
        not_before=tuple(frozenset((i, *b)) for i, b in enumerate(before)),
        not_after=tuple(frozenset((i, *f)) for i, f in enumerate(followers)),
        allocations=tuple(tuple(n for n, _, _ in row) for row in rows),
        layer_ms=tuple(tuple(ms for _, ms, _ in row) for row in rows),
        slice_ms=tuple(tuple(extra for _, _, extra in row) for row in rows),
        pinned=tuple(m.pin is not None for m in metaops),
        tail_ms=tuple(tails),
        least_mean_ms=least / problem.devices,
        stride=max(_STRIDE, len(metaops) // 10),
        grain_ms=least / problem.devices / sum(m.layers for m in metaops),
        least_ms=max(least / problem.devices, *(f + t for f, t in zip(fastest, tails, strict=True))),
    )


def _partners(metaops: Iterable[PlannedOp]) -> list[tuple[int, ...]]:
    """For each MetaOp those of the same pin, without itself."""
    pins = [m.pin for m in metaops]
    return [
        tuple(j for j, other in enumerate(pins) if j != i and pin is not None and other == pin)
        for i, pin in enumerate(pins)
    ]


def _options(op: PlannedOp, costs: _LinkCosts, devices: int) -> list[tuple[int, float, float]]:
    """(n, ms of a layer with its synchronisation, ms of each slice), without options that others beat."""
    if op.pin is not None:
        n = op.allocations[0]
        return [(n, op.time(n).total_ms + costs.layer_ms(op, n), costs.slice_ms(op, n))]
    found: list[tuple[int, float, float]] = []
    for n, ms in options(op, devices):
        layer_ms = ms + costs.layer_ms(op, n)
        if not found or layer_ms < found[-1][1]:
            found.append((n, layer_ms, costs.slice_ms(op, n)))
    return found


class _LinkCosts:
    """Rough costs of links for an allocation whose devices are not known yet."""

    def __init__(self, problem: PlanningProblem, exposed: float) -> None:
        self.problem, self.exposed = problem, exposed
        self.sizes: Mapping[str, int] = {p: n for p, n in problem.parameter_bytes if p not in problem.frozen}
        self.sync = Sync(problem)
        self.inputs: dict[str, int] = {}
        for (_, target), size in flow_bytes(problem.flows).items():
            self.inputs[target] = self.inputs.get(target, 0) + size

    def layer_ms(self, op: PlannedOp, n: int) -> float:
        """Summing the gradients of one layer's parameters over n devices, latency left out (buckets)."""
        if n < 2 or not op.layer_parameters:
            return 0.0
        total = sum(self.sizes.get(name, 0) for name in {p for layer in op.layer_parameters for p in layer})
        islands = -(-n // self.problem.cluster.island_size)
        size = total / op.configuration(n).tensor / op.layers
        return self.exposed * self.sync.spread_ms(size, n, islands)

    def slice_ms(self, op: PlannedOp, n: int) -> float:
        """Receiving the larger of the MetaOp's inputs and what its layers hand on, and its gradient."""
        size = max(self.inputs.get(op.name, 0), op.layer_flow_bytes)
        return BOTH_WAYS * 1e3 * self._link(n).seconds(size / n) if size else 0.0

    def _link(self, n: int) -> Link:
        cluster = self.problem.cluster
        return cluster.inside if n <= cluster.island_size else cluster.between
