"""A task's step, and its trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import fx, nn

from lightning_spindle.capture.attributes import Attributes
from lightning_spindle.capture.errors import StepOutputError, TraceError
from lightning_spindle.capture.evaluate import Holder
from lightning_spindle.capture.pieces import LogCall

if TYPE_CHECKING:
    from lightning_spindle.capture.returned import TracedOutput


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
    """Logged keys to the node that was given as ``batch_size``."""
    output: TracedOutput | None = None
    """What the step returned, where hooks see it."""
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
    listened: bool = False
    """Whether hooks see what the step returns."""

    @property
    def logging(self) -> Any:
        """The module whose ``log`` has to be intercepted, None where a ``MultiTaskModule`` has done it."""
        return self.module if self.module is self.model else None

    def __call__(self, batch: Any, batch_idx: Any) -> Any:
        """Call the user's method as Lightning would."""
        method = getattr(self.module, self.name)
        rest = (batch_idx,) if is_param_in_hook_signature(method, "batch_idx", min_args=2) else ()
        return method(batch, *rest, *(() if self.dataloader_idx is None else (self.dataloader_idx,)))


def loss_of(step: Step, output: Any) -> Any:
    """The loss in what a step returned; of a validation or test step, what it returned if that is a scalar.

    Raises:
        StepOutputError: a training step gives no tensor for its loss.
        TraceError: it gives no loss.
    """
    if step.name != "training_step":
        return output if isinstance(output, (fx.Proxy, torch.Tensor, int, float)) else None
    if output is None:
        raise TraceError("training_step gives no loss")
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, (fx.Proxy, torch.Tensor)):
        raise StepOutputError(
            f"task {step.task!r}: training_step returns a loss tensor, a dict with the key 'loss', or None "
            f"to be skipped; got {type(loss).__name__}"
        )
    return loss
