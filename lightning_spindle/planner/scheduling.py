"""Stage scheduler: algorithm 1 of the paper (section 3.4).

A Stage (*wave* in the paper's later version) is a set of slices of MetaOps that run side by side
for about the same time. One MetaLevel is scheduled after the other and their Stages concatenated.

Where the text leaves a choice:

* *Propose*: at most one tuple of each MetaOp, and as many devices in use as any choice of
  tuples reaches; among such choices the widest tuples come first (figure 5b starts with the
  one that fills all devices), of equally wide ones those with more remaining time.
* *Extend*: while devices are idle, the MetaOp with the most remaining time (at the allocation
  that it has by then) gets its next larger allocation that fits. ``Extension.JOIN`` lets
  MetaOps that were not proposed in first, on the largest allocation that fits.
* *Align*: to the shortest proposed tuple, or to the longest single layer where one layer of
  another MetaOp takes longer than that (the Stage lasts as long in any case: without this,
  clusters of hundreds of devices idle for most of the time). The others run the number of layers
  nearest to that span, at most those of their tuple; their rounding is the Stage's loss.

On the structured planner cells these choices end at 0.995 of the makespan of the authors'
published planner with a barrier after each Stage, and at 0.973 as placed and run, without
barriers. Rounding down, largest steps of extension and first-fit proposals were equal or worse.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import heapify, heappop, heappush

from lightning_spindle.planner.allocation import AllocationPlan, Demand


class Extension(StrEnum):
    """What Extend_Resources_If_Needed does with idle devices."""

    NONE = "none"
    WIDEN = "widen"
    JOIN = "join"


@dataclass(frozen=True, slots=True)
class Slice:
    """Layers [first, last) of a MetaOp on n devices, within a Stage."""

    metaop: str
    first: int
    last: int
    n: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Stage:
    """Slices with a common span; a slice that rounds to less ends before ``end_ms``."""

    slices: tuple[Slice, ...]
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A proposed ASL tuple: up to ``layers`` layers on ``n`` devices; ``given`` is its n before extension."""

    metaop: str
    n: int
    layers: int
    given: int


@dataclass(frozen=True, slots=True)
class StageSchedule:
    """P of algorithm 1, for one MetaLevel or, merged, for all."""

    stages: tuple[Stage, ...]
    end_ms: float


class _Remaining:
    """S_remain: the layers of each MetaOp that wait, by the allocation that they were given."""

    def __init__(self, plan: AllocationPlan, demands: Sequence[Demand]) -> None:
        self.curves = {d.name: d.envelope for d in demands}
        self.tuples = {name: {t.n: int(t.layers) for t in tuples} for name, tuples in plan.tuples}
        self.done = dict.fromkeys(self.tuples, 0)

    def layers(self, metaop: str) -> int:
        return sum(self.tuples[metaop].values())

    def time_ms(self, metaop: str) -> float:
        curve = self.curves[metaop]
        return sum(curve.time_ms(n) * layers for n, layers in self.tuples[metaop].items())

    def time_on_ms(self, candidate: Candidate) -> float:
        """All that waits of a candidate's MetaOp, were it to run on the candidate's devices."""
        return self.curves[candidate.metaop].time_ms(candidate.n) * self.layers(candidate.metaop)

    def by_time(self) -> list[str]:
        """MetaOps that wait, most remaining time first; equal ones by name."""
        return sorted(self.tuples, key=lambda m: (-self.time_ms(m), m))

    def take(self, candidate: Candidate, layers: int) -> int:
        """Removes layers of the candidate's tuple; returns the index of the first."""
        first = self.done[candidate.metaop]
        self.done[candidate.metaop] += layers
        waiting = self.tuples[candidate.metaop]
        waiting[candidate.given] -= layers
        if not waiting[candidate.given]:
            del waiting[candidate.given]
        if not waiting:
            del self.tuples[candidate.metaop]
        return first


def propose_candidate_set(devices: int, remaining: _Remaining, pins: Mapping[str, str]) -> list[Candidate]:
    """Line 3: tuples of different MetaOps that occupy as many devices as any such choice can.

    Exact, as a subset sum: bit k of ``reachable[i]`` tells that the tuples of the MetaOps from
    the i-th on can occupy k devices. MetaOps that share a pin share a device: one at a time.
    """
    names = _one_for_each_pin(remaining.by_time(), pins)
    names.sort(key=lambda name: -max(remaining.tuples[name]))
    within = (1 << (devices + 1)) - 1
    reachable = [1] * (len(names) + 1)
    for i in reversed(range(len(names))):
        reachable[i] = reachable[i + 1]
        for n in remaining.tuples[names[i]]:
            reachable[i] |= reachable[i + 1] << n & within
    left = reachable[0].bit_length() - 1
    chosen: list[Candidate] = []
    for i, name in enumerate(names):
        for n in sorted(remaining.tuples[name], reverse=True):
            if n <= left and reachable[i + 1] >> (left - n) & 1:
                chosen.append(Candidate(name, n, remaining.tuples[name][n], n))
                left -= n
                break
    return chosen


