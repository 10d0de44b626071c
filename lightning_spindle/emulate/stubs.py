"""Operators that take virtual time and give tensors with one entry for each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lightning_spindle.capture.pieces import BatchLayout, Capture, LeafLayout, LeafRef, Piece, ValueRef
from lightning_spindle.graph import Operator, OperatorGraph, Value

Spend = Callable[[str, int, bool], None]
"""An operator passes over so many rows, forward or backward."""


class _Pass(torch.autograd.Function):
    """The forward, and the backward if a gradient comes to it."""

    @staticmethod
    def forward(
        ctx: Any, spend: Spend, operator: Operator, rows: int, values: tuple[Value, ...], *reads: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        spend(operator.name, rows, False)
        ctx.backward_spends = partial(spend, operator.name, rows, True)
        ctx.reads = reads
        given = tuple(torch.zeros(_shape(v, rows)) for v in values)
        ctx.mark_non_differentiable(*(t for t, v in zip(given, values, strict=True) if not v.differentiable))
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.backward_spends()
        needed = ctx.needs_input_grad[-len(ctx.reads) :] if ctx.reads else ()
        given = [torch.zeros_like(t) if needs else None for t, needs in zip(ctx.reads, needed, strict=True)]
        return (None, None, None, None, *given)


def stub_capture(graph: OperatorGraph, parameters: Mapping[str, torch.nn.Parameter], spend: Spend) -> Capture:
    """A step as if it had been captured: each operator reads its task's rows, its inputs and parameters."""
    values = graph.value_map()
    pieces = {o.name: _piece(o, values, parameters, spend) for o in graph.operators}
    layout = BatchLayout(pytree.tree_structure([0]), (LeafLayout(0),))
    return Capture(graph, pieces, dict.fromkeys(dict.fromkeys(o.task for o in graph.operators), layout))


def _piece(
    o: Operator, values: Mapping[str, Value], parameters: Mapping[str, torch.nn.Parameter], spend: Spend
) -> Piece:
    given = tuple(values[v] for v in o.outputs)

    def build() -> Callable[..., tuple[Any, ...]]:
        used = [parameters[p] for p in o.parameters]

        def call(rows: torch.Tensor, *inputs: torch.Tensor) -> tuple[Any, ...]:
            if not given:
                spend(o.name, len(rows), False)
                return ()
            return _Pass.apply(spend, o, len(rows), given, *inputs, *used)

        return call

    return Piece(o.name, (LeafRef(0), *(ValueRef(v) for v in o.inputs)), o.outputs, build)


def _shape(value: Value, rows: int) -> tuple[int, ...]:
    return () if value.dim is None else (1,) * value.dim + (rows * value.per_row,)
