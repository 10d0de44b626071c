"""The best schedule of a tiny problem, by branch and bound: annealing may miss a lonely optimum."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_spindle.planner.search.instance import Instance, Order

_MOST_LAYERS = 16
_MOST_VISITS = 20_000
Running = tuple[tuple[int, int, float], ...]
"""(MetaOp, devices, end) of each layer under way, ascending."""


def improve(instance: Instance, makespan_ms: float) -> Order | None:
    """An order, layer by layer, whose schedule is shorter than ``makespan_ms``.

    None where the problem has many layers or slices that cost something, or where nothing shorter
    was found; that is proof that there is nothing, unless the visits ran out.
    """
    if sum(instance.layers) > _MOST_LAYERS or any(any(row) for row in instance.slice_ms):
        return None
    if any(instance.pinned):
        return None
    search = _Tree(instance, makespan_ms)
    search.visit(0.0, instance.layers, (), ())
    return list(search.order) if search.order is not None else None


class _Tree:
    """Depth first over the moments at which a layer ends.

    Some best schedule starts layers only then. Each choice of what starts is tried, waiting
    included; cut where area or the longest chain says that it is too long, or where the same
    state was met no later.
    """

    def __init__(self, instance: Instance, makespan_ms: float) -> None:
        self.instance = instance
        self.best_ms = makespan_ms * (1.0 - 1e-9)
        self.order: Order | None = None
        self.visits = 0
        self.seen: dict[object, float] = {}
        rows = list(zip(instance.allocations, instance.layer_ms, strict=True))
        self.fastest = [min(ms) for _, ms in rows]
        self.leanest = [min(n * t for n, t in zip(ns, ms, strict=True)) for ns, ms in rows]

    def visit(
        self, now_ms: float, left: tuple[int, ...], running: Running, order: tuple[tuple[int, int], ...]
    ) -> None:
        if not any(left) and not running:
            self.best_ms = now_ms * (1.0 - 1e-9)
            self.order = [self.instance.slice(m, k, 1) for m, k in order]
            return
        self.visits += 1
        if self.visits > _MOST_VISITS or self._least_ms(now_ms, left, running) >= self.best_ms:
            return
        key = (left, tuple((m, n, round(end - now_ms, 7)) for m, n, end in running))
        if self.seen.get(key, float("inf")) <= now_ms:
            return
        self.seen[key] = now_ms
        free = self.instance.devices - sum(n for _, n, _ in running)
        idle = [m for m in range(len(left)) if self._ready(m, left, running)]
        for started in sorted(self._starts(idle, free), key=len, reverse=True):
            ends = [
                (m, self.instance.allocations[m][k], now_ms + self.instance.layer_ms[m][k])
                for m, k in started
            ]
            going = sorted((*running, *ends))
            if going:
                then_ms = min(end for _, _, end in going)
                rest = list(left)
                for m, _ in started:
                    rest[m] -= 1
                still = tuple(r for r in going if r[2] > then_ms + 1e-9)
                self.visit(then_ms, tuple(rest), still, order + started)

    def _ready(self, m: int, left: tuple[int, ...], running: Running) -> bool:
        busy = {r[0] for r in running}
        before = self.instance.before[m]
        return left[m] > 0 and m not in busy and all(left[b] == 0 and b not in busy for b in before)

    def _starts(self, idle: list[int], free: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """Every way to start a layer of some of the idle MetaOps: pairs (MetaOp, option)."""
        if not idle:
            yield ()
            return
        m, others = idle[0], idle[1:]
        yield from self._starts(others, free)
        for k, n in enumerate(self.instance.allocations[m]):
            if n <= free:
                for rest in self._starts(others, free - n):
                    yield ((m, k), *rest)

    def _least_ms(self, now_ms: float, left: tuple[int, ...], running: Running) -> float:
        ends = [now_ms] * len(left)
        for m, _, end in running:
            ends[m] = end
        area = sum(n * (end - now_ms) for _, n, end in running)
        for m, layers in enumerate(left):
            start = max((ends[b] for b in self.instance.before[m]), default=now_ms)
            ends[m] = max(ends[m], start) + layers * self.fastest[m]
            area += layers * self.leanest[m]
        return max(now_ms + area / self.instance.devices, *ends)
