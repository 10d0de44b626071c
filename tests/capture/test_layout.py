"""Rows of batches: found by growth or by the leading dimension, cut and put together."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from lightning_spindle.capture import LeafLayout, batch_layout, flatten, take_rows, unflatten
from lightning_spindle.capture.layout import pick_rows


def test_growth_tells_rows_from_other_dimensions() -> None:
    def collate(items: list[Any]) -> dict[str, Any]:
        return {
            "time_first": torch.stack(items, 1),
            "clips": torch.cat(items),
            "captions": [f"row {i}" for i in range(len(items))],
            "classes": torch.ones(4),
            "scale": 0.07,
            "none": None,
        }

    samples = [torch.randn(2, 3) for _ in range(4)]
    batch = collate(samples)
    layout = batch_layout(batch, collate, samples)
    assert dict(zip(batch, layout.leaves, strict=True)) == {
        "time_first": LeafLayout(1),
        "clips": LeafLayout(0, 2),
        "captions": LeafLayout(0),
        "classes": LeafLayout(None),
        "scale": LeafLayout(None),
        "none": LeafLayout(None),
    }
    leaves, _ = flatten(batch)
    part = unflatten(take_rows(leaves, layout, 1, 3), layout.spec)
    assert torch.equal(part["clips"], batch["clips"][2:6])
    assert torch.equal(part["time_first"], batch["time_first"][:, 1:3])
    assert part["captions"] == ["row 1", "row 2"]
    assert part["classes"] is batch["classes"]
    picked = pick_rows(leaves, layout, [3, 0])
    assert torch.equal(picked[1], batch["clips"][[6, 7, 0, 1]])


@pytest.mark.parametrize("lacking", [0, 1, 3])
def test_growth_of_samples_of_which_some_lack_a_part(lacking: int) -> None:
    """An image is in a batch where all its samples have one; the example's are spread over the dataset."""

    def collate(items: list[Any]) -> dict[str, Any]:
        images = [image for _, image in items if image is not None]
        return {
            "text": torch.stack([text for text, _ in items]),
            "image": torch.stack(images) if len(images) == len(items) else None,
        }

    samples = [(torch.ones(2), None if at == lacking else torch.ones(3)) for at in range(4)]
    assert batch_layout(collate(samples), collate, samples).leaves == (LeafLayout(0), LeafLayout(None))
    rest = [sample for sample in samples if sample[1] is not None]
    # The first sample is without, the batch is not: as where the collate function fills the gaps.
    filled = batch_layout(collate(rest), collate, [samples[lacking], *rest])
    assert filled.leaves == (LeafLayout(0), LeafLayout(0))


def test_leading_dimension_without_collate() -> None:
    batch = {"x": torch.ones(6, 2), "names": list("abcdef"), "few": [1, 2], "scalar": torch.tensor(1.0)}
    assert [of.dim for of in batch_layout(batch).leaves] == [0, 0, None, None]
    with pytest.raises(ValueError, match=r"\['weights'\] has 3"):
        batch_layout({"x": torch.ones(6, 2), "weights": torch.ones(3)})
    with pytest.raises(ValueError, match="no tensor"):
        batch_layout({"x": "text"})


def test_dimensions_that_grow_oddly_are_refused_by_name() -> None:
    def pairs(items: list[Any]) -> dict[str, Any]:
        return {"pairs": torch.ones(len(items), len(items))}

    with pytest.raises(ValueError, match=r"\['pairs'\].*\[0, 1\]"):
        batch_layout(pairs([1, 2, 3]), pairs, [1, 2, 3])

    def ends(items: list[Any]) -> dict[str, Any]:
        return {"ends": torch.ones(len(items) + 1)}

    with pytest.raises(ValueError, match=r"\['ends'\].*fixed number"):
        batch_layout(ends([1, 2, 3]), ends, [1, 2, 3])


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 7), cuts=st.lists(st.integers(0, 7), max_size=3))
def test_parts_make_the_whole(rows: int, cuts: list[int]) -> None:
    samples = [(torch.full((2,), float(i)), i, f"{i}") for i in range(rows)]
    batch = default_collate(samples)
    leaves, spec = flatten(batch)
    layout = batch_layout(batch, default_collate, samples)
    assert layout.spec == spec
    assert layout.rows(leaves) == rows
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    parts = [take_rows(leaves, layout, a, b) for a, b in pairwise(edges)]
    assert torch.equal(torch.cat([p[0] for p in parts]), leaves[0])
    assert torch.equal(torch.cat([p[1] for p in parts]), leaves[1])
