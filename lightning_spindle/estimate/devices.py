"""What measuring needs to know of a rank's device."""

from __future__ import annotations

import os

import torch


def usable_cores(device: torch.device) -> int | None:
    """Ranks that this machine runs at full speed at once: cores over threads of a rank; None for GPUs."""
    if device.type != "cpu":
        return None
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, found // int(torch.get_num_threads()))


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
