"""The paper's other strategies (section 5.1, table 1), as plans for the same engine.

A task here is a set of MetaOps that nothing of another task waits for: tasks joined by
a dependency count as one. Where not all tasks can have their smallest allocation at once, they
take turns (rounds); the paper has more devices than tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.planner.allocation import Envelope, envelope
from lightning_spindle.planner.placement import check_memory, place
from lightning_spindle.planner.problem import PlannedOp, PlanningProblem
from lightning_spindle.planner.report import with_figures
from lightning_spindle.planner.spindle import meta_levels
from lightning_spindle.planner.timing import PlacedRun, UnplacedRun, list_schedule


@dataclass(frozen=True, slots=True)
class _Task:
    """MetaOps in topological order, with their curves."""

    name: str
    ops: tuple[PlannedOp, ...]
    curves: tuple[Envelope, ...]

    @property
    def minimum(self) -> int:
        """The fewest devices on which every MetaOp of the task runs."""
        return max(c.allocations[0] for c in self.curves)

    def completion_ms(self, n: int) -> float:
        """T^(c)(n): the task's MetaOps one after the other, each on its best allocation up to n."""
        return sum(_time_ms(op, c, n) for op, c in zip(self.ops, self.curves, strict=True))

    def next_allocation(self, n: int) -> int | None:
        """The next larger n with which one of the MetaOps gets faster."""
        return min((a for c in self.curves for a in c.allocations if a > n), default=None)


Division = Callable[[Sequence[_Task], int], list[int]]


def plan_seq(problem: PlanningProblem, *, time_limit_s: float | None = None, seed: int = 0) -> ExecutionPlan:
    """Spindle-Seq: one MetaOp after the other, each on all the devices that make it faster."""
    return _plan_tasks("seq", problem, [[t] for t in _tasks(problem)], lambda tasks, devices: [devices])


def plan_uniform(
    problem: PlanningProblem, *, time_limit_s: float | None = None, seed: int = 0
) -> ExecutionPlan:
    """Spindle-Uniform: tasks side by side on equal shares, whatever their workload."""
    return _plan_tasks("uniform", problem, list(_rounds(_tasks(problem), problem.devices)), _equal_shares)


def plan_optimus(
    problem: PlanningProblem, *, time_limit_s: float | None = None, seed: int = 0
) -> ExecutionPlan:
    """Spindle-Optimus: tasks side by side; each device to where it gains most."""
    tasks = sorted(_tasks(problem), key=lambda t: (-t.completion_ms(t.minimum), t.name))
    return _plan_tasks("optimus", problem, list(_rounds(tasks, problem.devices)), _marginal_gain)


def plan_stmm(problem: PlanningProblem, *, time_limit_s: float | None = None, seed: int = 0) -> ExecutionPlan:
    """Spindle-STMM: one task after the other; inside a task, devices divided between its MetaOps.

    MetaOps of a MetaLevel run side by side on the division that minimises the slowest one's
    time (as DistMM divides devices between the encoders of one model), or one after the
    other on all devices where that is faster; levels follow each other.
    """
    runs: list[UnplacedRun] = []
    now_ms = 0.0
    for task in _tasks(problem):
        for level in meta_levels(task.ops):
            ops = [_Task(op.name, (op,), (envelope(op, problem.devices),)) for op in level]
            divided = _side_by_side(list(_rounds(ops, problem.devices)), problem.devices, now_ms)
            in_turn = _side_by_side([[op] for op in ops], problem.devices, now_ms)
            chosen = min((divided, in_turn), key=lambda runs: runs[-1].end_ms)
            runs += chosen
            now_ms = chosen[-1].end_ms
    return with_figures("stmm", place(runs, problem), problem, {})


def _side_by_side(groups: Sequence[Sequence[_Task]], devices: int, start_ms: float) -> list[UnplacedRun]:
    """The MetaOps of each group side by side, one group after the other; the last to end comes last."""
    runs: list[UnplacedRun] = []
    for group in groups:
        now = [
            UnplacedRun(t.name, 0, t.ops[0].layers, n, start_ms, start_ms + t.completion_ms(n))
            for t, n in zip(group, _slowest_first(group, devices), strict=True)
        ]
        runs += sorted(now, key=lambda r: (r.end_ms, r.metaop))
        start_ms = runs[-1].end_ms
    return runs


