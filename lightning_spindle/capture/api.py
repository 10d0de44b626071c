"""``capture``: a step of all tasks taken apart into operators."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils._pytree import TreeSpec

from lightning_spindle.capture import untouched
from lightning_spindle.capture.assemble import Assembler, Parts
from lightning_spindle.capture.classify import classify
from lightning_spindle.capture.coarse import coarse_parts
from lightning_spindle.capture.errors import CaptureWarning, StepOutputError, TraceError, reason_of
from lightning_spindle.capture.evaluate import kept_generators
from lightning_spindle.capture.grouping import Grouping
from lightning_spindle.capture.inplace import protect_known, protect_measured, spread_tuples
from lightning_spindle.capture.layout import flatten
from lightning_spindle.capture.measure import SEED, dynamic, measure
from lightning_spindle.capture.pieces import BatchLayout, Capture, LogCall, Piece
from lightning_spindle.capture.sizes import read_from_batch
from lightning_spindle.capture.tracer import Step, StepTrace, trace_step
from lightning_spindle.graph import Layout, Operator, OperatorGraph, Parameter

_LOCK = threading.Lock()  # tracing replaces functions of torch for its duration


def capture(
    model: nn.Module,
    step: str,
    batches: Mapping[str, Any],
    layouts: Mapping[str, BatchLayout],
    *,
    operators: tuple[type[nn.Module], ...] = (),
) -> Capture:
    """The operators of ``step`` of every task that has a batch and the step.

    Guaranteed: the model, its buffers, metrics and train flags, and all random generators are as
    before. Running the pieces of a task gives the results of its step, on the example batch
    checked against the step itself; a step for which this does not hold becomes one coarse
    operator, with a ``CaptureWarning``.

    Args:
        model: a ``MultiTaskModule``, on the device of the batches.
        step: "training_step", "validation_step" or "test_step".
        batches: an example batch for each task.
        layouts: where they hold their rows (``batch_layout``).
        operators: classes whose instances are operators, beside repeated layers.

    Raises:
        ValueError: a step returns what cannot be gathered, or a coarse step logs a Metric.
    """
    parts: dict[str, Parts] = {}
    logs: list[LogCall] = []
    coarse: dict[str, str] = {}
    with _LOCK, _mode(model, step), torch.inference_mode(False), torch.enable_grad():
        for task, module in model.tasks.items():
            if task not in batches or not is_overridden(step, module):
                continue
            one = Step(model, module, task, step, operators)
            leaves, spec = flatten(batches[task])
            try:
                parts[task], own_logs = _take_apart(one, leaves, spec, layouts[task])
                logs += own_logs
            except StepOutputError:
                raise
            except Exception as error:
                parts[task] = coarse_parts(one, leaves, spec, reason_of(error))
                coarse[parts[task].operators[0].name] = reason_of(error)
    graph = _graph(model, layouts, batches, parts)
    pieces: dict[str, Piece] = {name: piece for part in parts.values() for name, piece in part.pieces.items()}
    return Capture(graph, pieces, {t: layouts[t] for t in parts}, tuple(logs), coarse)


@contextmanager
def _mode(model: nn.Module, step: str) -> Iterator[None]:
    """Training steps are captured under the modules' own flags, others in evaluation mode."""
    flags = [(m, m.training) for m in model.modules()]
    try:
        if step != "training_step":
            model.eval()
        yield
    finally:
        for m, training in flags:
            m.training = training


def _take_apart(
    step: Step, leaves: Sequence[Any], spec: TreeSpec, layout: BatchLayout
) -> tuple[Parts, list[LogCall]]:
    trace = _trace(step, leaves, spec)
    read_from_batch(trace, leaves, layout)
    backward = step.name == "training_step"
    measured, results = measure(trace, leaves, backward)
    while protect_measured(trace.graph) | spread_tuples(trace.graph):
        measured, results = measure(trace, leaves, backward)
    _verify(step, leaves, spec, results)
    infos = classify(trace, leaves, layout)
    for node in dynamic(trace, leaves, layout):
        infos[node].dynamic = True
    grouping = Grouping(trace, infos)
    for key, node in trace.results.items():
        if infos[node].tags & {"rows"}:
            raise StepOutputError(
                f"task {step.task!r}: {step.name} gives {key}, which is no scalar but has rows"
            )
    for path, reason in trace.opaque.items():
        warnings.warn(
            f"task {step.task!r}: module {path} cannot be traced through: {reason}. It runs as one operator",
            CaptureWarning,
            stacklevel=3,
        )
    return Assembler(step, trace, grouping, infos, measured).parts(), trace.logs


