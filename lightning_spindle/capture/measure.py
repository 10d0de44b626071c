"""One run of a traced step on the whole example batch in the model's own type: sizes, FLOPs, activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from lightning_spindle.capture.evaluate import filled, kept_generators, plain_state, run_node, with_tensors
from lightning_spindle.capture.tracer import StepTrace

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
    saved: dict[tuple[int, int], int] = field(default_factory=dict)


def measure(
    trace: StepTrace, leaves: Sequence[Any], backward: bool
) -> tuple[dict[fx.Node, Measured], dict[str, Any]]:
    """Each node's measures, and the step's results. Without ``backward`` nothing is kept for it."""
    state = plain_state(trace.holder, requires_grad=backward)
    own = {p.untyped_storage().data_ptr() for p in state.values() if p.numel()}
    values: dict[fx.Node, Any] = {}
    found: dict[fx.Node, Measured] = {}

    def run() -> None:
        by_leaf = dict(zip(trace.leaves, leaves, strict=True))
        with FlopCounterMode(display=False) as counter:
            for node in trace.graph.nodes:
                if node.op == "placeholder":
                    values[node] = by_leaf.get(node, 0)
                    found[node] = _of(values[node])
                elif node.op != "output":
                    found[node] = _run(trace, node, values, own, counter, backward)

    with kept_generators(SEED):
        with_tensors(trace.holder, state, run)
    return found, {key: values[node].detach() for key, node in trace.results.items()}


def _run(
    trace: StepTrace,
    node: fx.Node,
    values: dict[fx.Node, Any],
    own: set[int],
    counter: FlopCounterMode,
    backward: bool,
) -> Measured:
    saved: dict[tuple[int, int], int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
        return tensor

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
    node.meta["structured"] = result.structured
    return result


def _of(value: Any) -> Measured:
    if isinstance(value, torch.Tensor):
        return Measured(
            tuple(value.shape), value.dtype, value.numel() * value.element_size(), value.requires_grad
        )
    return Measured(structured=not isinstance(value, (int, float, str, bool, type(None), nn.Module)))
