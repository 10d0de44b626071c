"""What a fit or a test runs on: captured steps, the plan, and an engine for each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_spindle.capture import capture
from lightning_spindle.capture.arrangement import Arrangement
from lightning_spindle.capture.pieces import BatchLayout, Capture, Total
from lightning_spindle.costs import Costs
from lightning_spindle.graph import Layout, MetaGraph
from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.planner.contraction import contract
from lightning_spindle.program import Program, ProgramRun, follow, holders, lower, place_plan, spread
from lightning_spindle.runtime.engine import Engine
from lightning_spindle.runtime.objects import broadcast_object, broadcast_tensors, require_agreement
from lightning_spindle.runtime.state import LocalisedModel
from lightning_spindle.runtime.transport import ProcessGroupTransport, Transport, everyone
from lightning_spindle.simulate import check_deadlock

TRAIN = "training_step"


@dataclass(frozen=True, slots=True)
class StepExample:
    """Example batches of a step on the device, by task, and how each is taken apart.

    ``arrangement`` says how the step gets them, where the model is no ``MultiTaskModule``. Loaders
    named in ``drawing`` move the generators of the process that reads them.
    """

    batches: Mapping[str, Any]
    layouts: Mapping[str, BatchLayout]
    arrangement: Arrangement | None = None
    drawing: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TotalRun:
    """A total, built.

    ``foreign`` are parameters of the total whose gradients are summed over ranks, though every
    rank's total computes the same: another rank's is the one that counts.
    """

    total: Total
    function: Callable[..., tuple[Any, ...]]
    foreign: tuple[nn.Parameter, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A step that this rank can run; ``totals`` by the tasks that a batch holds.

    Every rank must read the loaders named in ``drawing``.
    """

    capture: Capture
    program: Program
    engine: Engine
    totals: Mapping[frozenset[str], TotalRun] = field(default_factory=dict)
    drawing: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, with the measured costs that it was made from (None for a given plan)."""

    plan: ExecutionPlan
    costs: Costs | None


@dataclass(frozen=True, slots=True)
class Session:
    """Everything built for a model: ``planned`` is None where nothing is trained."""

    planned: Planned | None
    state: LocalisedModel
    steps: Mapping[str, Step]


Planning = Callable[[nn.Module, Capture, MetaGraph, Mapping[str, Any]], Planned]
"""Gives the plan of a captured training step, from the example batches; called on every rank."""


def build_session(
    model: nn.Module,
    examples: Mapping[str, StepExample],
    transport: Transport,
    device: torch.device,
    planning: Planning,
    *,
    operators: tuple[type[nn.Module], ...] = (),
    seed: int = 0,
) -> Session:
    """Captures, plans, lowers and localises; a collective call.

    Args:
        examples: by step name; "training_step" decides the plan, the other steps follow it.

    Raises:
        ValueError: ranks do not have the same model, graph or plan; the plan does not fit.
    """
    require_agreement("the model", _outline(model), transport, device)
    broadcast_tensors([*model.parameters(), *model.buffers()], transport)
    captures = {
        step: capture(
            model,
            step,
            example.batches,
            example.layouts,
            operators=operators,
            arrangement=example.arrangement,
        )
        for step, example in examples.items()
    }
    require_agreement("the captured graph", "\n".join(map(_lines, captures.values())), transport, device)
    trained = captures.get(TRAIN)
    planned, metagraph = None, None
    if trained is not None:
        metagraph = contract(trained.graph)
        planned = planning(model, trained, metagraph, trained.batches(examples[TRAIN].batches))
        require_agreement("the plan", planned.plan.to_json(), transport, device)
        _require_fit(planned.plan, metagraph, transport.size)
    placed = _place(captures, planned.plan if planned else None, metagraph, transport.size)
    held = holders([(placed[step], captures[step].graph) for step in captures])
    joining = {p for c in captures.values() for total in c.totals.values() for p in total.parameters}
    held |= {p: everyone(transport) for p in joining if p in held}
    programs = {
        step: lower(
            placed[step],
            captures[step].graph,
            transport.size,
            held,
            trainable=_trainable(model) if step == TRAIN else None,
        )
        for step in captures
    }
    for program in programs.values():
        check_deadlock(program)
    written = _written_buffers(model, captures, placed)
    if isinstance(transport, ProcessGroupTransport):
        transport.prepare(group for program in programs.values() for group in program.groups())
    state = LocalisedModel(model, held, written, transport, device)
    mine = {n: p for n, p in model.named_parameters() if state.holds(n)}
    steps = {
        step: Step(
            c,
            programs[step],
            _engine(programs[step], c, mine, transport, device, seed),
            {a: _total_run(total, programs[step], mine, transport) for a, total in c.totals.items()},
            examples[step].drawing,
        )
        for step, c in captures.items()
    }
    return Session(planned, state, steps)


def _total_run(
    total: Total, program: Program, parameters: Mapping[str, nn.Parameter], transport: Transport
) -> TotalRun:
    counting = {p: program.holders[p][0] for bucket in program.buckets for p in bucket.parameters}
    foreign = [p for p in total.parameters if counting.get(p, transport.rank) != transport.rank]
    return TotalRun(total, total.build(), tuple(parameters[p] for p in foreign))


def _engine(
    program: Program,
    captured: Capture,
    parameters: Mapping[str, nn.Parameter],
    transport: Transport,
    device: torch.device,
    seed: int,
) -> Engine:
    mine = [name for run in program.runs if transport.rank in run.devices for name in run.operators]
    callables = {name: captured.pieces[name].build() for name in mine}
    return Engine(program, captured, callables, parameters, transport, device, seed=seed)


def _place(
    captures: Mapping[str, Capture], plan: ExecutionPlan | None, metagraph: MetaGraph | None, devices: int
) -> dict[str, Sequence[ProgramRun]]:
    """The training step by the plan, other steps where its parameters lie, else over all devices."""
    if plan is None or metagraph is None:
        return {step: spread(c.graph, devices) for step, c in captures.items()}
    trained = captures[TRAIN].graph
    runs = place_plan(plan, metagraph, trained)
    return {
        step: runs if step == TRAIN else follow(runs, devices, trained, c.graph)
        for step, c in captures.items()
    }


def _require_fit(plan: ExecutionPlan, metagraph: MetaGraph, devices: int) -> None:
    if plan.devices != devices:
        raise ValueError(f"invalid plan: it is for {plan.devices} devices, there are {devices}")
    other = [run for run in plan.runs if run.configuration.data != len(run.devices)]
    if other:
        raise ValueError(
            f"invalid plan: {other[0]} is configured as {other[0].configuration}; operators run data "
            f"parallel only, tensor and sequence parallelism are not supported yet"
        )
    plan.validate(metagraph)


def shared_plan(plan: ExecutionPlan | None, transport: Transport, device: torch.device) -> ExecutionPlan:
    """Rank 0's plan on every rank, so that noise in measurements cannot give two plans."""
    text = broadcast_object(None if plan is None else plan.to_json(), transport, device)
    return ExecutionPlan.from_json(text)


