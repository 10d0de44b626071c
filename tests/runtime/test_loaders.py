"""Loaders of tasks that a rank does not run: the same draws, no reading (C07)."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_spindle.runtime.loaders import TaskLoader, example
from lightning_spindle.runtime.rowloading import PartialBatch
from lightning_spindle.runtime.rowneeds import Needs, no_rows


class Counting(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size, self.reads = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


def unchanged(batch: Any) -> Any:
    return batch


def ends(rows: int) -> tuple[tuple[int, int], ...]:
    """The first row and the last, of more than one."""
    return ((0, 1), (rows - 1, rows)) if rows > 1 else ()


def draws(needs: Needs | None, workers: int, stay: bool = False) -> tuple[list[Any], list[torch.Tensor], int]:
    torch.manual_seed(5)
    data = [Counting(13), Counting(10)]
    options: dict[str, Any] = {"shuffle": True, "num_workers": workers, "persistent_workers": stay}
    loaders = [
        TaskLoader(DataLoader(data[0], 4, **options), lambda _: None, unchanged),
        TaskLoader(DataLoader(data[1], 3, **options), lambda _: needs, unchanged),
    ]
    seen, after = [], []
    for _ in range(3 if stay else 2):
        iterators = [iter(loader) for loader in loaders]
        for batches in zip(*iterators, strict=False):
            seen.append(batches)
        after.append(torch.rand(3))
    return seen, after, data[1].reads


@pytest.mark.parametrize(("workers", "stay"), [(0, False), (2, False), (2, True)])
def test_skipping_a_loader_changes_no_draw(workers: int, stay: bool) -> None:
    full, rest, reads = draws(None, workers, stay)
    skipped, rest_skipped, no_reads = draws(no_rows, workers, stay)
    assert [a.tolist() for a, _ in full] == [a.tolist() for a, _ in skipped]
    assert all(isinstance(b, PartialBatch) and b.batch is None for _, b in skipped)
    assert [len(b) for _, b in full] == [b.rows for _, b in skipped]
    assert all(torch.equal(a, b) for a, b in zip(rest, rest_skipped, strict=True))
    assert no_reads == 0
    assert reads == (20 if workers == 0 else 0), "worker processes count in their own memory"


@pytest.mark.parametrize(("workers", "stay"), [(0, False), (2, False), (2, True)])
def test_reading_some_rows_changes_no_draw(workers: int, stay: bool) -> None:
    """The last batch has one row, of which none is needed; rows that are missing can be read later."""
    full, rest, _ = draws(None, workers, stay)
    parts, rest_parts, reads = draws(ends, workers, stay)
    assert [a.tolist() for a, _ in full] == [a.tolist() for a, _ in parts]
    assert all(torch.equal(a, b) for a, b in zip(rest, rest_parts, strict=True))
    for (_, whole), (_, part) in zip(full, parts, strict=True):
        assert part.indices == whole.tolist()
        assert part.batch.tolist() == whole[[0, -1]].tolist() if part.held else part.batch is None
        assert part.covering(part.held) is part
        assert part.whole().tolist() == whole.tolist()
    assert sum(part.batch is None for _, part in parts) == len(rest)
    assert workers or reads == 12


def test_each_sample_once_an_epoch() -> None:
    """ONCE: in two epochs, another order in the second."""
    full, _, _ = draws(None, 0)
    epochs = full[:4], full[4:]
    orders = [torch.cat([a for a, _ in epoch]).tolist() for epoch in epochs]
    assert all(sorted(order) == list(range(13)) for order in orders)
    assert orders[0] != orders[1]


def test_example_is_spread_over_the_dataset_and_moves_no_sampler() -> None:
    loader = DataLoader(Counting(12), 4, shuffle=True)
    before = torch.random.get_rng_state()
    found = example(loader)
    assert found.batch.tolist() == [0, 3, 6, 9]
    assert torch.equal(before, torch.random.get_rng_state())


def test_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        example(DataLoader(Counting(0), 4))
