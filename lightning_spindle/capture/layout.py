"""Where the leaves of batches (``trees``) hold their rows, and rows of them.

Legend: B rows of a batch. A list is taken apart in step with the tensors where it has an entry a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_spindle.capture.pieces import BatchLayout, LeafLayout
from lightning_spindle.capture.trees import Lists, flatten, leaf_names, list_lengths


def batch_layout(
    batch: Any, collate: Callable[[list[Any]], Any] | None = None, samples: list[Any] | None = None
) -> BatchLayout:
    """Where each leaf of ``batch`` holds its rows.

    With ``collate`` and ``samples`` one item, the first that has all that the batch has, is collated
    twice and three times: dimensions that grow are batch dimensions. Otherwise rows lie in the leading
    dimension, which all tensors with dimensions must share.

    Raises:
        ValueError: where rows cannot be found without guessing; names the leaf.
    """
    grown = _grown(batch, collate, samples) if collate is not None and samples else None
    lists = frozenset[str]() if grown is None else _row_lists(*grown)
    leaves, spec = flatten(batch, lists)
    names, kinds = tuple(leaf_names(batch, lists)), tuple(map(leaf_kind, leaves))
    found = None if grown is None else _by_growth(leaves, names, lists, *grown)
    if found is None:
        found = _by_leading_dimension(leaves, list(names))
    return BatchLayout(spec, found, names, kinds, lists)


def layout_like(batch: Any, known: BatchLayout) -> BatchLayout:
    """Where a batch of another structure than ``known`` holds its rows.

    Leaves that ``known`` names hold them as there; of the others tensors with as many entries in their
    leading dimension as there are rows, and lists of as many scalars.

    Raises:
        ValueError: it has no rows that are known, or a tensor's cannot be found; names the leaf.
    """
    leaves, spec = flatten(batch, known.lists)
    names, kinds = tuple(leaf_names(batch, known.lists)), tuple(map(leaf_kind, leaves))
    layouts = dict(zip(known.names, zip(known.leaves, known.kinds, strict=True), strict=True))
    found = [
        layouts[name][0] if name in layouts and layouts[name][1] == kind else None
        for name, kind in zip(names, kinds, strict=True)
    ]
    told = [(leaf, of) for leaf, of in zip(leaves, found, strict=True) if of is not None]
    rows = BatchLayout(spec, tuple(of for _, of in told)).rows([leaf for leaf, _ in told])
    for at, leaf in enumerate(leaves):
        if found[at] is None:
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] != rows:
                raise ValueError(
                    f"batch leaf {names[at]} has {leaf.shape[0]} entries in its leading dimension, and the "
                    f"batch {rows} rows: Spindle cannot tell where it holds them. Give what only some rows "
                    "have for all of them, with a mask"
                )
            found[at] = _leading(leaf, rows)
    return BatchLayout(spec, tuple(of for of in found if of is not None), names, kinds, known.lists)


def leaf_kind(leaf: Any) -> str:
    """What a trace takes for granted of a leaf: "tensor", "None", "value"; of a list, "values with None"."""
    if isinstance(leaf, torch.Tensor):
        return "tensor"
    if isinstance(leaf, list) and None in leaf:
        return "values with None"
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


def _grown(batch: Any, collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[Any, Any]:
    kinds = list(map(leaf_kind, flatten(batch)[0]))
    for sample in samples:
        twice = collate([sample] * 2)
        if list(map(leaf_kind, flatten(twice)[0])) == kinds:
            break
    else:
        sample, twice = samples[0], collate([samples[0]] * 2)
    return twice, collate([sample] * 3)


def _row_lists(twice: Any, thrice: Any) -> Lists:
    """Lists of tensors or containers that grow with the number of rows (boxes of each image)."""
    two, three = list_lengths(twice), list_lengths(thrice)
    return frozenset(name for name in two.keys() & three.keys() if two[name] != three[name])


def _by_growth(
    leaves: list[Any], names: Sequence[str], lists: Lists, twice: Any, thrice: Any
) -> tuple[LeafLayout, ...] | None:
    (two, _), (three, _) = flatten(twice, lists), flatten(thrice, lists)
    if not len(two) == len(three) == len(leaves):
        return None  # hooks changed the batch after it was collated
    return tuple(_growth(*found) for found in zip(names, two, three, leaves, strict=True))


def _growth(name: str, two: Any, three: Any, example: Any) -> LeafLayout:
    if example is None:
        return LeafLayout(None)  # what single samples have and a batch of several lacks
    if isinstance(example, torch.Tensor) != isinstance(two, torch.Tensor):
        raise ValueError(
            f"batch leaf {name}: the collate function gives a {type(two).__name__}, the batch holds a "
            f"{type(example).__name__}; Spindle cannot tell where it holds the rows"
        )
    if isinstance(two, list):
        per_row = len(three) - len(two)
        if per_row and len(two) != 2 * per_row:
            raise ValueError(
                f"batch leaf {name}: a list of {len(two)} entries for 2 rows and {len(three)} for 3; "
                "expected a fixed number a row"
            )
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
