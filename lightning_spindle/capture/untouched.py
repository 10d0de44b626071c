"""Runs of the user's own code in capture, after which the model is as before."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec

from lightning_spindle import tasklog
from lightning_spindle.capture import patches
from lightning_spindle.capture.blocks import is_metric
from lightning_spindle.capture.evaluate import (
    Holder,
    kept_generators,
    plain_state,
    versions_of_buffers,
    with_tensors,
    written_buffers,
)
from lightning_spindle.capture.flops import flop_counter
from lightning_spindle.capture.step import Step
from lightning_spindle.capture.trees import unflatten

INTERNAL = set(nn.Module().__dict__)
_HOOKS = [name for name in nn.Module().__dict__ if name.startswith("_forward_") and "hooks" in name]


@dataclass(frozen=True)
class StepRun:
    """What a step did: what it returned, logged values by key, FLOPs, and the buffers that it wrote.

    ``effects`` are those that are right on one rank only.
    """

    output: Any
    logged: list[tuple[str, Any]]
    flops: float
    written: dict[str, torch.Tensor]
    effects: Effects


@dataclass(frozen=True)
class Effects:
    """Names of parameters that a step changed itself, and of containers whose entries it changed."""

    rewritten: list[str] = field(default_factory=list)
    collected: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Changes:
    """Names of attributes that were changed, and those of them that are containers with other entries."""

    attributes: list[str] = field(default_factory=list)
    collected: list[str] = field(default_factory=list)


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[Changes]:
    """Restores plain attributes and hooks of all modules afterwards; what is yielded then names the changed.

    Lists, dicts and sets are compared and restored by their entries. Metrics work on copies of their state
    inside.
    """
    changed = Changes()
    saved = [
        (name, m, {k: (v, _entries(v)) for k, v in vars(m).items() if k not in INTERNAL})
        for name, m in model.named_modules()
        if not is_metric(m)
    ]
    hooks = [(table, copy.copy(table)) for m in model.modules() for table in map(vars(m).get, _HOOKS)]
    metrics = [(m, dict(vars(m))) for m in model.modules() if is_metric(m)]
    for m, own in metrics:
        for key in getattr(m, "_defaults", {}):
            vars(m)[key] = copy.deepcopy(own[key])
    try:
        yield changed
    finally:
        for table, entries in hooks:
            table.clear()
            table.update(entries)
        for m, own in metrics:
            vars(m).clear()
            vars(m).update(own)
        for name, m, attributes in saved:
            found = _restore(name, m, attributes)
            if not type(m).__module__.startswith("torch."):
                changed.attributes.extend(found.attributes)
                changed.collected.extend(found.collected)


def _entries(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (list, dict, set)) else None


def _restore(name: str, module: nn.Module, before: dict[str, tuple[Any, Any]]) -> Changes:
    changed = Changes()
    own = vars(module)
    for key in [k for k in own if k not in INTERNAL and k not in before]:
        del own[key]
        changed.attributes.append(f"{name}.{key}")
    for key, (value, entries) in before.items():
        same = key in own and own[key] is value
        if entries is not None and not same_entries(value, entries):
            same = False
            changed.collected.append(f"{name}.{key}")
            if isinstance(value, list):
                value[:] = entries
            else:
                value.clear()
                value.update(entries)
        if not same:
            own[key] = value
            changed.attributes.append(f"{name}.{key}")
    return changed


def same_entries(value: Any, entries: Any) -> bool:
    """Whether a container has the very entries of a copy."""
    if len(value) != len(entries):
        return False
    if isinstance(value, dict):
        return all(k in entries and entries[k] is v for k, v in value.items())
    if isinstance(value, list):
        return all(a is b for a, b in zip(value, entries, strict=True))
    return bool(value == entries)


def run_step(step: Step, leaves: Sequence[Any], spec: TreeSpec, seed: int) -> StepRun:
    """Run the user's step on the example batch."""
    logged: list[tuple[str, Any]] = []
    holder = Holder(step.model)
    backward = step.name == "training_step"
    found: dict[str, Any] = {}
    state = plain_state(step.model, backward)
    versions = versions_of_buffers(step.model, state)

    def run() -> None:
        copies = [v.clone() if isinstance(v, torch.Tensor) else copy.copy(v) for v in leaves]
        with (
            flop_counter() as counter,
            tasklog.sink(lambda task, key, value, kwargs: logged.append((key, value)), step.logging),
        ):
            found["output"] = step(unflatten(copies, spec), 0)
        found["flops"] = counter.get_total_flops()
        found["written"] = written_buffers(holder, state, versions)

    with (
        kept_parameters(step.model) as rewritten,
        kept_generators(seed),
        kept_attributes(step.model) as changed,
        patches.trapped_trainer(),
        torch.set_grad_enabled(backward),
    ):
        with_tensors(holder, state, run)
    own = dict(step.model.named_parameters())
    rewritten += [n for n, p in own.items() if memory(state[n]) != memory(p)]  # by ``p.data = …``
    return StepRun(
        found["output"],
        logged,
        float(found["flops"]),
        found["written"],
        Effects(rewritten, changed.collected),
    )


@contextmanager
def kept_parameters(model: nn.Module) -> Iterator[list[str]]:
    """Parameters that are written to inside have their values back afterwards; the list then names them."""
    rewritten: list[str] = []
    watch = _Writes({memory(p): (name, p) for name, p in model.named_parameters()})
    try:
        with watch:
            yield rewritten
    finally:
        with torch.no_grad():
            for name, (parameter, value) in watch.before.items():
                parameter.data.copy_(value)
                rewritten.append(name)


class _Writes(TorchDispatchMode):
    """Keeps a copy of each tensor of ``known`` (by memory) before the first operation that writes to it."""

    def __init__(self, known: Mapping[int, tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        self.known = known
        self.before: dict[str, tuple[nn.Parameter, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for at, argument in enumerate(func._schema.arguments):
                given = args[at] if at < len(args) else kwargs.get(argument.name)
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._keep(given)
        return func(*args, **kwargs)

    def _keep(self, given: Any) -> None:
        for tensor in given if isinstance(given, (list, tuple)) else [given]:
            name, parameter = (
                self.known.get(memory(tensor), (None, None)) if tensor is not None else (None, None)
            )
            if name is not None and parameter is not None and name not in self.before:
                self.before[name] = (parameter, parameter.detach().clone())


def memory(tensor: torch.Tensor) -> int:
    """Of the memory behind a tensor that is alive."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
