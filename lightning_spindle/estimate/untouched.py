"""Running a user's modules without leaving a trace: randomness, buffers, metric state, flags."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_REGISTRIES = ("_modules", "_parameters", "_non_persistent_buffers_set")


@contextmanager
def untouched(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, operators may run; afterwards all is as it was, bit for bit, also after an error.

    Put back are the states of torch's (CPU and ``device``), numpy's and Python's generators,
    and for every submodule: buffers, tensors held as attributes (the state of torchmetrics),
    attributes that were rebound, entries of its lists, dicts and sets, the training flag, and
    ``requires_grad`` and ``grad`` of parameters. What lies deeper than one container, or
    outside the module, is not seen.
    """
    undo: list[Callable[[], None]] = []
    for part in module.modules():
        undo.append(_attributes(part))
    undo += [_parameter(p) for p in module.parameters()]
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
        with torch.no_grad():
            for put_back in undo:
                put_back()


def _attributes(part: torch.nn.Module) -> Callable[[], None]:
    """Remembers a module's own attributes; the result puts them back."""
    before = dict(vars(part))
    contents = [_content(v) for k, v in before.items() if k not in _REGISTRIES]

    def put_back() -> None:
        now = vars(part)
        for name in now.keys() - before.keys():
            del now[name]
        now.update(before)
        for content in contents:
            content()

    return put_back


def _content(value: Any) -> Callable[[], None]:
    """Remembers what a tensor holds, or a container and the tensors in it."""
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return _tensor(value)
    if isinstance(value, dict):
        return _container(value, dict(value), list(value.values()))
    if type(value) is list or type(value) is set:
        return _container(value, list(value), list(value))
    return lambda: None


def _container(value: Any, entries: Any, members: list[Any]) -> Callable[[], None]:
    tensors = [_tensor(m) for m in members if isinstance(m, torch.Tensor)]

    def put_back() -> None:
        value.clear()
        if isinstance(value, list):
            value.extend(entries)
        else:
            value.update(entries)
        for tensor in tensors:
            tensor()

    return put_back


def _tensor(tensor: torch.Tensor) -> Callable[[], None]:
    copy = tensor.detach().clone()

    def put_back() -> None:
        tensor.detach().copy_(copy)

    return put_back


def _parameter(parameter: torch.nn.Parameter) -> Callable[[], None]:
    trains, grad = parameter.requires_grad, parameter.grad

    def put_back() -> None:
        parameter.requires_grad_(trains)
        parameter.grad = grad

    return put_back