def extend_resources_if_needed(
    candidates: Sequence[Candidate],
    devices: int,
    remaining: _Remaining,
    extension: Extension,
    pins: Mapping[str, str],
) -> list[Candidate]:
    """Line 4: idle devices go to the MetaOps with the most remaining time, one step at a time."""
    extended = list(candidates)
    if extension is Extension.JOIN:
        extended = _join(extended, devices, remaining, pins)
    idle = devices - sum(c.n for c in extended)
    if extension is Extension.NONE:
        return extended
    waiting = [(-remaining.time_on_ms(c), c.metaop, i) for i, c in enumerate(extended)]
    heapify(waiting)
    while waiting and idle:
        _, _, i = heappop(waiting)
        c = extended[i]
        allocations = remaining.curves[c.metaop].allocations
        step = bisect_right(allocations, c.n)
        if step == len(allocations) or allocations[step] - c.n > idle:
            continue  # idle only shrinks: this one never fits again
        idle -= allocations[step] - c.n
        extended[i] = replace(c, n=allocations[step])
        heappush(waiting, (-remaining.time_on_ms(extended[i]), c.metaop, i))
    return extended


def align_time_span(candidates: Sequence[Candidate], remaining: _Remaining) -> list[Candidate]:
    """Line 5: dissects the tuples to the span of the shortest one, or of the longest single layer."""
    times = [remaining.curves[c.metaop].time_ms(c.n) for c in candidates]
    span_ms = max(max(times), min(t * c.layers for t, c in zip(times, candidates, strict=True)))
    return [
        replace(c, layers=max(1, min(c.layers, int(span_ms / t + 0.5))))
        for t, c in zip(times, candidates, strict=True)
    ]


def schedule_level(
    plan: AllocationPlan,
    demands: Sequence[Demand],
    devices: int,
    *,
    start_ms: float = 0.0,
    extension: Extension = Extension.WIDEN,
    pins: Mapping[str, str] | None = None,
) -> StageSchedule:
    """Algorithm 1: Stages for one MetaLevel. ``pins``: MetaOps with equal value share one device."""
    current_ms = start_ms
    stages: list[Stage] = []
    remaining = _Remaining(plan, demands)
    while remaining.tuples:
        proposed = propose_candidate_set(devices, remaining, pins or {})
        extended = extend_resources_if_needed(proposed, devices, remaining, extension, pins or {})
        scheduled = align_time_span(extended, remaining)
        stage = _set_start_time(scheduled, current_ms, remaining)
        stages.append(stage)
        current_ms = stage.end_ms
    return StageSchedule(tuple(stages), current_ms)


def merge_levels(levels: Iterable[StageSchedule]) -> StageSchedule:
    """Merging MetaLevels: the Stages of one level after those of the level before."""
    stages = tuple(stage for level in levels for stage in level.stages)
    return StageSchedule(stages, stages[-1].end_ms if stages else 0.0)


def _set_start_time(scheduled: Sequence[Candidate], start_ms: float, remaining: _Remaining) -> Stage:
    """Lines 6 to 8: a Stage of the scheduled tuples, which leave S_remain."""
    slices: list[Slice] = []
    for c in scheduled:
        end_ms = start_ms + remaining.curves[c.metaop].time_ms(c.n) * c.layers
        first = remaining.take(c, c.layers)
        slices.append(Slice(c.metaop, first, first + c.layers, c.n, start_ms, end_ms))
    return Stage(tuple(slices), start_ms, max(s.end_ms for s in slices))


def _join(
    candidates: Sequence[Candidate], devices: int, remaining: _Remaining, pins: Mapping[str, str]
) -> list[Candidate]:
    joined = list(candidates)
    idle = devices - sum(c.n for c in joined)
    taken = {c.metaop for c in joined}
    used = {pins[m] for m in taken if m in pins}
    for name in remaining.by_time():
        n = remaining.curves[name].at_most(idle)
        if name in taken or n is None or pins.get(name) in used:
            continue
        given = min(remaining.tuples[name])
        joined.append(Candidate(name, n, remaining.tuples[name][given], given))
        idle -= n
        used |= {pins[name]} if name in pins else set()
    return joined


def _one_for_each_pin(names: Sequence[str], pins: Mapping[str, str]) -> list[str]:
    first = {pins[name]: name for name in reversed(names) if name in pins}
    return [name for name in names if name not in pins or first[pins[name]] == name]
