"""Numbers of rows that a step reads from its batch, as ``len(x)`` does and the ``batch_size`` of a log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from lightning_spindle.capture import patches
from lightning_spindle.capture.errors import TraceError
from lightning_spindle.capture.pieces import LeafLayout, LogCall, RowsRef

Leaves = Mapping[fx.Node, tuple[str, LeafLayout]]
"""Placeholders of a batch's leaves, with their task and where they hold its rows."""


def rows_read(node: fx.Node, leaves: Leaves) -> RowsRef | None:
    """The number of rows that ``node`` reads; None where it is anything else."""
    if node.target is patches.length:
        leaf, dim = node.args[0], 0
    elif node.op == "call_method" and node.target == "size" and len(node.args) == 2:
        leaf, dim = node.args
    elif node.target is patches.operator_getitem and _is_shape(node.args[0]):
        leaf, dim = node.args[0].args[0], node.args[1]
    else:
        return None
    if leaf not in leaves:
        return None
    task, layout = leaves[leaf]
    return RowsRef(task, layout.per_row) if layout.dim is not None and layout.dim == dim else None


def weighed(
    logs: Sequence[LogCall], sizes: Mapping[str, fx.Node], rows: Callable[[fx.Node], RowsRef | None]
) -> list[LogCall]:
    """The calls with the rows that were given as ``batch_size``.

    Args:
        logs: of a trace.
        sizes: its ``StepTrace.sizes``.
        rows: what a node reads.

    Raises:
        TraceError: what was given is no number of rows.
    """
    for key, node in sizes.items():
        if rows(node) is None:
            raise TraceError(f"the batch_size of self.log({key!r}) is no number of rows")
    return [replace(c, rows=rows(sizes[c.key])) if c.key in sizes else c for c in logs]


def _is_shape(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is getattr and node.args[1] == "shape"
