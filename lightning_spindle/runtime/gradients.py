"""Summing gradients over parameter device groups (paper, 3.6 step 3).

A gradient that is None stays None where no rank has one: every bucket carries a used-bit a
parameter, because an optimizer moves a parameter whose gradient is zero (weight decay,
momentum) and leaves alone one that has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lightning_spindle.program import Bucket
from lightning_spindle.runtime.transport import Pending, Transport


@dataclass(slots=True)
class PendingBucket:
    """A bucket's sum under way."""

    parameters: list[torch.nn.Parameter]
    flat: torch.Tensor
    pending: Pending

    def finish(self) -> None:
        """Waits, then replaces each parameter's gradient by the sum over its holders."""
        self.pending.wait()
        used = self.flat[len(self.flat) - len(self.parameters) :].tolist()
        at = 0
        for parameter, count in zip(self.parameters, used, strict=True):
            size = parameter.numel()
            if count == 0:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = self.flat[at : at + size].view_as(parameter).clone()
            else:
                parameter.grad.copy_(self.flat[at : at + size].view_as(parameter))
            at += size


def reduce_bucket(
    bucket: Bucket, parameters: Mapping[str, torch.nn.Parameter], transport: Transport, device: torch.device
) -> PendingBucket:
    """Starts the sum of a bucket's gradients over ``bucket.devices``, all of which call it.

    ``parameters`` that this rank holds: all of the bucket's, or none, which then adds zeros.
    """
    held = [parameters[name] for name in bucket.parameters if name in parameters]
    flat = _flattened(held) if held else _zeros(bucket, device)
    return PendingBucket(held, flat, transport.all_reduce(flat, bucket.devices))


def _flattened(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """The gradients in a row, then their used-bits."""
    gradients = [p.grad for p in parameters]
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    used = parameters[0].new_tensor([0.0 if g is None else 1.0 for g in gradients])
    return torch.cat([*(g.reshape(-1) for g in filled), used]).detach()


def _zeros(bucket: Bucket, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, bucket.dtype)
    return torch.zeros(bucket.bytes // dtype.itemsize + len(bucket.parameters), dtype=dtype, device=device)
