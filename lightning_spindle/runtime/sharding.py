"""Optimizer state divided among the holders of a parameter: each parameter is stepped by one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_spindle.program import Broadcast
from lightning_spindle.runtime.optimizers import before_step
from lightning_spindle.runtime.transport import Pending, Transport


@dataclass(slots=True)
class PendingValues:
    """A broadcast under way, and the parameters that get its values here."""

    parameters: list[torch.nn.Parameter]
    flat: torch.Tensor
    pending: Pending

    def finish(self) -> None:
        """Waits, then gives each parameter its owner's values."""
        self.pending.wait()
        at = 0
        for parameter in self.parameters:
            size = parameter.numel()
            parameter.detach().copy_(self.flat[at : at + size].view_as(parameter))
            at += size


def broadcast_values(
    broadcast: Broadcast,
    parameters: Mapping[str, torch.nn.Parameter],
    transport: Transport,
    device: torch.device,
) -> PendingValues:
    """Starts a broadcast over ``broadcast.devices``, all of which call it.

    ``parameters`` that this rank holds: all of the broadcast's, or none, and then it forgets what comes.
    """
    held = [parameters[name] for name in broadcast.parameters if name in parameters]
    if transport.rank == broadcast.source:
        flat, targets = torch.cat([p.detach().reshape(-1) for p in held]), []
    else:
        dtype = getattr(torch, broadcast.dtype)
        flat, targets = torch.empty(broadcast.bytes // dtype.itemsize, dtype=dtype, device=device), held
    return PendingValues(targets, flat, transport.broadcast(flat, broadcast.source, broadcast.devices))


class ShardedStep:
    """Has an optimizer step only what this rank owns, and owners give away the new values after it.

    By the optimizer's own hooks, so that it holds wherever user code steps it. While it steps, parameters
    that other ranks own have no gradient, like those of an idle task: it leaves them alone, and keeps no
    state of them. Everybody else sees all gradients.

    Args:
        owns: whether this rank steps a parameter.
        share: gives and gets new values; called on every rank after each step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        owns: Callable[[torch.nn.Parameter], bool],
        share: Callable[[], None],
    ) -> None:
        self._optimizer, self._owns, self._share = optimizer, owns, share
        self._hidden: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._handles = (
            before_step(optimizer, self._hide),
            optimizer.register_step_post_hook(self._after),
        )

    def end(self) -> None:
        """The optimizer steps everything again."""
        for handle in self._handles:
            handle.remove()

    def _after(self, *_: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
        self._share()

    def _hide(self) -> None:
        for parameter in (p for group in self._optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None and not self._owns(parameter):
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None
