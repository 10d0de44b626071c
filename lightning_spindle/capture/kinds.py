"""Kinds of values: how a tensor relates to rows, told from its values on the whole batch and on parts.

Legend: a *cut* takes the ``ROWS`` rows of an example apart into parts of unlike size, one of them with its
rows permuted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_spindle.capture.layout import pick

ROWS = 6
CUTS = (((0,), (1, 2, 3, 4, 5)), ((4, 1), (5, 0, 3, 2)))
PERMUTED = (3, 5, 0, 4, 2, 1)
ALL_ROWS = tuple(range(ROWS))
PARTS = [part for cut in CUTS for part in cut]
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-4, torch.complex128: 1e-8}


@dataclass(frozen=True)
class Kind:
    """How one tensor relates to rows.

    ``rows``: dimension ``dim`` holds ``per_row`` entries a row. ``static``: equal on all parts.
    ``size``: a function of the number of rows alone. ``mean``/``sum``: the parts' values make
    the whole's by a mean weighted by rows / by addition. ``whole``: needs all rows. ``gathered``:
    each part is given all rows, or the sum over them, by ``functional.gather_batch`` or ``batch_sum``.
    """

    tag: str
    dim: int | None = None
    per_row: int = 1


STATIC, SIZE, MEAN, SUM, WHOLE = Kind("static"), Kind("size"), Kind("mean"), Kind("sum"), Kind("whole")
GATHERED = Kind("gathered")


def kind_of(whole: Any, parts: list[Any], shapes_only: bool, kept: bool) -> Kind | None:
    """The kind that holds on all parts, None where there is none."""
    if not isinstance(whole, torch.Tensor):
        if all(type(p) is type(whole) and p == whole for p in parts):
            return STATIC if shapes_only or whole is None else None
        if shapes_only:
            return SIZE
        if not all(isinstance(v, (int, float)) for v in [whole, *parts]):
            return None
        return reduced(_number(whole), [_number(p) for p in parts])
    if not all(isinstance(p, torch.Tensor) for p in parts):
        return None
    if shapes_only and kept:
        return STATIC if all(alike(whole, p) for p in parts) else SIZE
    rows = rows_of(whole, list(zip(PARTS, parts, strict=True)))
    if rows is not None:
        return rows
    if shapes_only and all(alike(whole, p) for p in parts):
        return STATIC
    return None if all(alike(whole, p) for p in parts) else reduced(whole, parts)


def of_scalar(kind: Kind | None, given: list[Kind]) -> Kind | None:
    """A number rounded before it became a tensor is what it was as a number."""
    return given[0] if len(given) == 1 and given[0].tag in ("mean", "sum") else kind


def permuted_kind(whole: Any, permuted: Any) -> Kind:
    """The kind of a value that needs all rows: rows where it follows their permutation, else whole."""
    if (
        isinstance(whole, torch.Tensor)
        and isinstance(permuted, torch.Tensor)
        and whole.shape == permuted.shape
    ):
        if not alike(whole, permuted):
            return rows_of(whole, [(PERMUTED, permuted)]) or WHOLE
    return WHOLE


def rows_of(whole: torch.Tensor, parts: list[tuple[tuple[int, ...], torch.Tensor]]) -> Kind | None:
    """The dimension along which each part's value is the whole's at the part's rows."""
    for dim, entries in enumerate(whole.shape):
        if entries == 0 or entries % ROWS:
            continue
        per_row = entries // ROWS
        if all(
            part.dim() == whole.dim()
            and part.shape[dim] == per_row * len(index)
            and alike(pick(whole, dim, per_row, index), part)
            for index, part in parts
        ):
            return Kind("rows", dim, per_row)
    return None


def reduced(whole: torch.Tensor, parts: list[torch.Tensor]) -> Kind | None:
    """Mean or sum, where the parts' values make the whole's that way in every cut."""
    if whole.dtype is torch.bool or whole.is_complex() or any(p.shape != whole.shape for p in parts):
        return None
    pairs = list(zip(PARTS, parts, strict=True))
    cuts = [pairs[:2], pairs[2:]]
    if whole.is_floating_point() and all(
        alike(whole, sum(p * (len(i) / ROWS) for i, p in cut).to(whole.dtype)) for cut in cuts
    ):
        return MEAN
    if all(alike(whole, sum(p for _, p in cut).to(whole.dtype)) for cut in cuts):
        return SUM
    return None


def _number(value: float) -> torch.Tensor:
    """A number as a tensor; a float may have been float32 before ``item``."""
    return torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else None)


def alike(a: Any, b: Any) -> bool:
    """Equal but for rounding."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    tolerance = _TOLERANCE.get(a.dtype, 3e-2)
    finite = a[a.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 1e-6), equal_nan=True)
