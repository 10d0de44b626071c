"""Resource allocator: how many devices for how many layers (paper, section 3.3 and appendix B).

The allocator relaxes one MetaLevel to a malleable project scheduling problem, solves that by
bisection and turns the real-valued allocations n* into two whole ones for each MetaOp.

Legend: L layers, n devices, T(n) milliseconds of one layer on n devices, C* the optimum of the
relaxed problem in milliseconds. C* is no lower bound of what is reachable: T between two valid
allocations is an interpolation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lightning_spindle.graph import Layout
from lightning_spindle.planner.problem import PlannedOp


class Interpolation(StrEnum):
    """What T is between two neighbouring valid allocations."""

    SPEED = "speed"
    """1/T is linear in n: half way between them means half the *time* on each (figure 5a)."""
    TIME = "time"
    """T is linear in n: half way between them means half the *layers* on each (equation 11)."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """T over the allocations worth using: ascending n, strictly falling ``times_ms``.

    Theorem 1 asks for a non-increasing T. An allocation that is no faster than a smaller one is
    left out, as the smaller one does the same work with devices to spare.
    """

    allocations: tuple[int, ...]
    times_ms: tuple[float, ...]

    def time_ms(self, n: int) -> float:
        return self.times_ms[self.allocations.index(n)]

    def at_most(self, devices: int) -> int | None:
        """The largest (hence fastest) allocation of at most ``devices``, None where there is none."""
        fitting = [n for n in self.allocations if n <= devices]
        return fitting[-1] if fitting else None


@dataclass(frozen=True, slots=True)
class Demand:
    """A MetaOp as the allocator sees it."""

    name: str
    layers: int
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class ASLTuple:
    """⟨n, s, l⟩: ``layers`` consecutive layers on ``n`` devices from ``start_ms`` (None: not yet known).

    ``layers`` is real between the two steps of the discretisation, whole afterwards.
    """

    n: int
    layers: float
    start_ms: float | None = None


@dataclass(frozen=True, slots=True)
class ContinuousOptimum:
    """C* and for each MetaOp n*, in the order of the demands (equations 8 and 9)."""

    c_star_ms: float
    allocations: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Bracket:
    """The valid allocations next to n*, below ≤ n* ≤ above.

    ``share`` is how far n* lies between them: n* = share·above + (1 - share)·below.
    ``below`` is 0 for a dummy allocation.
    """

    below: int
    above: int
    share: float

    @property
    def n(self) -> float:
        return self.share * self.above + (1.0 - self.share) * self.below


def envelope(op: PlannedOp, devices: int) -> Envelope:
    """The allocations of a MetaOp worth using on a cluster of that many devices.

    A MetaOp that couples samples, or shares a device with others, has one device.
    """
    one_device = op.layout is Layout.WHOLE or op.pin is not None
    limit = 1 if one_device else devices
    allocations: list[int] = []
    times: list[float] = []
    for n, time in op.times:
        if n <= limit and (not times or time.total_ms < times[-1]):
            allocations.append(n)
            times.append(time.total_ms)
    if not allocations:
        raise ValueError(
            f"MetaOp {op.name}: no valid allocation within {limit} devices (has {op.allocations})"
        )
    return Envelope(tuple(allocations), tuple(times))


def inverse(curve: Envelope, target_ms: float, interpolation: Interpolation) -> Bracket:
    """Find_Inverse_Value of algorithm 2: n with T(n) = ``target_ms``, between its valid neighbours.

    Slower than the smallest allocation n₁: the MetaOp occupies n₁ for T(n₁)/target of the time
    and a dummy allocation of no devices for the rest. Faster than the largest: the largest.
    """
    n, t = curve.allocations, curve.times_ms
    if target_ms >= t[0]:
        return Bracket(0, n[0], t[0] / target_ms)
    if target_ms <= t[-1]:
        return Bracket(n[-1], n[-1], 1.0)
    above = bisect_left(t, -target_ms, key=lambda x: -x)
    slow, fast = t[above - 1], t[above]
    if interpolation is Interpolation.TIME:
        share = (slow - target_ms) / (slow - fast)
    else:
        share = (1 / target_ms - 1 / slow) / (1 / fast - 1 / slow)
    return Bracket(n[above - 1], n[above], min(1.0, max(0.0, share)))


def continuous_optimum(
    demands: Sequence[Demand],
    devices: int,
    interpolation: Interpolation = Interpolation.SPEED,
    *,
    tolerance: float = 1e-12,
) -> ContinuousOptimum:
    """Theorem 1 by the bisection of algorithm 2.

    All MetaOps start together, end together at C* and fill the devices: Σ n* = N, unless every
    MetaOp at its largest allocation still leaves some idle; then C* is the slowest one's time.
    """

    def allocations(c_ms: float) -> list[float]:
        return [inverse(d.envelope, c_ms / d.layers, interpolation).n for d in demands]

    low = max(d.envelope.times_ms[-1] * d.layers for d in demands)
    high = sum(d.envelope.allocations[0] * d.envelope.times_ms[0] * d.layers for d in demands)
    high = max(low, high)
    if sum(allocations(low)) <= devices:
        high = low
    while high - low > tolerance * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if sum(allocations(middle)) <= devices:
            high = middle
        else:
            low = middle
    return ContinuousOptimum(high, tuple(allocations(high)))


def discretise(demand: Demand, c_star_ms: float, interpolation: Interpolation) -> tuple[ASLTuple, ...]:
    """Bi-point discretisation, before rounding: at most two tuples, the wider first.

    They fulfil condition (10a), Σ l = L, and (10b), Σ T(n)·l = C*; with a dummy allocation
    (n = 0, which has no layers and is left out) its idle time makes up the rest of (10b).
    """
    curve, layers = demand.envelope, float(demand.layers)
    bracket = inverse(curve, c_star_ms / layers, interpolation)
    if bracket.below == 0 or bracket.below == bracket.above:
        return (ASLTuple(bracket.above, layers),)
    if interpolation is Interpolation.TIME:
        wide = bracket.share * layers
    else:
        wide = bracket.share * c_star_ms / curve.time_ms(bracket.above)
    wide = min(layers, max(0.0, wide))
    return (ASLTuple(bracket.above, wide), ASLTuple(bracket.below, layers - wide))


def round_layers(tuples: Sequence[ASLTuple]) -> tuple[ASLTuple, ...]:
    """Layers to the nearest whole numbers that keep their sum (10a); tuples without layers go.

    Halves go to the first (wider) tuple, so that two tuples never both round up.
    """
    total = round(sum(t.layers for t in tuples))
    rounded: list[ASLTuple] = []
    for t in tuples[:-1]:
        rounded.append(ASLTuple(t.n, int(t.layers + 0.5)))
    rounded.append(ASLTuple(tuples[-1].n, total - sum(int(t.layers) for t in rounded)))
    return tuple(t for t in rounded if t.layers > 0)


@dataclass(frozen=True, slots=True)
class AllocationPlan:
    """What the allocator gives to the scheduler for one MetaLevel."""

    c_star_ms: float
    tuples: tuple[tuple[str, tuple[ASLTuple, ...]], ...]


def allocate(
    demands: Sequence[Demand], devices: int, interpolation: Interpolation = Interpolation.SPEED
) -> AllocationPlan:
    """C* and the rounded ASL tuples of each MetaOp of one MetaLevel (figure 5a)."""
    optimum = continuous_optimum(demands, devices, interpolation)
    plan = tuple((d.name, round_layers(discretise(d, optimum.c_star_ms, interpolation))) for d in demands)
    return AllocationPlan(optimum.c_star_ms, plan)
