"""What steps return beside their losses, for hooks: who listens, and what they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_spindle.capture import each_tensor, unflatten
from lightning_spindle.capture.pieces import Capture, Constant, GivenRef, ResultRef, Returned
from lightning_spindle.module import MultiTaskModule
from lightning_spindle.runtime.iteration import Iteration
from lightning_spindle.runtime.session import StepExample
from lightning_spindle.runtime.transport import Transport, everyone

_HOOKS = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
    "test_step": "on_test_batch_end",
}
# Lightning's own callbacks do not look at outputs; classes derived from them may.
_IGNORING = ("lightning.pytorch.", "pytorch_lightning.")
_EXACT = 2**53
"""Integers up to here go through the exchange, in float64, as they are."""


def listens(trainer: Any, step: str) -> bool:
    """Whether a hook may look at what ``step`` returns: the module's, a task's, or any callback's.

    Each that is overridden counts, but those of the callbacks that Lightning itself has.
    """
    hook, model = _HOOKS[step], trainer.lightning_module
    if isinstance(model, MultiTaskModule):
        if is_overridden(hook, model, MultiTaskModule) or any(model.overriding(hook)):
            return True
    elif is_overridden(hook, model, LightningModule):
        return True
    return any(_may_look(callback, hook) for callback in trainer.callbacks)


def agree_on_listeners(
    trainer: Any, examples: Mapping[str, StepExample], transport: Transport, device: torch.device
) -> dict[str, StepExample]:
    """The examples of the steps whose outputs a hook of any rank may look at say so (collective)."""
    table = torch.tensor([listens(trainer, step) for step in examples], dtype=torch.int64, device=device)
    if examples:
        transport.all_reduce(table, everyone(transport)).wait()
    heard = table.tolist()
    return {step: replace(e, listened=bool(n)) for (step, e), n in zip(examples.items(), heard, strict=True)}


def require_expected(trainer: Any, step: str, captured: Capture) -> None:
    """Returns where outputs are sent, or no hook looks at them.

    Raises:
        ValueError: a callback came after the step was taken apart.
    """
    if not captured.listened and listens(trainer, step):
        raise ValueError(
            f"a callback with {_HOOKS[step]} was added after {step} was taken apart, when no hook would see "
            "what it returns, which is not sent to all ranks; add callbacks before fit, validate or test"
        )


def _may_look(callback: Any, hook: str) -> bool:
    method = getattr(callback, hook)
    while isinstance(method, partial):
        method = method.func
    return not str(getattr(unwrap(method), "__module__", None)).startswith(_IGNORING)


def as_number(number: type, value: float) -> Any:
    """What a step gave as a number, from the sum of its shards' parts."""
    return round(value) if number is int else number(value)


def require_exact(task: str, value: float | torch.Tensor, number: type | None) -> None:
    """Raises ValueError for an integer that is larger than the exchange keeps exactly."""
    whole = number is int or (isinstance(value, torch.Tensor) and not value.is_floating_point())
    if whole and abs(float(value)) >= _EXACT:
        raise ValueError(
            f"task {task!r}: a step gives the integer {float(value):.0f}, of which other ranks would not get "
            "all digits; give it as a tensor of one element"
        )


def outputs_of_tasks(captured: Capture, iteration: Iteration, device: torch.device) -> dict[str, Any]:
    """What each task of a ``MultiTaskModule`` that had a batch returned, with None in the loss's place."""
    coarse = {captured.graph.operator(name).task: did.returned for name, did in iteration.told.items()}
    results = {(r.task, r.key): value for r, value in iteration.results.items()}
    found: dict[str, Any] = {}
    for task in captured.layouts:
        batch = iteration.batches.get(task)
        if batch is None or batch.rows == 0:
            continue
        if task in captured.returned:
            scalar = partial(_scalar, task, results, device)
            found[task] = output_of(captured.returned[task], iteration, scalar)
        else:
            found[task] = coarse.get(task)
    return found


def output_of(returned: Returned, iteration: Iteration, scalar: Callable[[ResultRef], Any]) -> Any:
    """The tree that a step returned, of the whole batch, without gradients."""

    def leaf(of: Constant | ResultRef | GivenRef) -> Any:
        if isinstance(of, Constant):
            return list(of.value) if isinstance(of.value, list) else of.value
        if isinstance(of, ResultRef):
            return scalar(of)
        return each_tensor(torch.Tensor.detach, iteration.given[of.task][of.index])

    return unflatten([leaf(of) for of in returned.leaves], returned.spec)


def _scalar(task: str, results: dict[tuple[str, str], Any], device: torch.device, ref: ResultRef) -> Any:
    """A result as the step returned it."""
    value = results[task, ref.key]
    require_exact(task, value, ref.number)
    return value.to(device) if ref.number is None else as_number(ref.number, value)
