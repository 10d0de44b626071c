"""From a captured training step to the plan that all ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from tqdm.auto import tqdm

from lightning_spindle.capture import Capture, flatten
from lightning_spindle.costs import Costs
from lightning_spindle.estimate.devices import usable_cores
from lightning_spindle.estimate.measure import measure
from lightning_spindle.estimate.optimizer import optimizer_s_per_byte
from lightning_spindle.estimate.problem import cluster_from, measured_costs, planning_problem
from lightning_spindle.graph import MetaGraph
from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.planner import PLANNERS
from lightning_spindle.planner.choice import Workload, choose
from lightning_spindle.planner.problem import PlanningProblem
from lightning_spindle.program import Kind, Program
from lightning_spindle.runtime.optimizers import fresh
from lightning_spindle.runtime.session import Planned, shared_plan
from lightning_spindle.runtime.transport import LocalTransport, ProcessGroupTransport
from lightning_spindle.timeline import Timeline

AUTO = "auto"
"""Every planner plans, and the simulator decides."""


def require_planner(name: str) -> None:
    """Raises ValueError, naming those there are, where no planner has the name."""
    if name != AUTO and name not in PLANNERS:
        raise ValueError(f"no planner is called {name!r}; there are {AUTO}, {', '.join(sorted(PLANNERS))}")


def load_plan(plan: ExecutionPlan | str | Path | None) -> ExecutionPlan | None:
    """A plan as given, or read from its JSON file.

    Raises:
        ValueError: the file cannot be read or holds no plan.
    """
    if plan is None or isinstance(plan, ExecutionPlan):
        return plan
    try:
        return ExecutionPlan.from_json(Path(plan).read_text())
    except (OSError, ValueError) as e:
        raise ValueError(f"the plan {plan} cannot be read: {e}") from e


@dataclass(frozen=True, slots=True)
class Planner:
    """Measures operators and links on all ranks, plans on rank 0, and gives its plan to all.

    A given ``plan`` is taken as it is, and nothing is measured. ``processes_per_node`` ranks
    share a machine, its cores and its fast links.
    """

    name: str
    plan: ExecutionPlan | None
    budget_s: float
    transport: ProcessGroupTransport | LocalTransport
    device: torch.device
    processes_per_node: int
    show_progress: bool
    optimizer: torch.optim.Optimizer | None
    shard_optimizer_state: bool

    def __call__(
        self, model: nn.Module, captured: Capture, metagraph: MetaGraph, batches: Mapping[str, Any]
    ) -> Planned:
        if self.plan is not None:
            return Planned(self.plan, None)
        leaves = {t: flatten(batch, captured.layouts[t].lists)[0] for t, batch in batches.items()}
        cores = usable_cores(self.device)
        with tqdm(
            total=1.0,
            desc="Measuring operators",
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {postfix}",
            disable=not (self.show_progress and self.transport.rank == 0),
            leave=False,
        ) as bar:

            def progress(fraction: float, what: str) -> None:
                bar.n = fraction
                bar.set_postfix_str(what)

            samples = measure(
                captured,
                {name: piece.build() for name, piece in captured.pieces.items()},
                leaves,
                self.transport,
                self.device,
                module=model,
                budget_s=self.budget_s,
                busy=min(self.processes_per_node, self.transport.size),
                cores=cores,
                island_size=self.processes_per_node,
                progress=progress,
            )
        cluster = cluster_from(
            samples,
            self.transport.size,
            island_size=self.processes_per_node,
            cores=cores,
            memory_bytes=_memory_bytes(self.device),
        )
        costs = measured_costs(
            captured.graph, cluster, samples, optimizer_s_per_byte=self._optimizer_s_per_byte(model)
        )
        plan = None
        if self.transport.rank == 0:
            problem = planning_problem(
                "fit",
                metagraph,
                captured.graph,
                samples,
                cluster,
                shard_optimizer_state=self.shard_optimizer_state,
            )
            trainable = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
            workload = Workload(metagraph, captured.graph, costs, trainable, self.shard_optimizer_state)
            plan = self._plan(problem, workload)
        return Planned(shared_plan(plan, self.transport, self.device), costs)

    def _optimizer_s_per_byte(self, model: nn.Module) -> float:
        if self.optimizer is None:
            return 0.0
        return optimizer_s_per_byte(
            partial(fresh, self.optimizer), model.parameters(), self.transport, self.device
        )

    def _plan(self, problem: PlanningProblem, workload: Workload) -> ExecutionPlan:
        if self.name != AUTO:
            return choose(problem, workload, (self.name,)).plan
        choice = choose(problem, workload)
        rank_zero_info(str(choice))
        return choice.plan


def _memory_bytes(device: torch.device) -> int | None:
    """Memory of a CUDA device; on a CPU ranks share what there is."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def announce(plan: ExecutionPlan, program: Program, costs: Costs | None, predicted: Timeline | None) -> None:
    """Tells the plan on rank 0: runs, devices, predicted time, and bytes that go between devices."""
    lines = [str(plan)]
    if costs is not None and predicted is not None:
        moved = sum(
            costs.value_bytes(edge.value, task, rows[1] - rows[0]) * (2 if edge.gradient else 1)
            for edge, task, rows in _messages(program, costs)
        )
        reduced = sum(bucket.bytes for bucket in program.buckets)
        lines.append(
            f"predicted iteration {predicted.span_s * 1e3:.1f} ms, {moved / 1e6:.2f} MB between operators, "
            f"{reduced / 1e6:.2f} MB of gradients summed in {len(program.buckets)} buckets"
        )
    rank_zero_info("\n".join(lines))


def _messages(program: Program, costs: Costs) -> list[tuple[Any, str, tuple[int, int]]]:
    found = []
    for instruction in program.order:
        if instruction.kind is Kind.ACTIVATION:
            edge = program.edges[instruction.index]
            task = program.runs[edge.source].task
            rows = program.shared_rows(edge, instruction.source, instruction.target, costs.example_rows(task))
            if rows[0] < rows[1]:
                found.append((edge, task, rows))
    return found
