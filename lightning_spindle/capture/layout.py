"""How batches are taken apart: leaves, where each holds its rows, and rows of them.

Legend: B rows of a batch. A *leaf* is a tensor, a scalar (number, string, None) or a list of scalars
(captions, ids), which holds one entry a row where it has batch length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from lightning_spindle.capture.pieces import BatchLayout, LeafLayout

_SCALARS = (str, bytes, int, float, complex, bool, type(None))


def flatten(batch: Any) -> tuple[list[Any], TreeSpec]:
    """A batch's leaves and its tree. Lists of scalars are one leaf."""
    return tree_flatten(batch, is_leaf=_is_scalar_list)


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The inverse of ``flatten``."""
    return tree_unflatten(list(leaves), spec)


def leaf_names(batch: Any) -> list[str]:
    """A name for each leaf as the user would write it, such as ``['image']`` or ``[0]``."""
    found, _ = tree_flatten_with_path(batch, is_leaf=_is_scalar_list)
    return [keystr(path) or "the batch" for path, _ in found]


def batch_layout(
    batch: Any, collate: Callable[[list[Any]], Any] | None = None, samples: list[Any] | None = None
) -> BatchLayout:
    """Where each leaf of ``batch`` holds its rows.

    With ``collate`` and ``samples`` one item is collated twice and three times: dimensions that
    grow are batch dimensions. Otherwise rows lie in the leading dimension, which all tensors
    with dimensions must share.

    Raises:
        ValueError: where rows cannot be found without guessing; names the leaf.
    """
    leaves, spec = flatten(batch)
    names, kinds = tuple(leaf_names(batch)), tuple(map(leaf_kind, leaves))
    found = _by_growth(batch, collate, samples[0]) if collate is not None and samples else None
    if found is None:
        found = _by_leading_dimension(leaves, list(names))
    return BatchLayout(spec, found, names, kinds)


def leaf_kind(leaf: Any) -> str:
    """What a trace takes for granted of a leaf: "tensor", "None" or "value"."""
    if isinstance(leaf, torch.Tensor):
        return "tensor"
    return "None" if leaf is None else "value"


def require_like_example(leaves: Sequence[Any], layout: BatchLayout) -> None:
    """Checks that each leaf is there, or absent, as in the example that was captured.

    Raises:
        ValueError: names the first leaf that is not.
    """
    for leaf, name, kind in zip(leaves, layout.names, layout.kinds, strict=False):
        if leaf_kind(leaf) != kind:
            raise ValueError(
                f"batch leaf {name} is a {leaf_kind(leaf)} here and was a {kind} in the example that was "
                "captured, and the step was taken apart for that; give every batch the same leaves (an empty "
                "modality as zeros with a mask, say), or give batches of another kind a task of their own"
            )


def take_rows(leaves: Sequence[Any], layout: BatchLayout, first: int, last: int) -> list[Any]:
    """Rows [first, last) of each leaf; tensors are views, leaves without rows are passed on."""
    return [_rows_of(leaf, of, first, last) for leaf, of in zip(leaves, layout.leaves, strict=True)]


def pick_rows(leaves: Sequence[Any], layout: BatchLayout, index: Sequence[int]) -> list[Any]:
    """The rows ``index`` of each leaf, in that order (copies)."""
    return [pick(leaf, of.dim, of.per_row, index) for leaf, of in zip(leaves, layout.leaves, strict=True)]


def pick(leaf: Any, dim: int | None, per_row: int, index: Sequence[int]) -> Any:
    """The rows ``index`` of one value."""
    if dim is None:
        return leaf
    entries = [row * per_row + k for row in index for k in range(per_row)]
    if isinstance(leaf, torch.Tensor):
        return leaf.index_select(dim, torch.tensor(entries, device=leaf.device))
    return [leaf[entry] for entry in entries]


def _rows_of(leaf: Any, of: LeafLayout, first: int, last: int) -> Any:
    if of.dim is None:
        return leaf
    if isinstance(leaf, torch.Tensor):
        return leaf.narrow(of.dim, first * of.per_row, (last - first) * of.per_row)
    return leaf[first * of.per_row : last * of.per_row]


def _is_scalar_list(node: Any) -> bool:
    return isinstance(node, list) and bool(node) and all(isinstance(entry, _SCALARS) for entry in node)


def _by_growth(batch: Any, collate: Callable[[list[Any]], Any], sample: Any) -> tuple[LeafLayout, ...] | None:
    twice, thrice = collate([sample] * 2), collate([sample] * 3)
    (two, _), (three, _), (example, spec) = flatten(twice), flatten(thrice), flatten(batch)
    if not len(two) == len(three) == spec.num_leaves:
        return None  # hooks changed the batch after it was collated
    return tuple(
        _growth(name, a, b, c) for name, a, b, c in zip(leaf_names(batch), two, three, example, strict=True)
    )


def _growth(name: str, two: Any, three: Any, example: Any) -> LeafLayout:
    if isinstance(example, torch.Tensor) != isinstance(two, torch.Tensor):
        raise ValueError(
            f"batch leaf {name}: the collate function gives a {type(two).__name__}, the batch holds a "
            f"{type(example).__name__}; Spindle cannot tell where it holds the rows"
        )
    if isinstance(two, list):
        per_row = len(three) - len(two)
        return LeafLayout(0, per_row) if per_row else LeafLayout(None)
    if not isinstance(two, torch.Tensor):
        return LeafLayout(None)
    if two.dim() != three.dim() or two.dim() != example.dim():
        raise ValueError(f"batch leaf {name}: its number of dimensions changes with the number of rows")
    grown = [d for d in range(two.dim()) if two.shape[d] != three.shape[d]]
    if len(grown) > 1:
        raise ValueError(f"batch leaf {name}: dimensions {grown} all grow with the number of rows")
    if not grown:
        return LeafLayout(None)
    per_row = three.shape[grown[0]] - two.shape[grown[0]]
    if per_row <= 0 or two.shape[grown[0]] != 2 * per_row:
        raise ValueError(
            f"batch leaf {name}: dimension {grown[0]} has {two.shape[grown[0]]} entries for 2 rows and "
            f"{three.shape[grown[0]]} for 3; expected a fixed number a row"
        )
    return LeafLayout(grown[0], per_row)


def _by_leading_dimension(leaves: list[Any], names: list[str]) -> tuple[LeafLayout, ...]:
    sizes = {
        name: leaf.shape[0]
        for name, leaf in zip(names, leaves, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    }
    if not sizes:
        raise ValueError("the batch has no tensor with dimensions, so Spindle cannot tell its number of rows")
    first, rows = next(iter(sizes.items()))
    for name, size in sizes.items():
        if size != rows:
            raise ValueError(
                f"batch leaf {name} has {size} entries in its leading dimension, {first} has {rows}: Spindle "
                "cannot tell which holds the rows; a collate function on the loader shows it"
            )
    return tuple(_leading(leaf, rows) for leaf in leaves)


def _leading(leaf: Any, rows: int) -> LeafLayout:
    if isinstance(leaf, torch.Tensor):
        return LeafLayout(0 if leaf.dim() else None)
    return LeafLayout(0 if isinstance(leaf, list) and len(leaf) == rows else None)
