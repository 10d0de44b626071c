"""From an order of slices to a schedule: the search's evaluator.

Each slice in turn takes n devices as early as its inputs and the devices allow: of the devices
free by then the ones freed last, so that those freed earlier stay for slices that can start
earlier. Devices are interchangeable here, so the state is one sorted list of the times at which
they get free, and a slice costs two bisections and one list assignment. Every schedule that no
slice can leave for an earlier start comes out of the order of its own starts (a serial
schedule-generation scheme, Kolisch 1996), so an optimal schedule is reachable.

Moves change an order from some place on; the places before it are not decoded again: the state
is kept every few slices.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from lightning_spindle.planner.search.instance import Instance, Order

State = tuple[list[float], list[float], float]
"""(times at which devices get free, ascending; end of each MetaOp's latest slice, -1 before it
starts; device milliseconds used)"""


@dataclass(slots=True)
class Schedule:
    """A decoded order: when each slice starts, and the states to resume from."""

    order: Order
    starts: list[float]
    states: list[State]
    free: list[float]
    used: float
    """Device milliseconds of all slices."""

    @property
    def makespan_ms(self) -> float:
        return self.free[-1]


def decode(instance: Instance, order: Order) -> Schedule:
    """The whole order. O(slices x devices), with a very small factor for the devices."""
    schedule = resume(instance, order, 0, None, float("inf"))
    assert schedule is not None
    return schedule


def resume(
    instance: Instance,
    order: Order,
    changed: int,
    earlier: Schedule | None,
    limit_ms: float,
    limit_idle: float = float("inf"),
) -> Schedule | None:
    """Decodes an order that equals ``earlier.order`` before index ``changed``.

    None as soon as it is certain that the makespan is above ``limit_ms``, or that devices idle
    for more than ``limit_idle`` (device milliseconds) between their slices. What lies before the
    place of resumption is not held against the limits: the caller looks at the result.
    """
    before, tails, bisect = instance.before, instance.tail_ms, bisect_right
    stride = instance.stride
    at = changed - changed % stride
    if earlier is None:
        states: list[State] = []
        starts: list[float] = []
        free, ends, used = [0.0] * instance.devices, [-1.0] * len(before), 0.0
    else:
        states, starts = earlier.states[: at // stride], earlier.starts[:at]
        free, ends, used = earlier.states[at // stride]
        free, ends = free[:], ends[:]
    while at < len(order):
        if sum(free) - used > limit_idle:
            return None
        states.append((free[:], ends[:], used))
        for m, n, d, _, _ in order[at : at + stride]:
            ready = ends[m]
            if ready < 0.0:
                ready = 0.0
                for b in before[m]:
                    if ends[b] > ready:
                        ready = ends[b]
            start = free[n - 1]
            if start < ready:
                start = ready
            end = start + d
            if end + tails[m] > limit_ms:
                return None
            stop = bisect(free, start, n - 1)
            until = bisect(free, end, stop)
            free[stop - n : until] = free[stop:until] + [end] * n
            ends[m] = end
            used += n * d
            starts.append(start)
        at += stride
    return Schedule(order, starts, states, free, used)


def blocking(schedule: Schedule) -> list[int]:
    """Indices of the slices on a chain that ends last, each starting when another on it ends.

    Only moves that touch one of them can shorten the schedule at once. O(slices).
    """
    ending: dict[float, list[int]] = {}
    for i, (piece, start) in enumerate(zip(schedule.order, schedule.starts, strict=True)):
        ending.setdefault(start + piece[2], []).append(i)
    found: dict[int, None] = {}
    stack = list(ending[schedule.makespan_ms])
    while stack:
        i = stack.pop()
        if i not in found:
            found[i] = None
            stack.extend(ending.get(schedule.starts[i], ()))
    return list(found)
