"""Other values in the place of a node's inputs, which keep their kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_spindle.capture.kinds import ALL_ROWS, CUTS, ROWS, Kind
from lightning_spindle.capture.layout import pick

_FIRST = (0.3, 0.9)  # what the first part of each cut is given


def stirred(value: Any, kinds: list[Kind]) -> Callable[[tuple[int, ...]], Any] | None:
    """Rows or parts' means and sums that differ from part to part, by part; None to keep the input.

    The value on ``ALL_ROWS`` is the one that the parts of every cut make.
    """
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    if kind.tag == "rows" and isinstance(value, torch.Tensor):
        assert kind.dim is not None
        other, dim = _other_rows(value, kind.dim, kind.per_row), kind.dim
        return lambda part: other if part is ALL_ROWS else pick(other, dim, kind.per_row, part)
    if kind.tag in ("mean", "sum") and isinstance(value, (float, torch.Tensor)):
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            return None
        shares = _shares(kind.tag)
        return lambda part: value + shares[part]
    return None


def without_coincidence(value: Any, dim: int) -> Any:
    """A mask that is all alike on the example (no padding, no ignored label) with some entries flipped.

    The first entry of the last dimension stays, so that no row is masked altogether.
    """
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.bool or value.numel() < 2:
        return value
    if bool(value.any()) and not bool(value.all()):
        return value
    return _other_rows(value, dim, value.shape[dim] // ROWS, keep_first=value.dim() > 1)


def _other_rows(value: torch.Tensor, dim: int, per_row: int, keep_first: bool = False) -> torch.Tensor:
    entry = torch.arange(ROWS * per_row, device=value.device) % 7
    shape = [1] * value.dim()
    shape[dim] = -1
    column = (
        torch.arange(value.shape[-1], device=value.device)
        if value.dim() > 1 and dim != value.dim() - 1
        else 0
    )
    pattern = (entry.reshape(shape) * 3 + column) % 5
    if value.dtype is torch.bool:
        flips = (pattern % 2 == 1).expand(value.shape).clone()
        if keep_first and dim != value.dim() - 1:
            flips[..., 0] = False
        return value ^ flips
    if value.is_floating_point() or value.is_complex():
        return value + 0.1 * pattern.to(value.dtype)
    return value + pattern % 2


def _shares(tag: str) -> dict[tuple[int, ...], float]:
    """What is added to each part, such that every cut adds 0.5 to the whole."""
    shares = {ALL_ROWS: 0.5}
    for first, (part, other) in zip(_FIRST, CUTS, strict=True):
        w, v = (len(part) / ROWS, len(other) / ROWS) if tag == "mean" else (1.0, 1.0)
        shares[part], shares[other] = first, (0.5 - w * first) / v
    return shares
