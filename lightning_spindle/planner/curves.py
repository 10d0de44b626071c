"""Scalability estimator: scaling curves T_m(n) from samples (paper, section 3.2 and appendix A).

A curve is piecewise α-β: T(n) = α + β/n milliseconds on each range of n, where α gathers what
does not shrink with n (launches, communication) and β what is divided among the devices.
Pieces differ because kernels do with the work of a device.

Each way of dividing a layer beyond its data (tensor and sequence degree) has its own curve; T_m(n)
is the best of them. How far to trust a curve is told by its leave-one-out error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from lightning_spindle.plan import Configuration
from lightning_spindle.planner.problem import LayerTime


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: milliseconds of a layer under a configuration of n devices."""

    configuration: Configuration
    ms: float

    @property
    def n(self) -> int:
        return self.configuration.devices


@dataclass(frozen=True, slots=True)
class Piece:
    """T(n) = alpha_ms + beta_ms / n for n up to ``last_n`` (the last piece: for all larger n)."""

    last_n: float
    alpha_ms: float
    beta_ms: float

    def time_ms(self, n: float) -> float:
        return self.alpha_ms + self.beta_ms / n


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """T(n) of one way of dividing a layer.

    ``fit_error`` is the largest relative error on the samples, ``leave_one_out_error`` the mean
    relative error of predicting each sample from the others; None with fewer than three samples.
    """

    pieces: tuple[Piece, ...]
    samples: tuple[tuple[float, float], ...]
    fit_error: float
    leave_one_out_error: float | None

    def time_ms(self, n: float) -> float:
        return _time_ms(self.pieces, n)

    def scalability(self, n: float) -> float:
        """ς(n) = T(1) / T(n)."""
        return self.time_ms(1) / self.time_ms(n)


