"""Device placement: which devices each run gets (paper, section 3.5).

Greedy over the runs in the order of their starts (a Stage's runs start together), those with
more communication first. ``candidates.py`` ranks the device groups for one run; this file keeps
the books, and goes back where memory does not suffice. Where links cost something, ``relabel.py``
then improves the placement as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lightning_spindle.plan import Run
from lightning_spindle.planner.candidates import Groups, rank
from lightning_spindle.planner.memory import Booked, Memory
from lightning_spindle.planner.problem import PlanningProblem
from lightning_spindle.planner.relabel import relabel
from lightning_spindle.planner.sync import SYNC_WEIGHT
from lightning_spindle.planner.timing import PlacedRun, UnplacedRun, list_schedule
from lightning_spindle.planner.transfers import flow_bytes, inputs_of

_COMMUNICATION_TRIES = 200
_MEMORY_TRIES = 4000
_SAME_TIME_MS = 1e-6
_STEPS, _FEW_RUNS = 800, 60
"""Assignment problems that ``relabel`` may solve for so many runs on 32 devices; fewer for more."""
_STEPS_A_DEVICE = 100
"""And at most so many: few devices have few permutations."""
_MANY_DEVICES = 256
"""On more devices than these, the greedy placement stays."""


class Policy(StrEnum):
    """What decides between free device groups."""

    COMMUNICATION = "communication"
    """Section 3.5: least communication first, then balanced memory."""
    MEMORY = "memory"
    """Most memory left first: what placement falls back to."""
    SEQUENTIAL = "sequential"
    """The paper's ablation: a Stage's MetaOps in order on the next devices, memory not looked at."""


def place(
    runs: Iterable[UnplacedRun],
    problem: PlanningProblem,
    policy: Policy = Policy.COMMUNICATION,
    *,
    sync_weight: float = SYNC_WEIGHT,
) -> tuple[Run, ...]:
    """Gives devices to runs and returns them as they will run.

    ``sync_weight``: what a millisecond of gradient synchronisation counts beside one of transfers.

    ``start_ms``/``end_ms`` of the given runs must be a feasible schedule (at no time more
    devices than there are; dependencies kept) and decide the order alone: the returned
    runs start as early as devices, data and transfers allow (``timing.list_schedule``), which
    on links that cost nothing is never later than planned.

    Raises:
        ValueError: memory does not suffice; names the run, the device, bytes needed and there.
    """
    ordered = _in_order(runs, problem)
    if policy is Policy.SEQUENTIAL:
        return list_schedule(_sequential(ordered, problem), problem)
    for attempt, tries in ((policy, _COMMUNICATION_TRIES), (Policy.MEMORY, _MEMORY_TRIES)):
        placement = _Placement(ordered, problem, attempt is Policy.MEMORY, sync_weight)
        if placement.search(tries):
            return list_schedule(_improved(placement.placed, problem, sync_weight), problem)
    raise ValueError(placement.shortage)


def _improved(
    placed: Sequence[PlacedRun], problem: PlanningProblem, sync_weight: float
) -> Sequence[PlacedRun]:
    cluster = problem.cluster
    free_links = cluster.inside == cluster.between and cluster.inside.seconds(1.0) == 0.0
    if free_links or problem.devices > _MANY_DEVICES:
        return placed
    steps = _STEPS * 32 * _FEW_RUNS // (problem.devices * max(_FEW_RUNS, len(placed)))
    steps = min(steps, _STEPS_A_DEVICE * problem.devices)
    return relabel(placed, _sequential([p.run for p in placed], problem), problem, steps, sync_weight)


def check_memory(runs: Iterable[Run], problem: PlanningProblem) -> None:
    """Raises ValueError, as ``place`` does, where the devices of a finished plan do not hold it."""
    memory = Memory(problem)
    for run in sorted(runs, key=lambda r: (r.start_ms, r.metaop, r.first)):
        unplaced = UnplacedRun(run.metaop, run.first, run.last, len(run.devices), run.start_ms, run.end_ms)
        need = memory.need(unplaced)
        for d in run.devices:
            if not memory.fits(need, d):
                raise ValueError(_shortage(unplaced, d, memory.bytes_on(need, d), memory.available(d)))
        memory.take(unplaced, run.devices)


def memory_per_device(runs: Iterable[Run], problem: PlanningProblem) -> tuple[float, ...]:
    """Bytes that each device holds at the peak: parameters with their state, and activations."""
    memory = Memory(problem)
    for r in runs:
        memory.take(UnplacedRun(r.metaop, r.first, r.last, len(r.devices), r.start_ms, r.end_ms), r.devices)
    return tuple(memory.used.tolist())


def _in_order(runs: Iterable[UnplacedRun], problem: PlanningProblem) -> list[UnplacedRun]:
    """By start; then pinned ones, then by the input of each device, then the widest.

    A run whose few devices would have to receive much stays where its data are, before
    a wide one, to whose devices little goes each.
    """
    flows = flow_bytes(problem.flows)

    def volume(run: UnplacedRun) -> float:
        op = problem.metaop(run.metaop)
        inputs = op.layer_flow_bytes if run.first else sum(flows.get((b, run.metaop), 0) for b in op.after)
        return inputs / run.n

    def key(run: UnplacedRun) -> tuple[float, bool, float, int, str, int]:
        pinned = problem.metaop(run.metaop).pin is not None
        return (run.start_ms, not pinned, -volume(run), -run.n, run.metaop, run.first)

    return sorted(runs, key=key)


def _sequential(ordered: Sequence[UnplacedRun], problem: PlanningProblem) -> list[PlacedRun]:
    placed: list[PlacedRun] = []
    pins: dict[str, tuple[int, ...]] = {}
    next_device, start_ms = 0, 0.0
    for run in sorted(ordered, key=lambda r: (r.start_ms, r.metaop, r.first)):
        if run.start_ms > start_ms + _SAME_TIME_MS:
            next_device, start_ms = 0, run.start_ms
        devices = tuple(sorted((next_device + i) % problem.devices for i in range(run.n)))
        pin = problem.metaop(run.metaop).pin
        if pin is not None:
            devices = pins.setdefault(pin, devices)
        placed.append(PlacedRun(run, devices))
        next_device = (next_device + run.n) % problem.devices
    return placed


@dataclass(slots=True)
class _Choice:
    """The groups still open for one run, and how to undo the one that was taken."""

    groups: Groups
    undo: _Undo | None = None


@dataclass(frozen=True, slots=True)
class _Undo:
    booked: Booked
    busy: tuple[tuple[int, float], ...]
    at: tuple[int, ...] | None
    pin: str | None


class _Placement:
    """Depth-first over the ordered runs; each run's groups are tried best first."""

    def __init__(
        self, ordered: Sequence[UnplacedRun], problem: PlanningProblem, balance: bool, sync_weight: float
    ) -> None:
        self.ordered = list(ordered)
        self.problem = problem
        self.balance = balance
        self.sync_weight = sync_weight
        self.flows = flow_bytes(problem.flows)
        self.memory = Memory(problem)
        self.busy = [0.0] * problem.devices
        self.at: dict[str, tuple[int, ...]] = {}
        self.pins: dict[str, tuple[int, ...]] = {}
        self.placed: list[PlacedRun] = []
        self.shortage = ""
        self._least = float("inf")
        self._pinned = [r for r in ordered if problem.metaop(r.metaop).pin is not None]

    def search(self, tries: int) -> bool:
        """True where all runs were placed; gives up after ``tries`` steps back."""
        stack: list[_Choice] = []
        while len(self.placed) < len(self.ordered):
            run = self.ordered[len(self.placed)]
            if len(stack) == len(self.placed):
                stack.append(_Choice(self._groups(run)))
            devices = next(stack[-1].groups, None)
            if self.problem.cluster.memory_bytes is None:
                stack[-1].groups = iter(())  # nothing can fail later: no way back to be kept
            if devices is not None:
                stack[-1].undo = self._take(run, devices)
                continue
            stack.pop()
            tries -= 1
            if not stack or tries < 0:
                return False
            undo = stack[-1].undo
            assert undo is not None
            self._give_back(self.ordered[len(self.placed) - 1], undo)
        return True

    def _groups(self, run: UnplacedRun) -> Groups:
        op = self.problem.metaop(run.metaop)
        need = self.memory.need(run)
        if op.pin is not None and op.pin in self.pins:
            free = list(self.pins[op.pin])
        else:
            free = self._free(run)
        fitting = self.memory.fitting(need, free)
        if len(fitting) < run.n:
            fitting = self.memory.fitting(need, range(self.problem.devices))
            if op.pin is not None and op.pin in self.pins:
                fitting = [d for d in fitting if d in self.pins[op.pin]]
        if len(fitting) < run.n:
            self._note_shortage(run, free, fitting)
            return iter(())
        inputs = inputs_of(run.metaop, run.first, self.problem, self.flows, self.at)
        return rank(
            run.n, fitting, inputs, need, self.memory, balance=self.balance, sync_weight=self.sync_weight
        )

    def _free(self, run: UnplacedRun) -> list[int]:
        """Devices idle at the planned start, without those that a pin needs during the run.

        Where they are too few (a pin, or memory, came between), those that get idle first.
        """
        reserved = {
            self.pins[pin][0]
            for r in self._pinned
            if (pin := self.problem.metaop(r.metaop).pin) in self.pins
            and pin is not None
            and r.start_ms < run.end_ms - _SAME_TIME_MS
            and run.start_ms < r.end_ms - _SAME_TIME_MS
        }
        now_ms = run.start_ms + _SAME_TIME_MS
        idle = [d for d, busy_ms in enumerate(self.busy) if busy_ms <= now_ms and d not in reserved]
        if len(idle) >= run.n:
            return idle
        by_time = sorted(range(self.problem.devices), key=lambda d: (d in reserved, self.busy[d], d))
        return sorted(by_time[: run.n])

    def _take(self, run: UnplacedRun, devices: tuple[int, ...]) -> _Undo:
        pin = self.problem.metaop(run.metaop).pin
        new_pin = pin if pin is not None and pin not in self.pins else None
        booked = self.memory.take(run, devices)
        undo = _Undo(booked, tuple((d, self.busy[d]) for d in devices), self.at.get(run.metaop), new_pin)
        for d in devices:
            self.busy[d] = max(self.busy[d], run.end_ms)
        self.at[run.metaop] = devices
        if new_pin is not None:
            self.pins[new_pin] = devices
        self.placed.append(PlacedRun(run, devices))
        return undo

    def _give_back(self, run: UnplacedRun, undo: _Undo) -> None:
        self.placed.pop()
        self.memory.give_back(undo.booked)
        for d, busy in undo.busy:
            self.busy[d] = busy
        if undo.at is None:
            del self.at[run.metaop]
        else:
            self.at[run.metaop] = undo.at
        if undo.pin is not None:
            del self.pins[undo.pin]

    def _note_shortage(self, run: UnplacedRun, free: Sequence[int], fitting: Sequence[int]) -> None:
        """Keeps the smallest shortage met: the one that a user can most nearly mend."""
        need = self.memory.need(run)
        short = [d for d in range(self.problem.devices) if d not in fitting]
        short = [d for d in short if d in free] or short
        if not short:
            return
        device = min(short, key=lambda d: (self.memory.bytes_on(need, d) - self.memory.available(d), d))
        needed, there = self.memory.bytes_on(need, device), self.memory.available(device)
        if needed - there < self._least:
            self._least = needed - there
            self.shortage = _shortage(run, device, needed, there)


def _shortage(run: UnplacedRun, device: int, needed: float, there: float) -> str:
    return (
        f"MetaOp {run} does not fit: device {device} needs {needed:.0f} bytes for it "
        f"and has {max(there, 0.0):.0f} left"
    )