def _plan_tasks(
    planner: str, problem: PlanningProblem, rounds: Sequence[Sequence[_Task]], divide: Division
) -> ExecutionPlan:
    """Tasks of a round side by side on consecutive blocks of devices, their MetaOps one after another."""
    placed: list[PlacedRun] = []
    pins: dict[str, tuple[int, ...]] = {}
    round_ms = 0.0
    for tasks in rounds:
        first, end_ms = 0, round_ms
        for task, share in zip(tasks, divide(tasks, problem.devices), strict=True):
            now_ms = round_ms
            for op, curve in zip(task.ops, task.curves, strict=True):
                n = curve.at_most(share)
                assert n is not None
                devices = tuple(range(first, first + n))
                if op.pin is not None:
                    devices = pins.setdefault(op.pin, devices)
                run = UnplacedRun(op.name, 0, op.layers, n, now_ms, now_ms + _time_ms(op, curve, n))
                placed.append(PlacedRun(run, devices))
                now_ms = run.end_ms
            first, end_ms = first + share, max(end_ms, now_ms)
        round_ms = end_ms
    runs = list_schedule(placed, problem)
    check_memory(runs, problem)
    return with_figures(planner, runs, problem, {})


def _tasks(problem: PlanningProblem) -> list[_Task]:
    """Tasks by name; those that depend on each other joined under the first one's name."""
    root = {m.task: m.task for m in problem.metaops}

    def find(task: str) -> str:
        while root[task] != task:
            task = root[task]
        return task

    for m in problem.metaops:
        for before in m.after:
            a, b = sorted((find(m.task), find(problem.metaop(before).task)))
            root[b] = a
    found: dict[str, list[PlannedOp]] = {}
    for m in problem.metaops:
        found.setdefault(find(m.task), []).append(m)
    curves = {m.name: envelope(m, problem.devices) for m in problem.metaops}
    return [
        _Task(name, tuple(found[name]), tuple(curves[m.name] for m in found[name])) for name in sorted(found)
    ]


def _rounds(tasks: Sequence[_Task], devices: int) -> Iterator[list[_Task]]:
    """Groups of tasks, in order, whose smallest allocations fit side by side."""
    group: list[_Task] = []
    for task in tasks:
        pin_taken = {op.pin for t in group for op in t.ops if op.pin} & {op.pin for op in task.ops if op.pin}
        if group and (pin_taken or sum(t.minimum for t in group) + task.minimum > devices):
            yield group
            group = []
        group.append(task)
    if group:
        yield group


def _equal_shares(tasks: Sequence[_Task], devices: int) -> list[int]:
    """One device at a time to the smallest share, first task first."""
    shares = [t.minimum for t in tasks]
    for _ in range(devices - sum(shares)):
        shares[shares.index(min(shares))] += 1
    return shares


def _marginal_gain(tasks: Sequence[_Task], devices: int) -> list[int]:
    """Optimus: from n to the next valid n' where (T(n) - T(n')) / (n' - n) is largest, while it fits."""
    shares = [t.minimum for t in tasks]
    while True:
        left = devices - sum(shares)
        best: tuple[float, int, int] | None = None
        for i, (task, n) in enumerate(zip(tasks, shares, strict=True)):
            wider = task.next_allocation(n)
            if wider is None or wider - n > left:
                continue
            gain = (task.completion_ms(n) - task.completion_ms(wider)) / (wider - n)
            if best is None or gain > best[0]:
                best = (gain, i, wider)
        if best is None:
            return shares
        shares[best[1]] = best[2]


def _slowest_first(tasks: Sequence[_Task], devices: int) -> list[int]:
    """Widens the slowest until it cannot be: the least possible time of the slowest (Σ n ≤ devices)."""
    shares = [t.minimum for t in tasks]
    while True:
        slowest = max(range(len(tasks)), key=lambda i: (tasks[i].completion_ms(shares[i]), -i))
        wider = tasks[slowest].next_allocation(shares[slowest])
        if wider is None or sum(shares) - shares[slowest] + wider > devices:
            return shares
        shares[slowest] = wider


def _time_ms(op: PlannedOp, curve: Envelope, share: int) -> float:
    n = curve.at_most(share)
    assert n is not None
    return op.layers * curve.time_ms(n)
