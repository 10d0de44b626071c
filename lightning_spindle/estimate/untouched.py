"""Running a user's modules without leaving a trace: randomness, buffers, metric state, flags."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lightning_spindle.capture.contents import Contents

_REGISTRIES = ("_modules", "_parameters", "_non_persistent_buffers_set")


@contextmanager
def untouched(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, operators may run; afterwards all is as it was, bit for bit, also after an error.

    Put back are the states of torch's (CPU and ``device``), numpy's and Python's generators,
    and for every submodule: buffers, tensors held as attributes (the state of torchmetrics),
    attributes that were rebound, entries of its lists, dicts and sets, the training flag, and
    ``requires_grad`` and ``grad`` of parameters. What other objects hold, or lies outside the module,
    is not seen.
    """
    contents = Contents(module, clones=True, skipped=lambda part: _REGISTRIES)
    undo = [_parameter(p) for p in module.parameters()]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.random.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.random.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
        contents.put_back()
        for put_back in undo:
            put_back()


def _parameter(parameter: torch.nn.Parameter) -> Callable[[], None]:
    trains, grad = parameter.requires_grad, parameter.grad

    def put_back() -> None:
        parameter.requires_grad_(trains)
        parameter.grad = grad

    return put_back
