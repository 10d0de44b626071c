"""One run of a traced step on the whole example batch in the model's own type: sizes, FLOPs, activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from lightning_spindle.capture.evaluate import (
    filled,
    kept_generators,
    plain_state,
    run_node,
    versions_of_buffers,
    with_tensors,
    written_buffers,
)
from lightning_spindle.capture.flops import flop_counter
from lightning_spindle.capture.layout import pick_rows
from lightning_spindle.capture.pieces import BatchLayout
from lightning_spindle.capture.step import StepTrace

SEED = 20


@dataclass
class Measured:
    """What a node did: its value's shape and bytes, its FLOPs, and what autograd kept for it."""

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    bytes: int = 0
    differentiable: bool = False
    structured: bool = False
    flops: float = 0.0
    saved: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TraceRun:
    """What a traced step gave: results by key, buffers that it wrote, what it returned beside its loss."""

    results: dict[str, torch.Tensor]
    written: dict[str, torch.Tensor]
    output: Any = None


def measure(
    trace: StepTrace, leaves: Sequence[Any], backward: bool
) -> tuple[dict[fx.Node, Measured], TraceRun]:
    """Each node's measures, and what the step gave. Without ``backward`` nothing is kept for it."""
    state = plain_state(trace.holder, requires_grad=backward)
    versions = versions_of_buffers(trace.holder, state)
    written: dict[str, torch.Tensor] = {}
    own = {_identity(p) for p in state.values()}
    values: dict[fx.Node, Any] = {}
    found: dict[fx.Node, Measured] = {}
    alive: list[torch.Tensor] = []

    def run() -> None:
        by_leaf = dict(zip(trace.leaves, leaves, strict=True))
        with flop_counter() as counter:
            for node in trace.graph.nodes:
                if node.op == "placeholder":
                    values[node] = by_leaf.get(node, 0)
                    found[node] = _of(values[node])
                elif node.op != "output":
                    found[node] = _run(trace, node, values, own, alive, counter, backward)
        written.update(written_buffers(trace.holder, state, versions))

    with kept_generators(SEED):
        with_tensors(trace.holder, state, run)
    results = {key: values[node].detach() for key, node in trace.results.items()}
    return found, TraceRun(results, written, trace.output and trace.output.tree(values))


def dynamic(trace: StepTrace, leaves: Sequence[Any], layout: BatchLayout) -> set[fx.Node]:
    """Nodes whose shape differs on a batch of equal shapes but other rows: it depends on values."""
    rows = layout.rows(list(leaves))
    shapes: list[dict[fx.Node, tuple[int, ...]]] = []
    for index in (range(rows), [row // 2 for row in range(rows)], [rows - 1] * rows):
        found: dict[fx.Node, tuple[int, ...]] = {}
        given = dict(zip(trace.leaves, pick_rows(leaves, layout, list(index)), strict=True))

        def run(found: dict[fx.Node, tuple[int, ...]] = found, given: dict[Any, Any] = given) -> None:
            values: dict[fx.Node, Any] = {}
            for node in trace.graph.nodes:
                if node.op == "placeholder":
                    values[node] = given.get(node, 0)
                elif node.op != "output" and all(n in values for n in node.all_input_nodes):
                    try:
                        values[node] = run_node(trace.holder, node, *filled(node, values.__getitem__))
                    except Exception:
                        continue
                if isinstance(values.get(node), torch.Tensor):
                    found[node] = tuple(values[node].shape)

        with kept_generators(SEED), torch.no_grad():
            with_tensors(trace.holder, plain_state(trace.holder, requires_grad=False), run)
        shapes.append(found)
    first, *others = shapes
    return {node for node in first if any(node in other and other[node] != first[node] for other in others)}


def _run(
    trace: StepTrace,
    node: fx.Node,
    values: dict[fx.Node, Any],
    own: set[int],
    alive: list[torch.Tensor],
    counter: FlopCounterMode,
    backward: bool,
) -> Measured:
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _identity(tensor) not in own:
            saved[_identity(tensor)] = tensor.untyped_storage().nbytes()
        return _kept(tensor, alive)

    before = counter.get_total_flops()
    with (
        torch.set_grad_enabled(backward and node.meta.get("grad", True)),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        args, kwargs = filled(node, lambda n: values[n])
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        versions = [t._version for t in inputs]
        values[node] = run_node(trace.holder, node, args, kwargs)
        node.meta["mutates"] = [
            i for i, (t, v) in enumerate(zip(inputs, versions, strict=True)) if t._version != v
        ]
    result = _of(values[node])
    result.flops, result.saved = counter.get_total_flops() - before, saved
    node.meta["structured"], node.meta["shape"] = result.structured, result.shape
    node.meta["number"] = type(values[node]) if isinstance(values[node], (bool, int, float)) else None
    node.meta["entries"] = entries_of(values[node])
    return result


def _kept(tensor: torch.Tensor, alive: list[torch.Tensor]) -> torch.Tensor:
    """What autograd keeps of a tensor, and its memory until all nodes were measured.

    Of itself a node's own result (tanh keeps it) would never be freed, nor what leads to it. Memory that is
    freed and given out again would pass for the same, on some ranks and not on others.
    """
    kept = tensor.detach()
    alive.append(kept)
    return kept


def _identity(tensor: torch.Tensor) -> int:
    """Of the memory behind a tensor that is alive, or the memory that there would be."""
    return tensor.untyped_storage()._cdata


def entries_of(value: Any) -> Any:
    """What a tuple or list holds, nested: True for a tensor, None for None. False for anything else."""
    if isinstance(value, torch.Tensor) or value is None:
        return True if value is not None else None
    if type(value) in (tuple, list):
        return type(value)(entries_of(entry) for entry in value)
    return False


def _of(value: Any) -> Measured:
    if isinstance(value, torch.Tensor):
        return Measured(
            tuple(value.shape), value.dtype, value.numel() * value.element_size(), value.requires_grad
        )
    return Measured(structured=not isinstance(value, (int, float, str, bool, type(None), nn.Module)))
