"""Sizes and devices read from an operator's value, read from the batch instead.

A mask made from ``torch.arange(x.shape[1], device=x.device)`` would tie all its users to the operator that
gave ``x``, though the batch says the same. What a size depends on is found by running the trace on examples
of other sizes: each dimension of each leaf made shorter, and fewer rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from lightning_spindle import functional
from lightning_spindle.capture import patches
from lightning_spindle.capture.evaluate import (
    filled,
    kept_generators,
    plain_state,
    run_node,
    with_tensors,
)
from lightning_spindle.capture.inplace import replaced
from lightning_spindle.capture.layout import pick_rows
from lightning_spindle.capture.pieces import BatchLayout
from lightning_spindle.capture.step import StepTrace

_ROWS = 4


def read_from_batch(trace: StepTrace, leaves: Sequence[Any], layout: BatchLayout) -> None:
    """Rewrite reads of sizes and devices in ``trace`` to reads of the batch, where they always agree.

    A read that was found not to is not tried again.
    """
    graph = trace.graph
    tensors = [
        n for n, v in zip(trace.leaves, leaves, strict=True) if n is not None and isinstance(v, torch.Tensor)
    ]
    of_type = {v.dtype: n for n, v in zip(trace.leaves, leaves, strict=True) if n in tensors}
    for node in list(graph.nodes):
        given = _lends_type(node)
        if tensors and _reads(node, "device") and node.args[0].op != "placeholder":
            node.args = (tensors[0], "device")
        elif given is not None and given.op != "placeholder" and given.meta.get("dtype") in of_type:
            node.replace_input_with(given, of_type[given.meta["dtype"]])
    reads = [
        n
        for n in graph.nodes
        if _reads_size(n)
        and _source(n).op != "placeholder"
        and "own_size" not in n.meta
        and not _may_count_gathered(n)
    ]
    if reads:
        agreeing = _agreeing(trace, leaves, layout, reads)
        for node in reads:
            if node in agreeing:
                _replace(graph, node, *agreeing[node])
            else:
                node.meta["own_size"] = True


def _reads(node: fx.Node, attribute: str) -> bool:
    return node.target is getattr and node.args[1] == attribute


def _lends_type(node: fx.Node) -> fx.Node | None:
    """The tensor whose type alone ``node`` uses, as in ``mask.to(x)``."""
    if _reads(node, "dtype"):
        return node.args[0]
    if node.op == "call_method" and node.target in ("to", "type_as") and len(node.args) > 1:
        given = node.args[1]
        lends = (
            isinstance(given, fx.Node) and given.meta.get("dtype") is not None and given is not node.args[0]
        )
        return given if lends else None
    return None


def _reads_size(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 2 and isinstance(node.args[1], int)
    if node.target is patches.operator_getitem:
        given = node.args[0]
        from_shape = isinstance(given, fx.Node) and given.target is getattr and given.args[1] == "shape"
        return from_shape and isinstance(node.args[1], int)
    return node.target is patches.length


def _may_count_gathered(node: fx.Node) -> bool:
    """Whether a size may be that of gathered rows: as large as the whole batch's, on every device."""
    return any(n.target is functional.gather_batch for n in ancestors(node))


def _source(node: fx.Node) -> fx.Node:
    """The tensor whose size is read."""
    given = node.args[0]
    return given.args[0] if node.target is patches.operator_getitem else given


def _replace(graph: fx.Graph, node: fx.Node, leaf: fx.Node | None, dim: int) -> None:
    if leaf is None:  # it depends on no leaf: ``dim`` is the size
        for user in list(node.users):
            user.args, user.kwargs = replaced((user.args, user.kwargs), node, dim)
        graph.erase_node(node)
        return
    with graph.inserting_before(node):
        shape = graph.call_function(getattr, (leaf, "shape"))
        size = graph.call_function(patches.operator_getitem, (shape, dim))
    node.replace_all_uses_with(size)
    graph.erase_node(node)


def _agreeing(
    trace: StepTrace, leaves: Sequence[Any], layout: BatchLayout, reads: list[fx.Node]
) -> dict[fx.Node, tuple[fx.Node | None, int]]:
    rows = layout.rows(list(leaves))
    base = pick_rows(leaves, layout, [row % rows for row in range(_ROWS)])
    variants = [
        base,
        pick_rows(leaves, layout, [row % rows for row in range(_ROWS - 1)]),
        *_shorter(base, layout),
    ]
    state = plain_state(trace.holder, requires_grad=False)
    found: list[tuple[list[Any], dict[fx.Node, int]]] = []
    for given in variants:
        with kept_generators(0), torch.no_grad():
            sizes = with_tensors(trace.holder, state, partial(_sizes, trace, given, reads))
        found.append((given, sizes))
    places = [
        (i, dim)
        for i, leaf in enumerate(base)
        if isinstance(leaf, torch.Tensor) and trace.leaves[i] is not None
        for dim in range(leaf.dim())
    ]
    chosen: dict[fx.Node, tuple[fx.Node | None, int]] = {}
    for node in reads:
        if not any(n.op == "placeholder" for n in ancestors(node)) and node in found[0][1]:
            chosen[node] = (None, found[0][1][node])
            continue
        for i, dim in places:
            seen = [(given[i].shape[dim], sizes[node]) for given, sizes in found if node in sizes]
            if len({size for size, _ in seen}) > 1 and all(a == b for a, b in seen):
                chosen[node] = (trace.leaves[i], dim)
                break
    return chosen


def _shorter(base: list[Any], layout: BatchLayout) -> list[list[Any]]:
    """The example with one dimension of one leaf cut short, each in turn."""
    made = []
    for i, leaf in enumerate(base):
        if not isinstance(leaf, torch.Tensor):
            continue
        for dim in range(leaf.dim()):
            if dim != layout.leaves[i].dim and leaf.shape[dim] > 1:
                cut = leaf.narrow(dim, 0, leaf.shape[dim] - 1)
                made.append([*base[:i], cut, *base[i + 1 :]])
    return made


def _sizes(trace: StepTrace, leaves: list[Any], reads: list[fx.Node]) -> dict[fx.Node, int]:
    """The sizes that ``reads`` give on these leaves, without those that cannot be run."""
    wanted = set(reads).union(*(ancestors(node) for node in reads))
    values: dict[fx.Node, Any] = dict(zip(trace.leaves, leaves, strict=True))
    values[trace.batch_idx] = 0
    for node in trace.graph.nodes:
        if node in wanted and node.op != "placeholder" and all(n in values for n in node.all_input_nodes):
            try:
                values[node] = run_node(trace.holder, node, *filled(node, values.__getitem__))
            except Exception:
                continue  # this layer does not take such sizes
    return {node: values[node] for node in reads if node in values}


def ancestors(node: fx.Node) -> set[fx.Node]:
    """All nodes that ``node`` needs."""
    found: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        at = stack.pop()
        if at not in found:
            found.add(at)
            stack.extend(at.all_input_nodes)
    return found
