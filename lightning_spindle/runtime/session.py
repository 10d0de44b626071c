"""What a fit or a test runs on: captured steps, the plan, and an engine for each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_spindle.capture import capture
from lightning_spindle.capture.arrangement import Arrangement
from lightning_spindle.capture.attributes import changed
from lightning_spindle.capture.pieces import BatchLayout, Capture, Total
from lightning_spindle.costs import Costs
from lightning_spindle.graph import Layout, MetaGraph, Parameter
from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.planner.contraction import contract
from lightning_spindle.program import Program, ProgramRun, follow, holders, place_plan, spread
from lightning_spindle.runtime.engine import Engine
from lightning_spindle.runtime.objects import broadcast_object, broadcast_tensors, require_agreement
from lightning_spindle.runtime.state import LocalisedModel
from lightning_spindle.runtime.training import Programs, Training
from lightning_spindle.runtime.transport import ProcessGroupTransport, Transport, everyone

TRAIN = "training_step"


@dataclass(frozen=True, slots=True)
class StepExample:
    """Example batches of a step on the device, by task, and how each is taken apart.

    ``arrangement`` says how the step gets them, where the model is no ``MultiTaskModule``. Loaders
    named in ``drawing`` move the generators of the process that reads them, those in ``varying`` are
    collated by user code, which may leave out an optional part of a batch; those in ``by_rows`` are read row
    by row, each rank's own. ``listened``: hooks see what the step returns beside its loss.
    """

    batches: Mapping[str, Any]
    layouts: Mapping[str, BatchLayout]
    arrangement: Arrangement | None = None
    drawing: frozenset[str] = frozenset()
    varying: frozenset[str] = frozenset()
    by_rows: frozenset[str] = frozenset()
    listened: bool = False


@dataclass(frozen=True, slots=True)
class TotalRun:
    """A total, built, with its parameters by name."""

    total: Total
    function: Callable[..., tuple[Any, ...]]
    parameters: Mapping[str, nn.Parameter]

    def foreign(self, program: Program, rank: int) -> list[nn.Parameter]:
        """Trainable parameters whose gradients are summed over ranks, of which another rank's counts.

        Every rank's total computes the same gradient; only one may add to the sum.
        """
        counting = {n: program.holders[n][0] for b in program.buckets for n in b.parameters}
        return [
            p for name, p in self.parameters.items() if p.requires_grad and counting.get(name, rank) != rank
        ]


@dataclass(frozen=True, slots=True)
class Step:
    """A step that this rank can run; ``totals`` by the tasks that a batch holds.

    ``programs`` are those for each set of parameters that trains. Every rank must read the loaders named
    in ``drawing``.
    """

    capture: Capture
    programs: Programs
    engine: Engine
    totals: Mapping[frozenset[str], TotalRun] = field(default_factory=dict)
    drawing: frozenset[str] = frozenset()

    @property
    def program(self) -> Program:
        """The program that runs at present."""
        return self.engine.program

    def hosts(self, loader: str) -> tuple[int, ...]:
        """The ranks that run an operator of the task to which a loader's batches belong."""
        task = loader if loader in self.capture.layouts else next(iter(self.capture.layouts))
        return tuple(sorted({rank for run in self.program.runs if run.task == task for rank in run.devices}))

    def outdated(self, model: nn.Module) -> list[str]:
        """Attributes of the model that the step has other values of in it."""
        return changed(model, self.capture.attributes)

    def follow(self, training: Training) -> None:
        """Runs the program for what trains now."""
        program = self.programs.of(training.trainable)
        if program is not self.program or training.digest != self.engine.digest:
            self.engine.use(program, training.digest)


@dataclass(frozen=True, slots=True)
class Ground:
    """What all steps of a run are built on."""

    model: nn.Module
    transport: Transport
    device: torch.device
    operators: tuple[type[nn.Module], ...]
    seed: int
    shard_optimizer_state: bool

    def capture(self, step: str, example: StepExample) -> Capture:
        """A step taken apart, of which all ranks must find the same (collective).

        Raises:
            ValueError: they do not.
        """
        captured = capture(
            self.model,
            step,
            example.batches,
            example.layouts,
            operators=self.operators,
            arrangement=example.arrangement,
            listened=example.listened,
        )
        require_agreement("the captured graph", _lines(captured), self.transport, self.device)
        return captured

    def step(
        self,
        captured: Capture,
        programs: Programs,
        trainable: frozenset[str] | None,
        parameters: Mapping[str, nn.Parameter],
        drawing: frozenset[str],
    ) -> Step:
        """The step as this rank runs it; makes the groups that it needs (collective)."""
        program = programs.of(trainable)
        if isinstance(self.transport, ProcessGroupTransport):
            self.transport.prepare(program.groups())
        mine = [name for run in program.runs if self.transport.rank in run.devices for name in run.operators]
        callables = {name: captured.pieces[name].build() for name in mine}
        engine = Engine(program, captured, callables, parameters, self.transport, self.device, seed=self.seed)
        totals = {
            active: TotalRun(total, total.build(), {name: parameters[name] for name in total.parameters})
            for active, total in captured.totals.items()
        }
        return Step(captured, programs, engine, totals, drawing)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, with the measured costs that it was made from (None for a given plan)."""

    plan: ExecutionPlan
    costs: Costs | None


@dataclass(frozen=True, slots=True)
class Session:
    """Everything built for a model: ``planned`` is None where nothing is trained.

    ``parameters`` are those that this rank holds, ``trained`` those that training steps use; both grow
    with variants of steps.
    """

    ground: Ground
    planned: Planned | None
    state: LocalisedModel
    steps: Mapping[str, Step]
    parameters: dict[str, nn.Parameter]
    trained: dict[str, Parameter]


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
    shard_optimizer_state: bool = False,
) -> Session:
    """Captures, plans, lowers and localises; a collective call.

    Args:
        examples: by step name; "training_step" decides the plan, the other steps follow it.

    Raises:
        ValueError: ranks do not have the same model, graph or plan; the plan does not fit.
    """
    require_agreement("the model", _outline(model), transport, device)
    broadcast_tensors([*model.parameters(), *model.buffers()], transport)
    ground = Ground(model, transport, device, operators, seed, shard_optimizer_state)
    captures = {step: ground.capture(step, example) for step, example in examples.items()}
    trained = captures.get(TRAIN)
    planned, metagraph = None, None
    if trained is not None:
        metagraph = contract(trained.graph)
        planned = planning(model, trained, metagraph, trained.batches(examples[TRAIN].batches))
        require_agreement("the plan", planned.plan.to_json(), transport, device)
        _require_fit(planned.plan, metagraph, transport.size)
    placed = _place(captures, planned.plan if planned else None, metagraph, transport.size)
    held = holders([(placed[step], captures[step].graph) for step in captures])
    joining = {p for c in captures.values() for p in c.joining}
    held |= {p: everyone(transport) for p in joining if p in held}
    written = written_buffers(model, captures, placed)
    state = LocalisedModel(model, held, written, transport, device)
    used = {} if trained is None else trained.graph.parameter_map()
    if shard_optimizer_state:
        state.share_out(used.values())
    mine = {n: p for n, p in model.named_parameters() if state.holds(n)}
    steps = {
        step: ground.step(
            captured,
            Programs(placed[step], captured.graph, transport.size, state, used),
            trainable_names(model) if step == TRAIN else None,
            mine,
            examples[step].drawing,
        )
        for step, captured in captures.items()
    }
    return Session(ground, planned, state, steps, mine, used)


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


def trainable_names(model: nn.Module) -> frozenset[str]:
    """The parameters that are not frozen."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def written_buffers(
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
