"""A task's step as one operator, where it cannot be taken apart."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec

from lightning_spindle import tasklog
from lightning_spindle.capture.alone import LoggerCall, alone
from lightning_spindle.capture.assemble import Parts
from lightning_spindle.capture.blocks import is_metric
from lightning_spindle.capture.errors import CaptureWarning
from lightning_spindle.capture.inspecting import inspected
from lightning_spindle.capture.patches import is_scalar
from lightning_spindle.capture.pieces import BatchIndex, LeafRef, Piece, Source
from lightning_spindle.capture.returned import beside_loss
from lightning_spindle.capture.step import Step, loss_of
from lightning_spindle.capture.trees import unflatten
from lightning_spindle.capture.untouched import Effects, StepRun, run_step
from lightning_spindle.graph import Layout, Operator, Reduction, Result, Value

_REWRITTEN = (
    "task {task!r}: {step} changes parameters itself ({names}). Each rank that holds them would have to do "
    "so; move it to a hook, which runs on every rank: on_train_batch_end, say"
)

_REGISTERED = (
    "task {task!r}: {step} adds, replaces or removes {names}, but runs as one operator on one rank: the "
    "others would not have it. Do it in __init__, or in a hook, which runs on every rank"
)

_HIDDEN = (
    "task {task!r}: {step} writes to {names} through .data, which leaves no trace by which other ranks could "
    "be told. Write to the tensor itself, under torch.no_grad()"
)

_SHARED = (
    "task {task!r}: {step} changes {names}, which another task has too, but runs as one operator on one "
    "rank: the other task's step, elsewhere, would see the change too late. Keep it for the task alone, or "
    "change it in a hook, which runs on every rank"
)

_NO_METRIC = (
    "task {task!r}: {step} logs under {key!r} a torchmetrics object that is no attribute of the model, and "
    "so exists on one rank only"
)


@dataclass(frozen=True, slots=True)
class CoarseRun:
    """What a step that ran as one operator did beside its loss.

    ``logs``: key, value and options; ``returned``: what hooks see; ``effects``: on the model; ``calls``: of
    loggers, which have not been made. ``dtype``: the loss's, None where it is no tensor.
    """

    logs: list[tuple[str, Any, dict[str, Any]]]
    returned: Any
    effects: Effects
    calls: list[LoggerCall]
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class MetricName:
    """Stands for a metric of the model among logged values: every rank has its own."""

    name: str


def coarse_parts(step: Step, leaves: Sequence[Any], spec: TreeSpec, reason: str) -> Parts:
    """The operator ``<task>/step``; warns once with the reason.

    Raises:
        ValueError: the step does to the model what would be right on one rank only.
    """
    name = f"{step.task}/step"
    warnings.warn(
        f"task {step.task!r}: {step.name} cannot be taken apart: {reason}. It runs as one operator, {name}, "
        "on one device, with all rows",
        CaptureWarning,
        stacklevel=2,
    )
    names = {id(b): name for name, b in step.model.named_buffers()}
    buffers = {names[id(b)]: b for b in step.module.buffers()}
    done, watched = StepRun(None, [], 0.0, buffers, Effects()), False
    try:
        done, watched = run_step(step, leaves, spec, seed=0), True
    except Exception:
        pass  # it needs the trainer: what it does is seen when it runs, its buffers count as written
    gives_loss = step.name == "training_step" or is_scalar(done.output)
    if done.output is not None and step.name == "training_step":
        loss_of(step, done.output)
    others = _others_modules(step)
    _refuse_effects(step, done.effects, others)
    value = f"{step.task}/loss"
    modules = {id(p): n for n, p in step.model.named_parameters()}
    outputs = (value,) if gives_loss else ()
    operator = Operator(
        name=name,
        task=step.task,
        signature=f"{type(step.module).__name__}.{step.name}",
        layout=Layout.WHOLE,
        inputs=(),
        outputs=outputs,
        parameters=tuple(modules[id(p)] for p in step.module.parameters()),
        forward_flops=done.flops,
    )
    sources: tuple[Source, ...] = (*(LeafRef(i) for i in range(len(leaves))), BatchIndex())
    piece = Piece(name, sources, outputs, _CoarseBuilder(step, spec, others, watched))
    return Parts(
        operators=[operator],
        values=[Value(v, None, 1, 4, differentiable=True) for v in outputs],
        results=[Result(step.task, "loss", v, Reduction.WHOLE) for v in outputs],
        pieces={name: piece},
        written={name: set(done.written)},
        read={name: set(buffers)},
    )


def _others_modules(step: Step) -> frozenset[str]:
    """Names of the modules that other tasks have, or reach: the whole model is one."""
    if step.module is step.model:
        return frozenset()
    others = [module for task, module in step.model.tasks.items() if task != step.task]
    ids = {id(m) for module in others for m in module.modules()}
    return frozenset(path for path, m in step.model.named_modules() if not path or id(m) in ids)


def _refuse_effects(step: Step, effects: Effects, others: frozenset[str]) -> None:
    """An attribute that was None before may be a cache that each rank fills for itself."""
    shared = [
        change
        for change in effects.changes
        if others and effects.contents is not None and effects.contents.reaching(change) & others
        if not change.fresh
    ]
    refused = (
        (effects.rewritten, _REWRITTEN),
        (effects.registered, _REGISTERED),
        ([c.name for c in effects.changes if c.hidden], _HIDDEN),
        ([c.name for c in shared], _SHARED),
    )
    for names, message in refused:
        if names:
            raise ValueError(
                message.format(task=step.task, step=step.name, names=", ".join(dict.fromkeys(names)))
            )


@dataclass(frozen=True)
class _CoarseBuilder:
    """``watched``: capture has seen what the step does to the model, and put it back."""

    step: Step
    spec: TreeSpec
    others: frozenset[str]
    watched: bool

    def __call__(self) -> Callable[..., tuple[Any, ...]]:
        metrics = {id(m): name for name, m in self.step.model.named_modules() if is_metric(m)}
        looked = self.watched

        def run(*given: Any) -> tuple[Any, CoarseRun]:
            *leaves, batch_idx = given
            logs: list[tuple[str, Any, dict[str, Any]]] = []

            def receive(task: str, key: str, value: Any, kwargs: dict[str, Any]) -> None:
                logs.append((key, self._logged(key, value, metrics), kwargs))

            nonlocal looked
            with (
                inspected(self.step.model, thoroughly=not looked) as effects,
                alone(self.step.model._trainer, self.step.model) as calls,
                tasklog.sink(receive, self.step.logging),
            ):
                output = self.step(unflatten(leaves, self.spec), batch_idx)
            _refuse_effects(self.step, effects, self.others)
            looked = True
            loss = output if is_scalar(output) else None
            if self.step.name == "training_step" and output is not None:
                loss = loss_of(self.step, output)
            returned = beside_loss(self.step.name, output) if self.step.listened else None
            return loss, CoarseRun(logs, returned, effects, calls, getattr(loss, "dtype", None))

        return run

    def _logged(self, key: str, value: Any, metrics: Mapping[int, str]) -> Any:
        if not isinstance(value, nn.Module):
            return value
        if id(value) not in metrics:
            raise ValueError(_NO_METRIC.format(task=self.step.task, step=self.step.name, key=key))
        return MetricName(metrics[id(value)])
