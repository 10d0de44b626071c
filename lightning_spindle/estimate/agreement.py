"""What ranks need to measure together: rank 0's decisions, and idle devices."""

from __future__ import annotations

import torch

from lightning_spindle.runtime.transport import Transport


def everyone(transport: Transport) -> tuple[int, ...]:
    """All ranks of a transport."""
    return tuple(range(transport.size))


def number_of_rank_zero(transport: Transport, device: torch.device, number: int) -> int:
    """Rank 0's number on every rank. All ranks leave together: it serves as a barrier."""
    table = torch.tensor([number if transport.rank == 0 else 0], dtype=torch.int64, device=device)
    transport.all_reduce(table, everyone(transport)).wait()
    return int(table.item())


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
