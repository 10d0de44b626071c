"""What a step of the user's optimizer costs for a byte of parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median

import torch

from lightning_spindle.estimate.devices import synchronize
from lightning_spindle.runtime.objects import broadcast_object
from lightning_spindle.runtime.transport import Transport, everyone

SAMPLE_BYTES = 16 * 2**20
_STEPS = 5


def optimizer_s_per_byte(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    parameters: Iterable[torch.nn.Parameter],
    transport: Transport,
    device: torch.device,
) -> float:
    """Seconds of a step and of clearing gradients, for each byte of trainable parameters.

    Measured on copies of the first ``SAMPLE_BYTES`` of parameters (so that many small ones
    cost what they do), on all ranks at the same time; rank 0's figure goes to all.

    Returns:
        0 where nothing is trainable.
    """
    copies: list[torch.nn.Parameter] = []
    for p in parameters:
        if p.requires_grad and sum(c.nbytes for c in copies) < SAMPLE_BYTES:
            copies.append(torch.nn.Parameter(p.detach().clone()))
    if not copies:
        return 0.0
    stepper = make(copies)
    times_s = []
    for _ in range(_STEPS):
        for c in copies:
            c.grad = torch.zeros_like(c)
        transport.all_reduce(torch.zeros(1, device=device), everyone(transport)).wait()
        synchronize(device)
        start_s = time.perf_counter()
        stepper.step()
        stepper.zero_grad()
        synchronize(device)
        times_s.append(time.perf_counter() - start_s)
    figure = median(times_s[1:]) / sum(c.nbytes for c in copies)
    return float(broadcast_object(figure, transport, device))
