"""Task batches on ranks: what each rank loads, and an example of it for capture.

Every rank draws the same batches in the same order: samplers and loader seeds advance on
each, but only ranks that run an operator of a task read and collate its samples, of which they
need not read all (``rowloading``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_spindle.runtime.randomness import shared_generators
from lightning_spindle.runtime.rowloading import (
    PartialBatch,
    RowReader,
    read_samples,
    row_read,
    whole_because,
)
from lightning_spindle.runtime.rowneeds import Needs, no_rows


class TaskLoader:
    """A task's loader as this rank uses it; everything but iterating is the loader's own.

    Args:
        loader: what the user gave.
        needs: the rows that this rank reads of each batch, None for whole batches; asked when an epoch
            begins.
        convert: what Lightning does to a batch before it is moved, done to rows that are read.
    """

    def __init__(
        self, loader: Any, needs: Callable[[TaskLoader], Needs | None], convert: Callable[[Any], Any]
    ) -> None:
        self.loader = loader
        self._needs = needs
        self._convert = convert
        self._epochs_skipped = 0
        self._reader: RowReader | None = None

    def __iter__(self) -> Iterator[Any]:
        needs = self._needs(self)
        if needs is None or not _countable(self.loader):
            return iter(self.loader)
        if needs is not no_rows:
            # Kept, as its workers may stay.
            self._reader = self._reader or RowReader(self.loader, self._convert)
            return self._reader.batches(needs)
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
    """Iterates over a loader's batches without reading, drawing from generators as the loader would.

    ``seeded``: the loader's workers already have their seed.
    """

    def __init__(self, loader: DataLoader[Any], seeded: bool = False) -> None:
        # DataLoader draws its base seed when the iterator is made; with workers it also asks
        # the sampler for the first batches then, without at the first next.
        if not seeded:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        self._read = row_read(loader)
        self._indices = iter(loader.batch_sampler)
        self._ahead: list[list[Any]] = []
        for _ in range(loader.num_workers * (loader.prefetch_factor or 0)):
            self._pull()

    def __iter__(self) -> _RowCounter:
        return self

    def __next__(self) -> PartialBatch:
        self._pull()
        if not self._ahead:
            raise StopIteration
        return PartialBatch(self._ahead.pop(0), (), None, self._read)

    def _pull(self) -> None:
        batch = next(self._indices, None)
        if batch is not None:
            self._ahead.append(list(batch))


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
    ``whole_because``: why its rows cannot be read alone; None where they can.
    """

    batch: Any
    samples: list[Any] | None
    collate: Callable[[list[Any]], Any] | None
    draws: bool = False
    whole_because: str | None = "its rows are not known before it is read"

    @property
    def varies(self) -> bool:
        """Whether user code makes the batches, which may leave out an optional part of them."""
        return self.collate is not default_collate


def example(loader: Any, row_loading: bool | None = False) -> Example:
    """An example batch of a loader, the same on every rank, without moving its sampler.

    Samples are spread over the dataset, so that one sorted by class gives several classes.
    Call it where random state is put back afterwards.

    Args:
        row_loading: ``SpindleStrategy``'s.

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
    indices = [i * len(dataset) // rows for i in range(rows)]
    before = shared_generators()
    samples = read_samples(dataset, indices)
    batch = loader.collate_fn(samples)
    if shared_generators() != before:
        drawn = "reading or collating it draws random numbers"
        return Example(batch, samples, loader.collate_fn, loader.num_workers == 0, drawn)
    why = whole_because(loader, samples, batch, indices, row_loading)
    return Example(batch, samples, loader.collate_fn, whole_because=why)


def read_by_rows(found: Mapping[str, Example], row_loading: bool | None) -> frozenset[str]:
    """The loaders whose rows are read alone; warns of those that should be and cannot."""
    if row_loading:
        for name, one in found.items():
            if one.whole_because is not None:
                rank_zero_warn(
                    f"row_loading=True is not followed for {name}, whose batches are read whole: "
                    f"{one.whole_because}"
                )
    return frozenset(name for name, one in found.items() if one.whole_because is None)


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
