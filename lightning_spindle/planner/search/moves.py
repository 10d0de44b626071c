"""Moves: small random changes of an order.

Each returns a new order, the first index changed, and by how many device milliseconds its slices grew.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from random import Random

from lightning_spindle.planner.search.instance import Instance, Order, Slice

Moved = tuple[Order, int, float] | None
"""None where the move does not apply at this index."""
Move = Callable[["Moves", Order, int], Moved]

_REACH = 5.0
"""Places that a slice moves in the order, on average."""
_SHIFTED = 1.5
"""Layers that go from one slice to its neighbour, on average."""


class Moves:
    """The neighbourhood of an order.

    ``split``: a MetaOp may run as several slices; without it each keeps one allocation.
    """

    def __init__(self, instance: Instance, random: Random, *, split: bool) -> None:
        self.instance = instance
        self.random = random.random
        self.split = split

    def propose(self, order: Order, i: int) -> Moved:
        """A random move of the slice at index i."""
        u = self.random()
        if not self.split:
            return self._reorder(order, i) if u < 0.6 else self._reallocate(order, i)
        if u < 0.4:
            return self._reorder(order, i)
        if u < 0.65:
            return self._reallocate(order, i)
        if u < 0.85:
            return self._shift(order, i)
        return self._divide(order, i)

    def _distance(self, mean: float) -> int:
        """At least 1, geometric-like: most moves are small."""
        return 1 + int(-log(1.0 - self.random()) * mean)

    def _earliest(self, order: Order, i: int, places: int) -> int:
        """Where the slice at i gets to when it goes up to ``places`` towards the front."""
        fence, least = self.instance.not_before[order[i][0]], max(0, i - places)
        while i > least and order[i - 1][0] not in fence:
            i -= 1
        return i

    def _latest(self, order: Order, i: int, places: int) -> int:
        fence, most = self.instance.not_after[order[i][0]], min(len(order) - 1, i + places)
        while i < most and order[i + 1][0] not in fence:
            i += 1
        return i

    def _reorder(self, order: Order, i: int) -> Moved:
        places = self._distance(_REACH)
        earlier = self.random() < 0.5
        j = self._earliest(order, i, places) if earlier else self._latest(order, i, places)
        if j == i:
            return None
        new = order[:]
        new.insert(j, new.pop(i))
        return new, min(i, j), 0.0

    def _reallocate(self, order: Order, i: int) -> Moved:
        m, _, _, l, k = order[i]
        k += 1 if self.random() < 0.5 else -1
        if not 0 <= k < len(self.instance.allocations[m]):
            return None
        new = order[:]
        new[i] = self.instance.slice(m, k, l)
        return new, i, _area(new[i]) - _area(order[i])

    def _shift(self, order: Order, i: int) -> Moved:
        """Layers go between a slice and the next (or previous) one of its MetaOp; a slice left empty goes."""
        m = order[i][0]
        j = next((j for j in range(i + 1, len(order)) if order[j][0] == m), None)
        if j is None:
            j, i = i, next((j for j in range(i - 1, -1, -1) if order[j][0] == m), -1)
            if i < 0:
                return None
        first, second = order[i], order[j]
        x = self._distance(_SHIFTED) if self.random() < 0.5 else -self._distance(_SHIFTED)
        a, b = first[3] + x, second[3] - x
        new = order[:]
        make = self.instance.slice
        if a > 0 and b > 0:
            new[i], new[j] = make(m, first[4], a), make(m, second[4], b)
            after = _area(new[i]) + _area(new[j])
        else:
            merged = make(m, first[4] if b <= 0 else second[4], a + b)
            kept, gone = (i, j) if self.random() < 0.5 else (j, i)
            new[kept] = merged
            del new[gone]
            after = _area(merged)
        return new, i, after - _area(first) - _area(second)

    def _divide(self, order: Order, i: int) -> Moved:
        """One slice becomes two, on neighbouring allocations or the same, one of them elsewhere."""
        m, _, _, l, k = order[i]
        if l < 2 or self.instance.pinned[m]:
            return None
        u = self.random()
        other = k + 1 if u < 0.4 else k - 1 if u < 0.8 else k
        if not 0 <= other < len(self.instance.allocations[m]):
            return None
        part = 1 + int(self.random() * (l - 1))
        pieces = self.instance.slice(m, k, part), self.instance.slice(m, other, l - part)
        grown = _area(pieces[0]) + _area(pieces[1]) - _area(order[i])
        first, second = pieces if self.random() < 0.5 else pieces[::-1]
        new = order[:]
        places = self._distance(_REACH) - 1
        if self.random() < 0.5:
            new[i] = first
            new.insert(self._latest(order, i, places) + 1, second)
            return new, i, grown
        j = self._earliest(order, i, places)
        new[i] = second
        new.insert(j, first)
        return new, j, grown


def _area(piece: Slice) -> float:
    return piece[1] * piece[2]