def _trace(step: Step, leaves: Sequence[Any], spec: TreeSpec) -> StepTrace:
    """The trace, made twice under different seeds to see what it would freeze."""
    traces = []
    for seed in (11, 12):
        with kept_generators(seed), untouched.kept_attributes(step.model) as changed:
            traces.append(trace_step(step, leaves, spec))
        if changed:
            raise TraceError(f"the step changes attributes of the model: {', '.join(changed)}")
    if _text(traces[0]) != _text(traces[1]):
        raise TraceError("the step draws random numbers outside of torch operations on tensors")
    trace = traces[0]
    protect_known(trace.graph, lambda n: trace.holder.get_submodule(str(n.target)))
    return trace


def _text(trace: StepTrace) -> list[str]:
    words = [f"{n.op} {n.target} {n.args} {n.kwargs}" for n in trace.graph.nodes]
    constants = {k: v for k, v in vars(trace.holder).items() if isinstance(v, torch.Tensor)}
    return words + [f"{k} {v.tolist()}" for k, v in sorted(constants.items())]


def _verify(step: Step, leaves: Sequence[Any], spec: TreeSpec, traced: Mapping[str, torch.Tensor]) -> None:
    """Compare the traced step's results with those of the step itself.

    Raises:
        TraceError: they differ.
    """
    done = untouched.run_step(step, leaves, spec, SEED)
    own = done.results | {f"log:{k}": v for k, v in done.logged if not isinstance(v, nn.Module)}
    for key, value in traced.items():
        a, b = value.double(), torch.as_tensor(own[key]).detach().double().to(value.device)
        if not torch.allclose(a.reshape(-1), b.reshape(-1), rtol=1e-4, atol=1e-5, equal_nan=True):
            raise TraceError(f"the traced step gives another {key} than the step itself")


def _graph(
    model: nn.Module,
    layouts: Mapping[str, BatchLayout],
    batches: Mapping[str, Any],
    parts: Mapping[str, Parts],
) -> OperatorGraph:
    operators = _chained(parts)
    used = {name for o in operators for name in o.parameters}
    return OperatorGraph(
        operators=tuple(operators),
        values=tuple(v for part in parts.values() for v in part.values),
        parameters=tuple(
            Parameter(
                name, p.numel() * p.element_size(), p.requires_grad, str(p.dtype).removeprefix("torch.")
            )
            for name, p in model.named_parameters()
            if name in used
        ),
        results=tuple(r for part in parts.values() for r in part.results),
        rows=tuple((task, layouts[task].rows(flatten(batches[task])[0])) for task in parts),
    )


def _chained(parts: Mapping[str, Parts]) -> list[Operator]:
    """All operators; those that write a buffer, and its readers, share a pin and keep their order.

    Buffers that one operator touches belong to one pin.
    """
    written = {b for part in parts.values() for names in part.written.values() for b in names}
    touched = {
        name: sorted({b.rpartition(".")[0] for b in (part.written[name] | part.read[name]) & written})
        for part in parts.values()
        for name in part.pieces
    }
    pin_of: dict[str, str] = {}
    for owners in touched.values():
        joined = {pin_of.get(owner, owner) for owner in owners}
        for owner in [*owners, *(o for o, pin in pin_of.items() if pin in joined)]:
            pin_of[owner] = min(joined)
    last: dict[str, str] = {}
    chained: list[Operator] = []
    for part in parts.values():
        for operator in part.operators:
            owners = touched[operator.name]
            if owners and operator.layout is not Layout.EVERYWHERE:
                after = tuple(dict.fromkeys(last[o] for o in owners if o in last))
                operator = replace(
                    operator,
                    layout=Layout.WHOLE,
                    pin=f"buffers:{pin_of[owners[0]]}",
                    after=operator.after + after,
                )
                last |= dict.fromkeys(owners, operator.name)
            chained.append(operator)
    return chained
