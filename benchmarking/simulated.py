"""The simulated mode: a workload is planned for a cluster and an iteration of its program simulated.

One cost set (``lightning_spindle.costs.AnalyticCosts``) serves planners, simulator and baselines.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from benchmarking import setups
from benchmarking.baselines import best
from benchmarking.results import whole
from benchmarking.rows import SimulatedRow
from lightning_spindle.costs import AnalyticCosts
from lightning_spindle.estimate.problem import planning_problem
from lightning_spindle.estimate.samples import Samples
from lightning_spindle.graph import Layout, MetaGraph, OperatorGraph
from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.planner import PLANNERS
from lightning_spindle.planner.bounds import lower_bounds
from lightning_spindle.planner.choice import Workload, choose
from lightning_spindle.planner.contraction import contract
from lightning_spindle.planner.curves import valid_allocations
from lightning_spindle.planner.problem import LayerTime, PlanningProblem
from lightning_spindle.planner.spindle import Reading, stage_schedule
from lightning_spindle.simulate import simulate
from lightning_spindle.timeline import Category, Timeline

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """A row and what it was made of."""

    row: SimulatedRow
    timeline: Timeline | None = None
    plan: ExecutionPlan | None = None


@dataclass(frozen=True)
class Cell:
    """A workload on a cluster: everything that its systems share."""

    workload: str
    tasks: int
    cluster: str
    costs: AnalyticCosts
    shard_optimizer_state: bool = False
    setup: str = ""
    """See ``SimulatedRow.setup``."""

    @property
    def graph(self) -> OperatorGraph:
        return self.costs.graph

    @cached_property
    def metagraph(self) -> MetaGraph:
        return contract(self.graph)

    @cached_property
    def problem(self) -> PlanningProblem:
        """What planners see."""
        samples = samples_of(self.metagraph, self.costs)
        return planning_problem(
            self.workload,
            self.metagraph,
            self.graph,
            samples,
            self.costs.cluster,
            state=self.costs.state,
            shard_optimizer_state=self.shard_optimizer_state,
        )

    @cached_property
    def step(self) -> Workload:
        trainable = frozenset(p.name for p in self.graph.parameters if p.trainable)
        return Workload(self.metagraph, self.graph, self.costs, trainable, self.shard_optimizer_state)

    @cached_property
    def bound_ms(self) -> float:
        """A true lower bound on computing."""
        return lower_bounds(self.problem).bound_ms

    @cached_property
    def c_star_ms(self) -> float:
        """The paper's theoretical optimum of appendix B, MetaLevels summed."""
        c_star_ms, _ = stage_schedule(self.problem, Reading())
        return c_star_ms

    def row(self, system: str, planner: str = "", setting: str = "", mode: str = "simulated") -> SimulatedRow:
        """Of a job that has not run."""
        return SimulatedRow(
            date=_now(),
            mode=mode,
            workload=self.workload,
            tasks=self.tasks,
            cluster=self.cluster,
            devices=self.costs.cluster.devices,
            system=system,
            planner=planner,
            setting=setting,
            optimizer_state=_optimizer_state(self.shard_optimizer_state) if system == "spindle" else "",
            kind=self.costs.kind.name,
            setup=self.setup,
            operators=len(self.graph.operators),
            metaops=len(self.metagraph.metaops),
        )


