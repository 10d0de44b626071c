"""What a step gives to Lightning: its loss, its logs, and the gradients that come back for the engine."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.hooks import RemovableHandle

from lightning_spindle.capture.pieces import BatchIndex, Capture, PartRef, RowsRef, Total
from lightning_spindle.runtime.arranging import guessed_rows
from lightning_spindle.runtime.iteration import Iteration
from lightning_spindle.runtime.outputs import as_number, output_of, outputs_of_tasks, require_exact
from lightning_spindle.runtime.randomness import operator_randomness
from lightning_spindle.runtime.replay import log_once, replay_logs
from lightning_spindle.runtime.session import Step, TotalRun
from lightning_spindle.runtime.telling import logged, take_over

_SEED_LOST = "the loss that training_step returned was not part of the backward; return it unchanged"


@dataclass
class Outcome:
    """A step's outcome.

    ``output`` is what the step returns to Lightning. ``leaves`` are the scalars of the tasks that
    the loss was computed from, by value.
    """

    output: Any
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    handles: list[RemovableHandle] = field(default_factory=list)

    def seeds(self) -> dict[str, torch.Tensor]:
        """The gradient of each loss value, after Lightning's backward.

        Raises:
            RuntimeError: no gradient came.
        """
        for handle in self.handles:
            handle.remove()
        seeds = {value: leaf.grad for value, leaf in self.leaves.items() if leaf.grad is not None}
        if self.leaves and not seeds:
            raise RuntimeError(_SEED_LOST)
        return seeds


def outcome_of(
    model: LightningModule,
    step: Step,
    iteration: Iteration,
    active: frozenset[str],
    device: torch.device,
    seed: int,
) -> Outcome:
    """The outcome of a step of either kind of module; logs what the step logs.

    Args:
        active: the tasks that the batch held.
        seed: of random numbers that a total draws.
    """
    take_over(model, iteration.told, device)
    if step.capture.arrangement is None:
        return outcome_of_tasks(model, step.capture, iteration, device)
    if active not in step.totals:
        return Outcome(None)
    return outcome_of_module(model, step, iteration, step.totals[active], device, seed)


def outcome_of_tasks(
    model: LightningModule, captured: Capture, iteration: Iteration, device: torch.device
) -> Outcome:
    """Of a ``MultiTaskModule``: the weighted sum of its tasks' losses; logs under the tasks' names."""
    replay_logs(model, captured, iteration)
    outputs = outputs_of_tasks(captured, iteration, device) if captured.listened else {}
    if not torch.is_grad_enabled():
        return Outcome(outputs)
    losses = {r.task: torch.as_tensor(v) for r, v in iteration.results.items() if r.is_loss}
    if not losses:
        return Outcome(None)
    leaves = {task: loss.detach().requires_grad_(loss.is_floating_point()) for task, loss in losses.items()}
    total = _weighted_sum(model.weights, leaves)
    own = {task: {**(outputs.get(task) or {}), "loss": loss} for task, loss in losses.items()}
    idle: dict[str, Any] = {task: {} for task in outputs if task not in losses}
    output = {"loss": total, "tasks": {task: (own | idle)[task] for task in [*outputs, *own]}}
    return Outcome(output, {r.value: leaves[r.task] for r in iteration.results if r.is_loss})


def _weighted_sum(weights: Mapping[str, float], losses: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """As the module's own step adds them: the types of the sum and of gradients are those of one process."""
    return reduce(operator.add, [weights[task] * loss for task, loss in losses.items()])


def outcome_of_module(
    model: LightningModule,
    step: Step,
    iteration: Iteration,
    run: TotalRun,
    device: torch.device,
    seed: int,
) -> Outcome:
    """Of any other module: its own loss, from the tasks' scalars; logs as in the module's step."""
    given = {(r.task, r.key): (r.value, v) for r, v in iteration.results.items()}
    outcome = Outcome(None)
    arguments = []
    for source in run.total.sources:
        if isinstance(source, PartRef):
            if (source.task, source.key) not in given:
                _replay_whole(model, step.capture, iteration)
                outcome.output = _returned_whole(iteration)
                return outcome
            arguments.append(_part(source, *given[source.task, source.key], device, outcome))
        elif isinstance(source, RowsRef):
            arguments.append(iteration.batches[source.task].rows * source.per_row)
        else:
            assert isinstance(source, BatchIndex)
            arguments.append(iteration.batch_idx)
    if torch.is_grad_enabled() and "loss" in run.total.outputs:  # else no backward takes them away again
        foreign = run.foreign(step.program, step.engine.rank)
        outcome.handles += [p.register_hook(torch.zeros_like) for p in foreign]
    with operator_randomness(device, seed, iteration.index, "total", 0):
        values = dict(zip(run.total.outputs, run.function(*arguments), strict=True))
    _replay(model, step.capture, run.total, iteration, values)
    returned = run.total.returned
    outcome.output = (
        _returned_whole(iteration)
        if returned is None
        else output_of(returned, iteration, lambda ref: _detached(values[ref.key]))
    )
    if torch.is_grad_enabled():
        outcome.output = {**(outcome.output or {}), "loss": values["loss"]}
    return outcome


def _returned_whole(iteration: Iteration) -> Any:
    """What a step that runs as one operator returned, where hooks see it."""
    return next((did.returned for did in iteration.told.values()), None)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _part(source: PartRef, name: str, value: Any, device: torch.device, outcome: Outcome) -> Any:
    """A task's scalar on the whole batch, as the step's own code would see it."""
    require_exact(source.task, value, source.number)
    if source.number is not None:
        return as_number(source.number, value)
    tensor = torch.as_tensor(value, device=device).reshape(source.shape)
    if not (source.differentiable and torch.is_grad_enabled()):
        return tensor
    leaf = tensor.detach().requires_grad_()
    outcome.leaves[name] = leaf
    return leaf.clone()  # the step may change it in place


def _replay(
    model: LightningModule, captured: Capture, total: Total, iteration: Iteration, values: Mapping[str, Any]
) -> None:
    guess = guessed_rows(captured, iteration.batches)
    for call in total.logs:
        value: Any = values.get(f"log:{call.key}")
        if call.metric is not None:
            value = model.get_submodule(call.metric)
        elif call.number:
            value = value.item()
        rows = None if call.rows is None else iteration.batches[call.rows.task].rows * call.rows.per_row
        log_once(model, call.key, value, dict(call.kwargs), guess if rows is None else rows)
    _replay_whole(model, captured, iteration)


def _replay_whole(model: LightningModule, captured: Capture, iteration: Iteration) -> None:
    """What a step that runs as one operator logged."""
    guess = guessed_rows(captured, iteration.batches)
    for did in iteration.told.values():
        for key, value, options in did.logs:
            log_once(model, key, logged(model, value), options, guess)
