"""Where the search starts: rounded optima of the LP across levels, and other planners' plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_spindle.planner.bounds import Relaxation
from lightning_spindle.planner.search.instance import Instance, Order
from lightning_spindle.planner.timing import UnplacedRun


def rounded(instance: Instance, relaxation: Relaxation) -> list[Order]:
    """Orders with the LP's layers per allocation, rounded to whole layers.

    One order for each pair of rules: which MetaOp comes first (the longest rest, or the earliest
    start), and whether a MetaOp runs wide or narrow first.
    """
    shares = [_whole(layers, total) for layers, total in zip(relaxation.layers, instance.layers, strict=True)]
    shares = [s[-1:] if p else s for s, p in zip(shares, instance.pinned, strict=True)]
    return [
        order_by(instance, shares, wide_first=wide_first, longest_rest=longest_rest)
        for wide_first in (False, True)
        for longest_rest in (True, False)
    ]


def one_slice_each(instance: Instance, order: Order) -> Order:
    """Each MetaOp on one allocation alone, that of its most layers, in the order of first slices."""
    most: dict[int, tuple[int, int]] = {}
    for m, _, _, l, k in order:
        most[m] = max(most.get(m, (0, 0)), (l, k))
    return [instance.slice(m, k, instance.layers[m]) for m, (_, k) in most.items()]


def from_runs(instance: Instance, runs: Iterable[UnplacedRun]) -> Order | None:
    """The order of another planner's runs; None where it uses allocations that the search does not."""
    index = {name: m for m, name in enumerate(instance.names)}
    order: Order = []
    for run in sorted(runs, key=lambda r: (r.start_ms, r.end_ms, index[r.metaop], r.first)):
        m = index[run.metaop]
        if run.n not in instance.allocations[m]:
            return None
        order.append(instance.slice(m, instance.allocations[m].index(run.n), run.last - run.first))
    return order


def translated(order: Order, to: Instance) -> Order | None:
    """The same slices with the times of another instance; None where it has not their allocations."""
    found: Order = []
    for m, n, _, l, _ in order:
        if n not in to.allocations[m]:
            return None
        found.append(to.slice(m, to.allocations[m].index(n), l))
    return found


def order_by(
    instance: Instance, shares: Sequence[Sequence[tuple[int, int]]], *, wide_first: bool, longest_rest: bool
) -> Order:
    """The slices (option k, layers l) of each MetaOp in an order by priority that keeps dependencies."""
    count = len(instance.layers)
    slices = [
        [instance.slice(m, k, l) for k, l in sorted(s, reverse=wide_first)] for m, s in enumerate(shares)
    ]
    spans = [sum(s[2] for s in row) for row in slices]
    rest, head = spans[:], [0.0] * count
    for m in range(count - 1, -1, -1):
        rest[m] += max((rest[j] for j in instance.not_after[m] if j != m), default=0.0)
    for m in range(count):
        head[m] = max((head[j] + spans[j] for j in instance.not_before[m] if j != m), default=0.0)
    keyed = []
    for m, row in enumerate(slices):
        left, start = rest[m], head[m]
        for i, s in enumerate(row):
            key = (-left, 0.0) if longest_rest else (start, -rest[m])
            keyed.append((key, m, i, s))
            left, start = left - s[2], start + s[2]
    return [s for _, _, _, s in sorted(keyed, key=lambda item: item[:3])]


def _whole(layers: Sequence[float], total: int) -> list[tuple[int, int]]:
    """(option, layers) with whole layers that sum to ``total``; the largest share takes the rest."""
    used = [(k, x) for k, x in enumerate(layers) if x > 1e-6]
    largest = max(used, key=lambda kx: (kx[1], -kx[0]))[0]
    rounded = {k: int(x + 0.5) for k, x in used if k != largest}
    rest = total - sum(rounded.values())
    if rest <= 0:
        return [(largest, total)]
    return [(k, l) for k, l in sorted({**rounded, largest: rest}.items()) if l > 0]
