"""A traced step of one task taken apart: measured, verified, classified, grouped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import TreeSpec

from lightning_spindle.capture import untouched
from lightning_spindle.capture.assemble import Assembler, Parts
from lightning_spindle.capture.branches import Rows, settled
from lightning_spindle.capture.classify import Info, classify
from lightning_spindle.capture.errors import CaptureWarning, StepOutputError, TraceError
from lightning_spindle.capture.evaluate import kept_generators
from lightning_spindle.capture.grouping import Grouping
from lightning_spindle.capture.inplace import protect_known, protect_measured, spread_tuples
from lightning_spindle.capture.measure import SEED, Measured, TraceRun, dynamic, measure
from lightning_spindle.capture.patches import as_scalar
from lightning_spindle.capture.pieces import BatchLayout
from lightning_spindle.capture.returned import beside_loss, require_same, settle
from lightning_spindle.capture.sizes import read_from_batch
from lightning_spindle.capture.step import Step, StepTrace, loss_of
from lightning_spindle.capture.tracer import trace_step


@contextmanager
def mode(model: nn.Module, step: str) -> Iterator[None]:
    """Training steps are captured under the modules' own flags, others in evaluation mode."""
    flags = [(m, m.training) for m in model.modules()]
    try:
        if step != "training_step":
            model.eval()
        yield
    finally:
        for m, training in flags:
            m.training = training


Infos = dict[fx.Node, Info]


@dataclass
class Apart:
    """A task's parts, and what was found on the way."""

    parts: Parts
    infos: Infos
    measured: dict[fx.Node, Measured]
    results: dict[str, torch.Tensor]


def classified(trace: StepTrace, leaves: Sequence[Any], layout: BatchLayout) -> Infos:
    """Every node's kind, and whether its shape depends on values, by running the trace."""
    infos = classify(trace, leaves, layout)
    for node in dynamic(trace, leaves, layout):
        infos[node].dynamic = True
    return infos


def take_apart(
    step: Step,
    trace: StepTrace,
    leaves: Sequence[Any],
    layout: BatchLayout,
    check: Callable[[TraceRun], None] | None = None,
    kinds: Callable[[StepTrace, Sequence[Any], BatchLayout], Infos] = classified,
) -> Apart:
    """The operators of a trace, whose nodes are changed where they work in place.

    ``check`` is shown what the traced step gave before they are classified, which ``kinds`` does.

    Raises:
        TraceError: it cannot be taken apart.
        StepOutputError: a result has rows.
    """
    read_from_batch(trace, leaves, layout)
    backward = step.name == "training_step"
    measured, run = measure(trace, leaves, backward)
    while protect_measured(trace.graph) | spread_tuples(trace.graph):
        measured, run = measure(trace, leaves, backward)
    if check is not None:
        check(run)
    infos = kinds(trace, leaves, layout)
    returned = None
    if trace.output is not None:
        returned = settle(trace.output, trace.results, infos, measured, step.task)
    grouping = Grouping(trace, infos)
    for key, node in trace.results.items():
        if infos[node].tags & {"rows"}:
            raise StepOutputError(
                f"task {step.task!r}: {step.name} gives {key}, which is no scalar but has rows"
            )
    parts = Assembler(step, trace, grouping, infos, measured).parts(returned)
    return Apart(parts, infos, measured, run.results)


def warn_of_opaque(task: str, trace: StepTrace) -> None:
    """One warning for each module that could not be traced through."""
    for path, reason in trace.opaque.items():
        warnings.warn(
            f"task {task!r}: module {path} cannot be traced through: {reason}. It runs as one operator",
            CaptureWarning,
            stacklevel=4,
        )


def traced(step: Step, leaves: Sequence[Any], spec: TreeSpec, rows: Rows) -> StepTrace:
    """The trace, in which what it would freeze was looked for; see ``branches.settled`` for ``rows``.

    Raises:
        TraceError: the step cannot be traced faithfully.
    """
    trace = settled(step, leaves, spec, rows, partial(_traced_twice, step, leaves, spec))
    protect_known(trace.graph, lambda n: trace.holder.get_submodule(str(n.target)))
    return trace


def _traced_twice(step: Step, leaves: Sequence[Any], spec: TreeSpec, closed: Mapping[str, str]) -> StepTrace:
    """The trace, made under different seeds: what is drawn or changed outside of it would be frozen.

    What the first one changes in the model, and no other does, is a lazy initialisation; parameters are
    changed by none.
    """
    with untouched.kept_parameters(step.model) as rewritten:
        trace = _traced_until_equal(step, leaves, spec, closed)
    _require_not_rewritten(rewritten)
    return trace


def _traced_until_equal(
    step: Step, leaves: Sequence[Any], spec: TreeSpec, closed: Mapping[str, str]
) -> StepTrace:
    with untouched.kept_attributes(step.model):
        traces = [_trace(step, leaves, spec, closed, 11)]
        for seed in (12, 13):
            with untouched.kept_attributes(step.model) as effects:
                traces.append(_trace(step, leaves, spec, closed, seed))
            if effects.changes:
                names = ", ".join(dict.fromkeys(change.name for change in effects.changes))
                raise TraceError(f"the step changes attributes of the model: {names}")
            if _text(traces[-2]) == _text(traces[-1]):
                return traces[-1]
    raise TraceError("the step draws random numbers outside of torch operations on tensors")


def _trace(
    step: Step, leaves: Sequence[Any], spec: TreeSpec, closed: Mapping[str, str], seed: int
) -> StepTrace:
    with kept_generators(seed):
        return trace_step(step, leaves, spec, closed)


def _text(trace: StepTrace) -> list[str]:
    words = [f"{n.op} {n.target} {n.args} {n.kwargs}" for n in trace.graph.nodes]
    constants = {k: v for k, v in vars(trace.holder).items() if isinstance(v, torch.Tensor)}
    words += [f"{k} {v.tolist()}" for k, v in sorted(constants.items())]
    return words if trace.output is None else [*words, trace.output.text()]


def verify(step: Step, leaves: Sequence[Any], spec: TreeSpec, traced: TraceRun) -> None:
    """Compare what the traced step gave and the buffers that it wrote with those of the step itself.

    Raises:
        TraceError: they differ.
    """
    done = untouched.run_step(step, leaves, spec, SEED)
    _require_not_rewritten(done.effects.rewritten)
    own = {f"log:{k}": v for k, v in done.logged if not isinstance(v, nn.Module)}
    own["loss"] = loss_of(step, done.output)
    for key, value in traced.results.items():
        if not _alike(value, own[key]):
            raise TraceError(f"the traced step gives another {key} than the step itself")
    if step.listened:
        require_same(traced.output, beside_loss(step.name, done.output))
    for name in traced.written.keys() | done.written.keys():
        values = traced.written.get(name), done.written.get(name)
        if values[0] is None or values[1] is None or not _alike(*values):
            raise TraceError(f"the step writes its buffer {name} in a way that cannot be traced")


def _require_not_rewritten(names: Sequence[str]) -> None:
    if names:
        raise TraceError(f"the step changes parameters itself: {', '.join(names)}")


def _alike(ours: torch.Tensor, own: Any) -> bool:
    a, b = ours.detach().double(), as_scalar(own).detach().double().to(ours.device)
    return torch.allclose(a.reshape(-1), b.reshape(-1), rtol=1e-4, atol=1e-5, equal_nan=True)