def samples_of(metagraph: MetaGraph, costs: AnalyticCosts) -> Samples:
    """Analytic times in the form of measured ones, at the rows of every valid allocation."""
    times: dict[str, dict[int, LayerTime]] = {}
    for m in metagraph.metaops:
        devices = costs.cluster.devices if m.layout is Layout.SPLIT else 1
        rows = {-(-m.batch // n) for n in valid_allocations(m.batch, devices, False)}
        for operator in (o for layer in m.layers for o in layer):
            times[operator] = {
                r: LayerTime(*(1e3 * costs.operator_s(operator, r, backward) for backward in (False, True)))
                for r in sorted(rows)
            }
    return Samples(times)


@dataclass(frozen=True, slots=True)
class Planning:
    """Which planner plans, for how long, from which seed."""

    planner: str
    time_limit_s: float | None
    seed: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The planners that "auto", or the one name, stands for.

        Raises:
            ValueError: there is no such planner, or no such time.
        """
        if self.planner not in (*PLANNERS, "auto"):
            raise ValueError(f"there is no planner {self.planner!r}; there are auto, {', '.join(PLANNERS)}")
        if self.time_limit_s is not None and self.time_limit_s < 0:
            raise ValueError(f"planner.time_limit_s={self.time_limit_s:g} is less than 0")
        return tuple(PLANNERS) if self.planner == "auto" else (self.planner,)

    def row(self, cell: Cell, mode: str = "simulated") -> SimulatedRow:
        """Of a job of Spindle's that has not run."""
        blank = cell.row("spindle", self.planner, mode=mode)
        return replace(blank, seed=self.seed, time_limit_s=self.time_limit_s)


def simulate_spindle(cell: Cell, planning: Planning) -> Result:
    """Plan ("auto": by the planner whose simulated iteration is shortest), lower and simulate."""
    row, names = planning.row(cell), planning.names
    started_s = time.perf_counter()
    limit_s, seed = planning.time_limit_s, planning.seed
    plan = choose(cell.problem, cell.step, names, time_limit_s=limit_s, seed=seed).plan
    planning_s = time.perf_counter() - started_s
    timeline = simulate(cell.step.program(plan), cell.costs)
    row = replace(
        _told(row, timeline),
        setting=plan.planner if planning.planner == "auto" else "",
        planning_s=planning_s,
        computing_ms=plan.makespan_ms,
        bound_ms=cell.bound_ms,
        c_star_ms=cell.c_star_ms,
    )
    return Result(row, timeline, plan)


def simulate_baseline(cell: Cell, system: str) -> Result:
    """The best setting of DeepSpeed or Megatron-LM."""
    execution = best(system, cell.costs)
    row = _told(cell.row(system, setting=str(execution.setting)), execution.timeline)
    return Result(replace(row, memory_bytes=execution.memory_bytes), execution.timeline)


def attempted(row: SimulatedRow, job: Callable[[], Result], failures: type[Exception] = ValueError) -> Result:
    """The job's result, or its row with why there is none: it refused, or failed by one of ``failures``."""
    try:
        return job()
    except failures as failure:
        return Result(replace(row, error=reason(failure)))


def refused(config: Mapping[str, Any], failure: Exception) -> SimulatedRow:
    """The row of a job whose workload on its cluster there is not."""
    workload, cluster, planner = config["workload"], config["cluster"], config["planner"]
    return SimulatedRow(
        date=_now(),
        mode=config["mode"]["name"],
        workload=setups.title_of(workload),
        tasks=whole(workload["tasks"]),
        cluster=cluster["name"],
        devices=whole(cluster["devices"]),
        system="spindle",
        planner=planner["name"],
        setting="",
        optimizer_state=_optimizer_state(bool(config.get("shard_optimizer_state", False))),
        setup=setups.fingerprint(workload, cluster),
        seed=whole(config["seed"]),
        time_limit_s=planner["time_limit_s"] if isinstance(planner["time_limit_s"], int | float) else None,
        error=reason(failure),
    )


def reason(failure: Exception) -> str:
    """A row's error; the trace of what is no refusal is logged."""
    if not isinstance(failure, ValueError):
        _log.error("a job failed", exc_info=failure)
    return f"{type(failure).__name__}: {failure}"


def _optimizer_state(sharded: bool) -> str:
    return "sharded" if sharded else "whole"


def _now() -> str:
    return datetime.now().isoformat(timespec="seconds")


def _told(row: SimulatedRow, timeline: Timeline) -> SimulatedRow:
    shares = timeline.breakdown()
    total_s = timeline.span_s * timeline.devices
    computing_s = sum(shares[c] for c in Category if c.computes)
    peaks = [b for rank in range(timeline.devices) if (b := timeline.peak_bytes(rank)) is not None]
    return replace(
        row,
        simulated_ms=timeline.span_s * 1e3,
        utilisation=timeline.utilisation,
        compute_share=computing_s / total_s,
        transfer_share=shares[Category.TRANSFER] / total_s,
        sync_share=shares[Category.SYNC] / total_s,
        memory_bytes=max(peaks, default=None),
    )
