"""Runs of the user's own code in capture, after which the model is as before."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec

from lightning_spindle import tasklog
from lightning_spindle.capture import patches
from lightning_spindle.capture.blocks import is_metric
from lightning_spindle.capture.changes import Change
from lightning_spindle.capture.contents import Contents
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
from lightning_spindle.capture.writes import Writes, memory

_HOOKS = [name for name in nn.Module().__dict__ if name.startswith("_forward_") and "hooks" in name]


@dataclass(frozen=True)
class StepRun:
    """What a step did: what it returned, logged values by key, FLOPs, buffers that it wrote, effects."""

    output: Any
    logged: list[tuple[str, Any]]
    flops: float
    written: dict[str, torch.Tensor]
    effects: Effects


@dataclass
class Effects:
    """What a step did to the model.

    ``rewritten``: parameters that it changed itself. ``registered``: modules, parameters and buffers that it
    added, replaced or removed. ``changes``: of attributes, which ``contents`` remembers as they were.
    """

    rewritten: list[str] = field(default_factory=list)
    registered: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    contents: Contents | None = None


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[Effects]:
    """Restores plain attributes, hooks and children of all modules; what is yielded then has the changes.

    Those of torch's own modules and of metrics are put back too, and not told.
    """
    contents = Contents(model, clones=True)
    effects = Effects(contents=contents)
    tables = [
        (table, copy.copy(table))
        for module in model.modules()
        for name in ("_modules", *_HOOKS)
        if (table := vars(module).get(name)) is not None
    ]
    told = {
        path
        for path, m in model.named_modules()
        if not is_metric(m) and not type(m).__module__.startswith("torch.")
    }
    try:
        yield effects
    finally:
        for table, entries in tables:
            table.clear()
            table.update(entries)
        effects.changes += [c for c in contents.changes() if contents.reaching(c) & told]
        contents.put_back()


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
        kept_attributes(step.model) as effects,
        patches.trapped_trainer(),
        torch.set_grad_enabled(backward),
    ):
        with_tensors(holder, state, run)
    own = dict(step.model.named_parameters())
    effects.rewritten += rewritten
    effects.rewritten += [n for n, p in own.items() if memory(state[n]) != memory(p)]  # by ``p.data = …``
    return StepRun(found["output"], logged, float(found["flops"]), found["written"], effects)


@contextmanager
def kept_parameters(model: nn.Module) -> Iterator[list[str]]:
    """Parameters that are written to inside have their values back afterwards; the list then names them."""
    rewritten: list[str] = []
    known = {memory(p): (name, p) for name, p in model.named_parameters()}
    before: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> None:
        name, parameter = known.get(memory(tensor), ("", tensor))
        if name and name not in before:
            before[name] = parameter.detach().clone()

    try:
        with Writes(keep):
            yield rewritten
    finally:
        own = dict(known.values())
        with torch.no_grad():
            for name, value in before.items():
                own[name].data.copy_(value)
                rewritten.append(name)