def fit(samples: Iterable[tuple[float, float]], *, max_pieces: int = 3) -> ScalingCurve:
    """Fits (n, ms) samples; several at one n count as their median.

    The number of pieces is the one that predicts left-out samples best, fewer where equal. A
    piece covers at least two samples, with α, β ≥ 0 and least squares of the relative errors;
    between pieces the border is the geometric mean of the samples next to it. One sample
    alone is taken as divisible work (α = 0).

    Raises:
        ValueError: no sample, or one that is not a positive number.
    """
    points = _points(samples)
    most = max(1, min(max_pieces, len(points) // 2))
    errors = {k: _leave_one_out(points, k) for k in range(1, most + 1)}
    chosen = min(errors, key=lambda k: (round(errors[k] or 0.0, 4), k))
    pieces = _fit_pieces(points, chosen)
    worst = max(abs(_time_ms(pieces, n) / ms - 1.0) for n, ms in points)
    return ScalingCurve(pieces, tuple(points), worst, errors[chosen])


@dataclass(frozen=True, slots=True)
class CurveSet:
    """The curves of a layer by (tensor, sequence) degree."""

    curves: tuple[tuple[tuple[int, int], ScalingCurve], ...]

    def time_ms(self, configuration: Configuration, batch: int | None = None) -> float:
        """T under a configuration; with the batch, of its largest shard where shards are ragged.

        Raises:
            ValueError: its tensor and sequence degrees were never measured.
        """
        for degrees, curve in self.curves:
            if degrees == (configuration.tensor, configuration.sequence):
                data: float = configuration.data
                if batch is not None:
                    data = batch / math.ceil(batch / configuration.data)
                return curve.time_ms(data * configuration.tensor * configuration.sequence)
        raise ValueError(f"no sample of a layer with the degrees of {configuration}")

    def covers(self, configuration: Configuration) -> bool:
        return (configuration.tensor, configuration.sequence) in dict(self.curves)


def fit_set(samples: Iterable[Sample], *, max_pieces: int = 3) -> CurveSet:
    """One curve for each (tensor, sequence) degree among the samples."""
    families: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for s in samples:
        degrees = (s.configuration.tensor, s.configuration.sequence)
        families.setdefault(degrees, []).append((s.n, s.ms))
    return CurveSet(tuple((d, fit(families[d], max_pieces=max_pieces)) for d in sorted(families)))


def valid_configurations(
    batch: int,
    devices: int,
    *,
    any_n: bool = False,
    tensor: Sequence[int] = (1,),
    sequence: Sequence[int] = (1,),
    island: int | None = None,
) -> tuple[Configuration, ...]:
    """Every data x tensor x sequence division within the devices that is worth having.

    The data degree divides the batch; with ``any_n`` it is any number up to the batch (shards
    differ by one row, and the largest has ceil(B / n)). The devices of one tensor and
    sequence group must lie in an island, so their number divides its size.
    """
    found = []
    for t in sorted(set(tensor)):
        for s in sorted(set(sequence)):
            if island is not None and island % (t * s):
                continue
            for data in range(1, min(batch, devices // (t * s)) + 1):
                if any_n or batch % data == 0:
                    found.append(Configuration(data, t, s))
    return tuple(sorted(found, key=lambda c: (c.devices, c.tensor, c.sequence)))


def valid_allocations(
    batch: int,
    devices: int,
    any_n: bool = False,
    *,
    tensor: Sequence[int] = (1,),
    sequence: Sequence[int] = (1,),
    island: int | None = None,
) -> tuple[int, ...]:
    """The n of ``valid_configurations``, ascending."""
    found = valid_configurations(batch, devices, any_n=any_n, tensor=tensor, sequence=sequence, island=island)
    return tuple(sorted({c.devices for c in found}))


def best_times(
    forward: CurveSet, backward: CurveSet | None, batch: int, configurations: Iterable[Configuration]
) -> tuple[tuple[tuple[int, LayerTime], ...], tuple[tuple[int, Configuration], ...]]:
    """T_m(n), the best of the configurations of n devices, and which one it is.

    The two results are ``PlannedOp.times`` and ``PlannedOp.configurations``. Configurations whose
    degrees were not measured are left out.
    """
    best: dict[int, tuple[float, LayerTime, Configuration]] = {}
    for c in configurations:
        if not forward.covers(c) or not (backward is None or backward.covers(c)):
            continue
        back_ms = 0.0 if backward is None else backward.time_ms(c, batch)
        time = LayerTime(forward.time_ms(c, batch), back_ms)
        if c.devices not in best or time.total_ms < best[c.devices][0]:
            best[c.devices] = (time.total_ms, time, c)
    times = tuple((n, best[n][1]) for n in sorted(best))
    return times, tuple((n, best[n][2]) for n in sorted(best))


def _time_ms(pieces: Sequence[Piece], n: float) -> float:
    return next((p for p in pieces if n <= p.last_n), pieces[-1]).time_ms(n)


def _points(samples: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    by_n: dict[float, list[float]] = {}
    for n, ms in samples:
        if not (math.isfinite(n) and n > 0 and math.isfinite(ms) and ms > 0):
            raise ValueError(f"invalid sample: {ms} ms on {n} devices")
        by_n.setdefault(n, []).append(ms)
    if not by_n:
        raise ValueError("no sample to fit a scaling curve to")
    return [(n, median(by_n[n])) for n in sorted(by_n)]


def _leave_one_out(points: Sequence[tuple[float, float]], pieces: int) -> float | None:
    if len(points) < 3:
        return None
    errors = []
    for i, (n, ms) in enumerate(points):
        others = [p for j, p in enumerate(points) if j != i]
        fitted = _fit_pieces(others, min(pieces, max(1, len(others) // 2)))
        errors.append(abs(_time_ms(fitted, n) / ms - 1.0))
    return sum(errors) / len(errors)


def _fit_pieces(points: Sequence[tuple[float, float]], pieces: int) -> tuple[Piece, ...]:
    """The division of the samples into that many pieces with the least squares: dynamic programming."""
    count = len(points)
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 0): (0.0, ())}
    least = 2 if count > 1 else 1
    for k in range(1, pieces + 1):
        for end in range(least * k, count + 1):
            options = [
                (best[k - 1, start][0] + _fit_piece(points[start:end])[2], (*best[k - 1, start][1], end))
                for start in range(least * (k - 1), end - least + 1)
                if (k - 1, start) in best
            ]
            if options:
                best[k, end] = min(options)
    found: list[Piece] = []
    start = 0
    for end in best[pieces, count][1]:
        alpha, beta, _ = _fit_piece(points[start:end])
        border = math.inf if end == count else math.sqrt(points[end - 1][0] * points[end][0])
        found.append(Piece(border, alpha, beta))
        start = end
    return tuple(found)


def _fit_piece(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """α, β ≥ 0 with the least Σ ((α + β/n)/T - 1)², and that sum."""
    ones = [1.0 / ms for _, ms in points]
    shares = [1.0 / (n * ms) for n, ms in points]
    aa, bb = sum(u * u for u in ones), sum(v * v for v in shares)
    ab, a1, b1 = sum(u * v for u, v in zip(ones, shares, strict=True)), sum(ones), sum(shares)
    determinant = aa * bb - ab * ab
    options = [(0.0, b1 / bb), (a1 / aa, 0.0)]
    if len(points) > 1 and determinant > 1e-12 * aa * bb:
        alpha, beta = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if alpha >= 0 and beta >= 0:
            options.insert(0, (alpha, beta))

    def squares(option: tuple[float, float]) -> float:
        return sum((option[0] * u + option[1] * v - 1.0) ** 2 for u, v in zip(ones, shares, strict=True))

    alpha, beta = min(options, key=squares) if len(points) > 1 else options[0]
    return alpha, beta, squares((alpha, beta))
