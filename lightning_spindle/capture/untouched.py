"""Runs of the user's own code in capture, after which the model is as before."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec

from lightning_spindle import tasklog
from lightning_spindle.capture import patches
from lightning_spindle.capture.blocks import is_metric
from lightning_spindle.capture.evaluate import Holder, kept_generators, plain_state, with_tensors
from lightning_spindle.capture.flops import flop_counter
from lightning_spindle.capture.step import Step, results_of
from lightning_spindle.capture.trees import unflatten

_INTERNAL = set(nn.Module().__dict__)
_HOOKS = [name for name in nn.Module().__dict__ if name.startswith("_forward_") and "hooks" in name]


@dataclass(frozen=True)
class StepRun:
    """What a step did: results and logged values by key, FLOPs, and the buffers that it wrote."""

    results: dict[str, Any]
    logged: list[tuple[str, Any]]
    flops: float
    written: set[str]


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[list[str]]:
    """Restores plain attributes and hooks of all modules afterwards.

    The list then names attributes that had changed. Lists, dicts and sets are compared and restored by
    their entries. Metrics work on copies of their state inside.
    """
    changed: list[str] = []
    saved = [
        (name, m, {k: (v, _entries(v)) for k, v in vars(m).items() if k not in _INTERNAL})
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
            changed += [] if type(m).__module__.startswith("torch.") else found


def _entries(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (list, dict, set)) else None


def _restore(name: str, module: nn.Module, before: dict[str, tuple[Any, Any]]) -> list[str]:
    changed = []
    own = vars(module)
    for key in [k for k in own if k not in _INTERNAL and k not in before]:
        del own[key]
        changed.append(f"{name}.{key}")
    for key, (value, entries) in before.items():
        same = key in own and own[key] is value
        if entries is not None and not _same_entries(value, entries):
            same = False
            if isinstance(value, list):
                value[:] = entries
            else:
                value.clear()
                value.update(entries)
        if not same:
            own[key] = value
            changed.append(f"{name}.{key}")
    return changed


def _same_entries(value: Any, entries: Any) -> bool:
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
    buffers = {name: state[name]._version for name, _ in step.model.named_buffers()}

    def run() -> None:
        copies = [v.clone() if isinstance(v, torch.Tensor) else copy.copy(v) for v in leaves]
        with (
            flop_counter() as counter,
            tasklog.sink(lambda task, key, value, kwargs: logged.append((key, value)), step.logging),
        ):
            found.update(results_of(step, step(unflatten(copies, spec), 0)))
        found["flops"] = counter.get_total_flops()
        now = dict(holder.named_buffers())
        found["written"] = {n for n in buffers if now.get(n) is not state[n] or now[n]._version != buffers[n]}

    with (
        kept_generators(seed),
        kept_attributes(step.model),
        patches.trapped_trainer(),
        torch.set_grad_enabled(backward),
    ):
        with_tensors(holder, state, run)
    flops, written = found.pop("flops"), found.pop("written")
    return StepRun(found, logged, float(flops), written)
