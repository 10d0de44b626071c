"""Simulated annealing over orders (Kirkpatrick, Gelatt & Vecchi 1983), most moves on the blocking chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from random import Random
from time import perf_counter

from lightning_spindle.planner.search.decode import Schedule, blocking, decode, resume
from lightning_spindle.planner.search.instance import Instance, Order
from lightning_spindle.planner.search.moves import Moves


@dataclass(frozen=True, slots=True)
class Cooling:
    """How the search cools: temperatures in grains (``Instance.grain_ms``), falling geometrically."""

    hot: float = 2.0
    cold: float = 0.05
    on_chain: float = 0.8
    """Share of the moves that touch the blocking chain."""
    mean_weight: float = 0.3
    """Weight of the mean time at which devices get free: it tells apart schedules of one makespan."""
    slice_weight: float = 0.0
    """Cost of each slice as a share of the makespan: fewer splits where they gain nothing."""

    def value(self, schedule: Schedule) -> float:
        """What tells the best schedule."""
        return schedule.makespan_ms * (1.0 + self.slice_weight * len(schedule.order))


class Clock:
    """A cap on planning time. ``capped`` becomes True when the cap, not the moves, ends the search."""

    def __init__(self, limit_s: float | None) -> None:
        self.started_s = perf_counter()
        self.limit_s = limit_s
        self.capped = False

    def elapsed_s(self) -> float:
        return perf_counter() - self.started_s

    def passed(self, share: float = 1.0) -> bool:
        """True, for good, once that share of the limit is over."""
        if self.limit_s is not None and self.elapsed_s() > share * self.limit_s:
            self.capped = True
            return True
        return False


@dataclass(frozen=True, slots=True)
class Budget:
    """Moves, and the share of the clock's limit by which they must be over."""

    moves: int
    clock: Clock
    until: float

    def part(self, share: float, left: float = 1.0) -> Budget:
        """The next ``share`` of this budget, of which the share ``left`` is not used yet."""
        now = self.clock.elapsed_s() / self.clock.limit_s if self.clock.limit_s else 0.0
        return Budget(max(1, int(share * self.moves)), self.clock, now + share / left * (self.until - now))


_STARTS = 8
_FIRST_SHARE = 0.7
"""Separate starts, and the share of the moves that they get together."""
_CHECK = 4000
"""Moves times slices between two looks at the clock, and between two temperatures."""
_LATE = 0.15
"""A search whose clock is this much further than its moves will be ended by the clock: it cools by it."""


def anneal(
    instance: Instance,
    order: Order,
    budget: Budget,
    random: Random,
    cooling: Cooling,
    *,
    split: bool = True,
) -> Schedule:
    """The best schedule that the budget's moves from ``order`` find; never worse than ``order`` itself.

    ``split``: MetaOps may run as several slices. Deterministic unless ``budget.clock.capped`` gets True.
    """
    now = best = decode(instance, order)
    scale = instance.grain_ms
    weight, per_slice = cooling.mean_weight / instance.devices, cooling.slice_weight * instance.least_ms
    least = cooling.mean_weight * instance.least_mean_ms
    cost = now.makespan_ms + weight * sum(now.free) + per_slice * len(order)
    neighbours, rand = Moves(instance, random, split=split), random.random
    chain = blocking(now)
    heat, pace = cooling.hot * scale, _Pace(budget)
    check = max(1, _CHECK // len(order))
    for step in range(budget.moves):
        if step % check == 0:
            share = pace.share(step)
            if share >= 1.0:
                break
            heat = cooling.hot * scale * (cooling.cold / cooling.hot) ** share
        u = rand()
        if u < cooling.on_chain:
            i = chain[int(u / cooling.on_chain * len(chain))]
        else:
            i = int(rand() * len(now.order))
        moved = neighbours.propose(now.order, i)
        if moved is None:
            continue
        new, changed, grown = moved
        limit = cost - heat * log(1.0 - rand())
        extra = per_slice * len(new)
        area = now.used + grown
        idle = instance.devices * (limit - extra) / (1.0 + cooling.mean_weight) - area
        tried = resume(instance, new, changed, now, limit - least - extra, idle)
        if tried is None:
            continue
        reached = tried.free[-1] + weight * sum(tried.free) + extra
        if reached <= limit:
            now, cost = tried, reached
            chain = blocking(now)
            if cooling.value(now) < cooling.value(best):
                best = now
    return best


class _Pace:
    """How far a search is: by its moves, or by the clock once that is clearly what will end it."""

    def __init__(self, budget: Budget) -> None:
        self.moves, self.clock, self.until = budget.moves, budget.clock, budget.until
        self.began_s = self.clock.elapsed_s()
        self.by_clock = False

    def share(self, step: int) -> float:
        done = step / self.moves
        if self.clock.limit_s is None:
            return done
        span_s = max(self.until * self.clock.limit_s - self.began_s, 1e-9)
        spent = (self.clock.elapsed_s() - self.began_s) / span_s
        if spent >= 1.0 or (spent > done + _LATE):
            self.by_clock = self.clock.capped = True
        return spent if self.by_clock else done


def anneal_from(
    instance: Instance,
    starts: Sequence[Order],
    budget: Budget,
    random: Random,
    cooling: Cooling,
    *,
    split: bool = True,
) -> Schedule:
    """Anneals from several starts, then again from the best schedule found, at half the temperature.

    As ``anneal`` otherwise. Small problems have deep local optima, which separate starts get out of.
    """
    first = starts[:_STARTS]
    left, found = 1.0, []
    for order in first:
        share = _FIRST_SHARE / len(first)
        found.append(anneal(instance, order, budget.part(share, left), random, cooling, split=split))
        left -= share
    best = min(found, key=cooling.value)
    cooler = replace(cooling, hot=cooling.hot / 2)
    return anneal(instance, best.order, budget.part(left, left), random, cooler, split=split)
