"""Cutting values into row ranges and joining them again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_spindle.graph import Value

Rows = tuple[int, int]
"""Rows [first, last) of a batch."""


def meeting(a: Rows, b: Rows) -> Rows | None:
    """The rows that are in both; None where there are none."""
    first, last = max(a[0], b[0]), min(a[1], b[1])
    return (first, last) if first < last else None


def cut(tensor: torch.Tensor, value: Value, have: Rows, want: Rows) -> torch.Tensor:
    """Rows ``want`` of a tensor that holds rows ``have``; the tensor itself where it has no rows."""
    if value.dim is None or have == want:
        return tensor
    per_row = entries_per_row(tensor, value, have)
    return tensor.narrow(value.dim, (want[0] - have[0]) * per_row, (want[1] - want[0]) * per_row)


def entries_per_row(tensor: torch.Tensor, value: Value, rows: Rows) -> int:
    """How many entries of its dimension of rows belong to each of ``rows``, which the tensor holds.

    Not ``value.per_row``, which is the example batch's: where tokens of all rows lie behind each other, it is
    the length of this batch's sequences.

    Raises:
        ValueError: the entries cannot be shared out evenly.
    """
    assert value.dim is not None
    entries, count = tensor.shape[value.dim], rows[1] - rows[0]
    if entries % count:
        raise ValueError(
            f"value {value.name}: {entries} entries for {count} rows in dimension {value.dim}; in the "
            f"example batch each row had {value.per_row}, and Spindle cuts it by rows"
        )
    return entries // count


def join(parts: Sequence[tuple[Rows, torch.Tensor]], value: Value) -> torch.Tensor:
    """One tensor from parts that follow each other in rows, or, where they have none, are to be added.

    In the order of rows, so that all who join the same parts have the same bit for bit.
    """
    if len(parts) == 1:
        return parts[0][1]
    ordered = [tensor for _, tensor in sorted(parts, key=lambda part: part[0])]
    if value.dim is None:
        return torch.stack(ordered).sum(0, dtype=ordered[0].dtype)
    return torch.cat(ordered, dim=value.dim)


def summed(
    like: torch.Tensor,
    value: Value,
    have: Rows,
    parts: Sequence[tuple[Rows, torch.Tensor]],
) -> torch.Tensor:
    """The sum of gradient parts, each for some rows of ``like``, which holds rows ``have``.

    Added in the given order, so that the sum is the same bit for bit from run to run.
    """
    if len(parts) == 1 and (value.dim is None or parts[0][0] == have):
        return parts[0][1]
    total = torch.zeros_like(like, memory_format=torch.contiguous_format)
    for rows, part in parts:
        cut(total, value, have, rows).add_(part)
    return total
