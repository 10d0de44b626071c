"""Task batches on ranks: what each rank loads, and an example of it for capture.

Every rank draws the same batches in the same order: samplers and loader seeds advance on
each, but only ranks that run an operator of a task read and collate its samples.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate


class RowsOnly:
    """What a rank that runs nothing of a task gets for its batch: how many rows there are.

    No dataclass: Lightning takes those apart, as it does any batch.
    """

    __slots__ = ("rows",)

    def __init__(self, rows: int) -> None:
        self.rows = rows


class TaskLoader:
    """A task's loader as this rank uses it; everything but iterating is the loader's own.

    Args:
        loader: what the user gave.
        needed: whether this rank needs the samples; asked when an epoch begins.
    """

    def __init__(self, loader: Any, needed: Callable[[TaskLoader], bool]) -> None:
        self.loader = loader
        self._needed = needed
        self._epochs_skipped = 0

    def __iter__(self) -> Iterator[Any]:
        if self._needed(self) or not _countable(self.loader):
            return iter(self.loader)
        # Workers that stay draw their seed once, when they start.
        drawn = self._epochs_skipped > 0 and bool(self.loader.persistent_workers)
        self._epochs_skipped += 1
        return _RowCounter(self.loader, drawn)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class _RowCounter:
    """Iterates over a loader's batches as rows, drawing from generators as the loader would.

    ``seeded``: the loader's workers already have their seed.
    """

    def __init__(self, loader: DataLoader[Any], seeded: bool = False) -> None:
        # DataLoader draws its base seed when the iterator is made; with workers it also asks
        # the sampler for the first batches then, without at the first next.
        if not seeded:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        self._indices = iter(loader.batch_sampler)
        self._ahead: list[int] = []
        for _ in range(loader.num_workers * (loader.prefetch_factor or 0)):
            self._pull()

    def __iter__(self) -> _RowCounter:
        return self

    def __next__(self) -> RowsOnly:
        self._pull()
        if not self._ahead:
            raise StopIteration
        return RowsOnly(self._ahead.pop(0))

    def _pull(self) -> None:
        batch = next(self._indices, None)
        if batch is not None:
            self._ahead.append(len(batch))


def _countable(loader: Any) -> bool:
    """Whether the rows of each batch are known without reading it."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


@dataclass(frozen=True, slots=True)
class Example:
    """An example batch, with what it was collated from where the loader tells.

    ``draws``: reading it moves this process's random generators, so that every rank must read.
    """

    batch: Any
    samples: list[Any] | None
    collate: Callable[[list[Any]], Any] | None
    draws: bool = False

    @property
    def varies(self) -> bool:
        """Whether user code makes the batches, which may leave out an optional part of them."""
        return self.collate is not default_collate


def example(loader: Any) -> Example:
    """An example batch of a loader, the same on every rank, without moving its sampler.

    Samples are spread over the dataset, so that one sorted by class gives several classes.
    Call it where random state is put back afterwards.

    Raises:
        ValueError: the loader has no samples.
    """
    if not _countable(loader):
        batch = next(iter(loader), None)
        if batch is None:
            raise ValueError("its loader gives no batch")
        return Example(batch, None, None)
    dataset = loader.dataset
    rows = min(_batch_size(loader), len(dataset))
    if rows == 0:
        raise ValueError("its dataset has no samples")
    before = _generators()
    samples = [dataset[i * len(dataset) // rows] for i in range(rows)]
    batch = loader.collate_fn(samples)
    return Example(batch, samples, loader.collate_fn, loader.num_workers == 0 and _generators() != before)


def _generators() -> tuple[Any, ...]:
    """The state of the generators that samplers and datasets share."""
    return torch.get_rng_state().tolist(), random.getstate(), pickle.dumps(np.random.get_state())


def _batch_size(loader: DataLoader[Any]) -> int:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else len(next(iter(loader.batch_sampler)))


def named_loaders(combined: Any) -> Mapping[str, Any]:
    """Task to loader of a CombinedLoader over a dict (or of such a dict).

    Raises:
        ValueError: the loaders have no task names.
    """
    iterables = getattr(combined, "iterables", combined)
    if not isinstance(iterables, Mapping):
        raise ValueError(
            f"loaders come as a {type(iterables).__name__}; Spindle needs a dict {{task: loader}}, "
            f"or a MultiTaskDataModule"
        )
    return iterables
