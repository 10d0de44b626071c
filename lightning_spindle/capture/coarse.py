"""A task's step as one operator, where it cannot be taken apart."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import TreeSpec
from torchmetrics import Metric, MetricCollection

from lightning_spindle import tasklog
from lightning_spindle.capture.assemble import Parts
from lightning_spindle.capture.errors import CaptureWarning
from lightning_spindle.capture.inspecting import inspected
from lightning_spindle.capture.patches import is_scalar
from lightning_spindle.capture.pieces import BatchIndex, LeafRef, Piece, Source
from lightning_spindle.capture.returned import beside_loss
from lightning_spindle.capture.step import Step, loss_of
from lightning_spindle.capture.trees import unflatten
from lightning_spindle.capture.untouched import Effects, StepRun, run_step
from lightning_spindle.graph import Layout, Operator, Reduction, Result, Value

_METRIC = (
    "task {task!r}: {step} logs the torchmetrics object {key!r}, but runs as one operator on one rank "
    "({reason}), where a metric would see only that rank's batches. Log the metric's value instead, or "
    "make the step traceable"
)

_REWRITTEN = (
    "task {task!r}: {step} changes parameters itself ({names}). Each rank that holds them would have to do "
    "so; move it to a hook, which runs on every rank: on_train_batch_end, say"
)

_COLLECTED = (
    "task {task!r}: {step} changes the entries of {names}, but runs as one operator on one rank: hooks would "
    "see them there only. Log the values (self.log(..., on_epoch=True) averages them), or update a "
    "torchmetrics object and log it; losses of training can be collected in on_train_batch_end"
)


def coarse_parts(step: Step, leaves: Sequence[Any], spec: TreeSpec, reason: str) -> Parts:
    """The operator ``<task>/step``; warns once with the reason.

    Raises:
        ValueError: the step logs a Metric object, collects values in the model, or changes parameters, which
            would be right on one rank only.
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
    _refuse_effects(step, done.effects)
    for key, value in done.logged:
        _refuse_metric(step, key, value, reason)
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
    piece = Piece(name, sources, outputs, _CoarseBuilder(step, spec, reason, watched))
    return Parts(
        operators=[operator],
        values=[Value(v, None, 1, 4, differentiable=True) for v in outputs],
        results=[Result(step.task, "loss", v, Reduction.WHOLE) for v in outputs],
        pieces={name: piece},
        written={name: set(done.written)},
        read={name: set(buffers)},
    )


def _refuse_metric(step: Step, key: str, value: Any, reason: str) -> None:
    if isinstance(value, (Metric, MetricCollection)):
        raise ValueError(_METRIC.format(task=step.task, step=step.name, key=key, reason=reason))


def _refuse_effects(step: Step, effects: Effects) -> None:
    for names, message in ((effects.rewritten, _REWRITTEN), (effects.collected, _COLLECTED)):
        if names:
            raise ValueError(message.format(task=step.task, step=step.name, names=", ".join(names)))


@dataclass(frozen=True)
class _CoarseBuilder:
    """``watched``: capture has seen what the step does to the model, and put it back."""

    step: Step
    spec: TreeSpec
    reason: str
    watched: bool

    def __call__(self) -> Callable[..., tuple[Any, ...]]:
        looked = self.watched

        def run(*given: Any) -> tuple[Any, list[tuple[str, Any, dict[str, Any]]], Any]:
            *leaves, batch_idx = given
            logs: list[tuple[str, Any, dict[str, Any]]] = []

            def receive(task: str, key: str, value: Any, kwargs: dict[str, Any]) -> None:
                _refuse_metric(self.step, key, value, self.reason)
                logs.append((key, value, kwargs))

            nonlocal looked
            with (
                inspected(self.step.model, thoroughly=not looked) as effects,
                tasklog.sink(receive, self.step.logging),
            ):
                output = self.step(unflatten(leaves, self.spec), batch_idx)
            _refuse_effects(self.step, effects)
            looked = True
            loss = output if is_scalar(output) else None
            if self.step.name == "training_step" and output is not None:
                loss = loss_of(self.step, output)
            return loss, logs, beside_loss(self.step.name, output) if self.step.listened else None

        return run