def _trainable(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _written_buffers(
    model: nn.Module, captures: Mapping[str, Capture], placed: Mapping[str, Sequence[ProgramRun]]
) -> dict[str, int]:
    """Buffer to the rank whose operators write its module's; what every rank writes is left out."""
    owners: dict[str, int] = {}
    for step in sorted(captures, key=lambda name: name != TRAIN):
        for run in placed[step]:
            if run.layout is not Layout.EVERYWHERE:
                for buffer in (b for o in run.operators for b in captures[step].written.get(o, ())):
                    owners.setdefault(_module_of(buffer), run.devices[0])
    names = [name for name, _ in model.named_buffers() if _module_of(name) in owners]
    return {name: owners[_module_of(name)] for name in names}


def _module_of(buffer: str) -> str:
    return buffer.rpartition(".")[0]


def _lines(captured: Capture) -> str:
    """A captured step's graph, one part a line."""
    graph = captured.graph
    return "\n".join(
        repr(part)
        for part in (*graph.operators, *graph.values, *graph.parameters, *graph.results, graph.rows)
    ) + "".join(
        f"\n{sorted(active)} {total.sources} {total.outputs} {total.parameters}"
        for active, total in captured.totals.items()
    )


def _outline(model: nn.Module) -> str:
    """Names, shapes and dtypes of all parameters and buffers, a line each; the values are broadcast."""
    lines = [
        f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad}"
        for name, t in [*model.named_parameters(), *model.named_buffers()]
    ]
    return "\n".join(lines)
