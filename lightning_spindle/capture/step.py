"""A task's step, and its trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import fx, nn

from lightning_spindle.capture.attributes import Attributes
from lightning_spindle.capture.errors import StepOutputError, TraceError
from lightning_spindle.capture.evaluate import Holder
from lightning_spindle.capture.pieces import LogCall


@dataclass
class StepTrace:
    """A traced step. ``results`` maps the keys of ``graph.Result`` to the nodes that give them."""

    task: str
    holder: Holder
    graph: fx.Graph
    leaves: list[fx.Node | None]
    batch_idx: fx.Node
    results: dict[str, fx.Node]
    logs: list[LogCall]
    blocks: frozenset[nn.Module]
    opaque: dict[str, str] = field(default_factory=dict)
    """Modules that could not be traced through and became operators, with the reason."""
    sizes: dict[str, fx.Node] = field(default_factory=dict)
    """Logged keys to the node that was given as ``batch_size``; of a module of its own."""
    gives: str = "loss"
    """What the step returns: see ``pieces.Total``."""
    attributes: Attributes = field(default_factory=dict)
    """Plain attributes of the model that the step read."""


@dataclass(frozen=True)
class Step:
    """What is traced: ``function(batch, batch_idx)`` of ``task``, a part of ``model`` or all of it."""

    model: nn.Module
    module: nn.Module
    task: str
    name: str
    operators: tuple[type[nn.Module], ...] = ()
    dataloader_idx: int | None = None

    @property
    def logging(self) -> Any:
        """The module whose ``log`` has to be intercepted, None where a ``MultiTaskModule`` has done it."""
        return self.module if self.module is self.model else None

    def __call__(self, batch: Any, batch_idx: Any) -> Any:
        """Call the user's method as Lightning would."""
        method = getattr(self.module, self.name)
        rest = (batch_idx,) if is_param_in_hook_signature(method, "batch_idx", min_args=2) else ()
        return method(batch, *rest, *(() if self.dataloader_idx is None else (self.dataloader_idx,)))


def results_of(step: Step, output: Any) -> dict[str, Any]:
    """A step's loss and other scalars, by the keys of ``graph.Result``.

    Raises:
        StepOutputError: the step gives out something else.
        TraceError: a training step gives no loss.
    """
    if isinstance(output, dict):
        values = {"loss" if key == "loss" else f"out:{key}": value for key, value in output.items()}
    else:
        values = {} if output is None else {"loss": output}
    if step.name == "training_step" and values.get("loss") is None:
        raise TraceError("training_step gives no loss")
    if step.name == "training_step" and not isinstance(values["loss"], (fx.Proxy, torch.Tensor)):
        raise StepOutputError(
            f"task {step.task!r}: training_step returns a loss tensor, a dict with the key 'loss', or None; "
            f"got {type(values['loss']).__name__}"
        )
    for key, value in values.items():
        if not isinstance(value, (fx.Proxy, torch.Tensor, int, float)):
            raise StepOutputError(
                f"task {step.task!r}: {step.name} returns a {type(value).__name__} under "
                f"{key.removeprefix('out:')!r}; Spindle gathers scalars only"
            )
    return values
