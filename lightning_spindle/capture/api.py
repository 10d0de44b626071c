"""``capture``: a step of all tasks taken apart into operators."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils._pytree import TreeSpec

from lightning_spindle.capture.apart import mode, take_apart, traced, verify, warn_of_opaque
from lightning_spindle.capture.arrangement import Arrangement
from lightning_spindle.capture.assemble import Parts
from lightning_spindle.capture.coarse import coarse_parts
from lightning_spindle.capture.counting import rows_read, weighed
from lightning_spindle.capture.errors import StepOutputError, reason_of
from lightning_spindle.capture.joint import Joint
from lightning_spindle.capture.pieces import BatchLayout, Capture, LogCall, Piece
from lightning_spindle.capture.step import Step
from lightning_spindle.capture.trees import flatten
from lightning_spindle.graph import Layout, Operator, OperatorGraph, Parameter

LOCK = threading.Lock()  # tracing replaces functions of torch for its duration


def capture(
    model: nn.Module,
    step: str,
    batches: Mapping[str, Any],
    layouts: Mapping[str, BatchLayout],
    *,
    operators: tuple[type[nn.Module], ...] = (),
    arrangement: Arrangement | None = None,
    listened: bool = False,
) -> Capture:
    """The operators of ``step`` of every task that has a batch and the step.

    Guaranteed: the model, its buffers, metrics and train flags, and all random generators are as
    before. Running the pieces of a task gives the results of its step, on the example batch
    checked against the step itself; a step for which this does not hold becomes one coarse
    operator, with a ``CaptureWarning``.

    Args:
        model: a ``MultiTaskModule``, on the device of the batches; or any LightningModule, whose step
            takes the batches as ``arrangement`` says.
        step: "training_step", "validation_step" or "test_step".
        batches: an example batch for each task.
        layouts: where they hold their rows (``batch_layout``).
        operators: classes whose instances are operators, beside repeated layers.
        arrangement: of a module that is no ``MultiTaskModule``.
        listened: hooks see what the step returns beside its loss, of the whole batch on every rank.

    Raises:
        ValueError: a training step gives no scalar loss, or a coarse step logs a Metric.
    """
    if arrangement is not None:
        return _of_module(model, step, batches, layouts, operators, arrangement, listened)
    parts: dict[str, Parts] = {}
    logs: list[LogCall] = []
    coarse: dict[str, str] = {}
    with LOCK, mode(model, step), torch.inference_mode(False), torch.enable_grad():
        for task, module in model.tasks.items():
            if task not in batches or not is_overridden(step, module):
                continue
            one = Step(model, module, task, step, operators, listened=listened)
            leaves, spec = flatten(batches[task], layouts[task].lists)
            try:
                parts[task], own_logs = _take_apart(one, leaves, spec, layouts[task])
                logs += own_logs
            except StepOutputError:
                raise
            except Exception as error:
                parts[task] = coarse_parts(one, leaves, spec, reason_of(error))
                coarse[parts[task].operators[0].name] = reason_of(error)
    graph = graph_of(model, layouts, batches, parts)
    pieces: dict[str, Piece] = {name: piece for part in parts.values() for name, piece in part.pieces.items()}
    return Capture(
        graph,
        pieces,
        {t: layouts[t] for t in parts},
        tuple(logs),
        coarse,
        written=_written(parts),
        attributes={name: value for part in parts.values() for name, value in part.attributes.items()},
        listened=listened,
        returned={task: part.returned for task, part in parts.items() if part.returned is not None},
    )


def _of_module(
    model: nn.Module,
    step: str,
    batches: Mapping[str, Any],
    layouts: Mapping[str, BatchLayout],
    operators: tuple[type[nn.Module], ...],
    arrangement: Arrangement,
    listened: bool,
) -> Capture:
    with LOCK, mode(model, step), torch.inference_mode(False), torch.enable_grad():
        joint = Joint(model, step, batches, layouts, arrangement, operators, listened)
    graph = graph_of(model, joint.layouts, joint.batches, joint.parts)
    return Capture(
        graph,
        {name: piece for part in joint.parts.values() for name, piece in part.pieces.items()},
        {task: joint.layouts[task] for task in joint.parts},
        coarse=joint.coarse,
        arrangement=arrangement,
        totals=joint.totals,
        refused=joint.refused,
        written=_written(joint.parts),
        attributes=joint.attributes,
        listened=listened,
    )


def _take_apart(
    step: Step, leaves: Sequence[Any], spec: TreeSpec, layout: BatchLayout
) -> tuple[Parts, list[LogCall]]:
    trace = traced(step, leaves, spec, {step.task: (list(range(len(leaves))), layout)})
    placed = {n: (step.task, at) for n, at in zip(trace.leaves, layout.leaves, strict=True) if n is not None}
    logs = weighed(trace.logs, trace.sizes, partial(rows_read, leaves=placed))
    apart = take_apart(step, trace, leaves, layout, partial(verify, step, leaves, spec))
    warn_of_opaque(step.task, trace)
    return apart.parts, logs


def graph_of(
    model: nn.Module,
    layouts: Mapping[str, BatchLayout],
    batches: Mapping[str, Any],
    parts: Mapping[str, Parts],
) -> OperatorGraph:
    """The tasks' parts as one graph."""
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
        rows=tuple(
            (task, layouts[task].rows(flatten(batches[task], layouts[task].lists)[0])) for task in parts
        ),
    )


def _written(parts: Mapping[str, Parts]) -> dict[str, frozenset[str]]:
    """Operator to buffers of each module of which it writes any."""
    return {name: frozenset(own) for part in parts.values() for name, own in part.written.items() if own}


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
