"""The search as a planner: its budget, its finalists, its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.planner.bounds import across_levels, critical_path_ms
from lightning_spindle.planner.placement import place
from lightning_spindle.planner.problem import PlanningProblem
from lightning_spindle.planner.report import with_figures
from lightning_spindle.planner.search.anneal import Budget, Clock, Cooling, anneal_from
from lightning_spindle.planner.search.decode import Schedule, decode
from lightning_spindle.planner.search.exact import improve
from lightning_spindle.planner.search.instance import Instance, Order, instance
from lightning_spindle.planner.search.rivals import Rivals
from lightning_spindle.planner.search.start import from_runs, one_slice_each, rounded, translated
from lightning_spindle.planner.sync import FULL_SYNC_WEIGHT, SYNC_WEIGHT
from lightning_spindle.planner.timing import UnplacedRun

Score = Callable[[ExecutionPlan], float]
"""What a plan costs when it runs, smaller is better: the simulator's iteration time, say."""

_CAPACITIES = (1.0, 0.85, 0.7, 1.15, 1.35)
_METAOPS_MOVES_PER_S = 700_000.0
_FEW_METAOPS, _FEW_DEVICES = 14, 300.0
"""What fits into a second with some to spare, measured on one core: see ``default_moves``."""
_START_SHARE, _SEARCH_SHARE = 0.4, 0.9
"""Shares of the time limit after which no start is tried any more, and after which the search ends."""
_SAME_TIME_MS = 1e-9
_FEW_SLICES = 0.005
"""Cost of a slice, as a share of the makespan, for the finalists with few splits."""
_HIDDEN = 0.15
"""Share of synchronisation that counts where most of it is taken to run beside the backward."""


def plan_search(
    problem: PlanningProblem,
    *,
    time_limit_s: float | None = 1.0,
    seed: int = 0,
    moves: int | None = None,
    score: Score | None = None,
) -> ExecutionPlan:
    """The best plan that ``moves`` moves find; never worse than another planner's of this package.

    ``moves`` (default: what takes about ``time_limit_s``, or a second where that is None) is the
    budget: equal problem, seed and budget give equal plans, on any machine and in any process,
    unless the time limit ended the search, which the report then says (``capped`` 1, else 0).
    With a ``score`` the finalists, among them plans with few splits and plans that keep each
    MetaOp on its devices, are compared by it instead of by their makespan.

    The report says how far from a lower bound (``bound_ms``) the plan ended: ``gap`` is makespan over
    bound, less 1. Links that are not ideal are part of the makespan, not of the bound.

    Raises:
        ValueError: no plan found fits the devices' memory; the message is the first refusal.
    """
    clock = Clock(time_limit_s)
    found = instance(problem)
    rivals = Rivals(problem, seed)
    bound_ms, starts = _starts(problem, found, rivals, clock)
    count = moves if moves is not None else default_moves(problem, time_limit_s or 1.0)
    budget = Budget(count, clock, max(0.5, min(_SEARCH_SHARE, 1.0 - rivals.placing_share(time_limit_s))))
    real = score is not None or _has_costs(found)
    finalists: list[ExecutionPlan] = []
    refusals = rivals.refusals
    searched = (
        _search_real(problem, found, starts, budget, seed) if real else _search(found, starts, budget, seed)
    )
    weights = (SYNC_WEIGHT, FULL_SYNC_WEIGHT) if score is not None else (SYNC_WEIGHT,)
    for schedule in searched:
        for sync_weight in weights:
            if sync_weight != weights[0] and clock.passed():
                break
            try:
                runs = place(unplaced_runs(found, schedule), problem, sync_weight=sync_weight)
            except ValueError as refusal:
                refusals.append(refusal)
                break
            finalists.append(with_figures("search", runs, problem, {}))
    limit_ms = (
        min((p.makespan_ms for p in finalists), default=float("inf")) if score is None else float("inf")
    )
    finalists += [replace(plan, planner="search") for plan in rivals.plans_below(limit_ms)]
    if score is not None:
        finalists += rivals.with_full_sync()
    if not finalists:
        raise refusals[0]
    best = min(finalists, key=score or (lambda plan: plan.makespan_ms))
    return best.with_report(
        {
            "bound_ms": bound_ms,
            "gap": best.makespan_ms / bound_ms - 1.0,
            "capped": float(clock.capped),
            "moves": float(count),
        }
    )


def default_moves(problem: PlanningProblem, seconds: float) -> int:
    """Moves that take a little less than ``seconds``: about 19,000 a second for 30 MetaOps on 64 devices."""
    size = max(len(problem.metaops), _FEW_METAOPS) * (1.0 + problem.devices / _FEW_DEVICES)
    return max(1, int(seconds * _METAOPS_MOVES_PER_S / size))


def unplaced_runs(found: Instance, schedule: Schedule) -> list[UnplacedRun]:
    """The runs of a schedule; slices of one allocation that follow each other at once are one run."""
    done = [0] * len(found.layers)
    open_: dict[int, UnplacedRun] = {}
    runs: list[UnplacedRun] = []
    for (m, n, d, l, _), start in zip(schedule.order, schedule.starts, strict=True):
        first, done[m] = done[m], done[m] + l
        last = open_.get(m)
        if last is not None and last.n == n and abs(last.end_ms - start) < _SAME_TIME_MS:
            open_[m] = replace(last, last=done[m], end_ms=start + d)
            continue
        if last is not None:
            runs.append(last)
        open_[m] = UnplacedRun(found.names[m], first, done[m], n, start, start + d)
    return [*runs, *open_.values()]


def _starts(
    problem: PlanningProblem, found: Instance, rivals: Rivals, clock: Clock
) -> tuple[float, list[Order]]:
    """A lower bound, and orders to start from, the shortest schedules first."""
    bound_ms = critical_path_ms(problem)
    orders = [order for runs in rivals.runs() if (order := from_runs(found, runs)) is not None]
    for capacity in _CAPACITIES:
        if capacity != _CAPACITIES[0] and clock.passed(_START_SHARE):
            break
        table = None if capacity == 1.0 and not _has_costs(found) else found.table()
        relaxed = across_levels(problem, capacity=capacity, table=table)
        if table is None:
            bound_ms = max(bound_ms, relaxed.span_ms)
        orders += rounded(found, relaxed)
    spans = [decode(found, order).makespan_ms for order in orders]
    ranked = sorted(range(len(orders)), key=lambda i: (spans[i], i))
    return bound_ms, [orders[i] for i in ranked]


def _has_costs(found: Instance) -> bool:
    return any(any(extra) for extra in found.slice_ms)


def _search(found: Instance, starts: list[Order], budget: Budget, seed: int) -> Iterator[Schedule]:
    """The best schedule where nothing counts but the makespan."""
    best = anneal_from(found, starts, budget, Random(seed), Cooling())
    shorter = improve(found, best.makespan_ms)
    yield decode(found, shorter) if shorter is not None else best


def _search_real(
    problem: PlanningProblem, found: Instance, starts: list[Order], budget: Budget, seed: int
) -> Iterator[Schedule]:
    """Finalists where plans cost more than their makespan.

    How much of the synchronisation is hidden is known when a plan is simulated; so there are finalists
    for which all of it counts and for which little does, with few splits and with none.
    """
    random = Random(seed)
    few = Cooling(slice_weight=_FEW_SLICES)
    yield anneal_from(found, starts, budget.part(0.25), random, few)
    single = [one_slice_each(found, order) for order in starts]
    single.sort(key=lambda order: decode(found, order).makespan_ms)
    yield anneal_from(found, single, budget.part(0.25, 0.75), random, Cooling(), split=False)
    hidden = instance(problem, exposed=_HIDDEN)
    there = [order for start in starts if (order := translated(start, hidden)) is not None]
    for cooling, left in ((few, 0.5), (Cooling(), 0.25)):
        yield anneal_from(hidden, there, budget.part(0.25, left), random, cooling)
