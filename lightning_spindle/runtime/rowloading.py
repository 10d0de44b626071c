"""Reading only some rows of each batch of a DataLoader, with the draws of one that reads all of them.

Sound where a row is the same whatever else is read and collated (``whole_because`` tells by trying), and
where reading draws nothing from the generators that samplers draw from (``DrawGuard`` watches it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any
from zlib import crc32

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.utils.data import DataLoader, default_collate

from lightning_spindle.capture import batch_layout, flatten
from lightning_spindle.capture.layout import pick_rows
from lightning_spindle.runtime.randomness import shared_generators
from lightning_spindle.runtime.rowneeds import Needs
from lightning_spindle.runtime.rows import Rows

Read = Callable[[Sequence[Any]], Any]
"""Reads and collates the samples of indices."""


class PartialBatch:
    """A batch of which this rank has read only some rows, or none.

    No dataclass: Lightning takes those apart, as it does any batch.

    Args:
        indices: what the sampler drew, an index a row.
        held: the row ranges that ``batch`` holds, one after the other.
        batch: None where no rows are held.
        read: reads rows that turn out to be needed after all.
    """

    __slots__ = ("_read", "batch", "held", "indices")

    def __init__(self, indices: Sequence[Any], held: tuple[Rows, ...], batch: Any, read: Read) -> None:
        self.indices, self.held, self.batch, self._read = indices, held, batch, read

    @property
    def rows(self) -> int:
        """Rows of the whole batch."""
        return len(self.indices)

    @property
    def drawn(self) -> int:
        """A checksum of the indices, 0 where they are neither numbers nor strings."""
        if not all(isinstance(index, Integral | str) for index in self.indices):
            return 0
        return 1 + crc32(repr([str(index) for index in self.indices]).encode())

    def to(self, device: torch.device) -> PartialBatch:
        """The same on a device, as are rows that are read later. Lightning calls this for what it moves."""

        def read(indices: Sequence[Any]) -> Any:
            return move_data_to_device(self._read(indices), device)

        return PartialBatch(self.indices, self.held, move_data_to_device(self.batch, device), read)

    def covering(self, needed: tuple[Rows, ...]) -> PartialBatch:
        """This one where it holds the rows that are needed, else another one, read now."""
        if all(any(a <= first and last <= b for a, b in self.held) for first, last in needed):
            return self
        return PartialBatch(self.indices, needed, self._read(_picked(self.indices, needed)), self._read)

    def whole(self) -> Any:
        """The batch with all of its rows."""
        return self.covering(((0, self.rows),)).batch

    def __iter__(self) -> Iterator[torch.Tensor]:
        """A tensor as long as the whole batch: what Lightning finds where it guesses the batch size."""
        yield torch.empty(self.rows, 0)

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(
            f"this rank has read only rows {list(self.held)} of {self.rows}, those that its operators need; "
            "a hook of the LightningModule that sees batches (on_train_batch_start) has all ranks read all"
        )


def _picked(indices: Sequence[Any], held: tuple[Rows, ...]) -> list[Any]:
    return [indices[row] for first, last in held for row in range(first, last)]


@dataclass(slots=True)
class DrawGuard:
    """Sees to it that reading and collating draw no random numbers, in the process that reads."""

    _before: Any = None

    def start(self) -> None:
        """Called before a batch is read."""
        self._before = shared_generators()

    def check(self, what: str) -> None:
        """Called after.

        Raises:
            ValueError: the generators have moved.
        """
        if shared_generators() != self._before:
            raise ValueError(
                f"{what} drew random numbers for some rows, though not for those that were tried before "
                "training, and ranks that read other rows would draw others: give SpindleStrategy("
                "row_loading=False), or each row a generator of its own, seeded by its index"
            )


@dataclass(slots=True)
class _Rows:
    """A batch sampler that gives of each batch only the indices of needed rows.

    Asked as often, and at the same times, as the loader's own would be. ``pulled`` has whole batches'
    indices and the held rows, in the order of batches. ``least`` rows at the start are held where none are
    needed.
    """

    sampler: Any
    guard: DrawGuard
    least: int
    needs: Needs | None = None
    pulled: deque[tuple[list[Any], tuple[Rows, ...]]] = field(default_factory=deque)

    def __iter__(self) -> Iterator[list[Any]]:
        assert self.needs is not None
        self.pulled = deque()
        for batch in self.sampler:
            indices = list(batch)
            held = self.needs(len(indices)) or ((0, self.least),) * min(self.least, len(indices))
            self.pulled.append((indices, held))
            self.guard.start()
            yield _picked(indices, held)


@dataclass(frozen=True, slots=True)
class _Starting:
    """The user's ``worker_init_fn``, after which the worker's draws are watched."""

    init: Callable[[int], None] | None
    guard: DrawGuard

    def __call__(self, worker: int) -> None:
        if self.init is not None:
            self.init(worker)
        self.guard.start()


@dataclass(frozen=True, slots=True)
class _Collating:
    """The loader's collate function; no rows are None."""

    collate: Callable[[list[Any]], Any]
    guard: DrawGuard
    what: str

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate(samples) if samples else None
        self.guard.check(self.what)
        return batch


class RowReader:
    """Iterates over a loader's batches, of which it reads only the rows that are needed.

    Args:
        loader: a plain DataLoader with a batch sampler.
        convert: what Lightning does to a batch before it is moved (the precision plugin's).
    """

    def __init__(self, loader: DataLoader[Any], convert: Callable[[Any], Any]) -> None:
        guard = DrawGuard()
        self._read = row_read(loader, convert)
        self._convert = convert
        # A dataset that reads samples together may not expect to be asked for none.
        least = 1 if hasattr(loader.dataset, "__getitems__") else 0
        self._rows = _Rows(loader.batch_sampler, guard, least)
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self._rows,
            num_workers=loader.num_workers,
            collate_fn=_Collating(loader.collate_fn, guard, _what(loader)),
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=_Starting(loader.worker_init_fn, guard),
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device,
        )

    def batches(self, needs: Needs) -> Iterator[PartialBatch]:
        """An epoch; draws from generators when the loader itself would."""
        self._rows.needs = needs
        return map(self._partial, iter(self._loader))

    def _partial(self, batch: Any) -> PartialBatch:
        indices, held = self._rows.pulled.popleft()
        return PartialBatch(indices, held, self._convert(batch) if held else None, self._read)


def row_read(loader: DataLoader[Any], convert: Callable[[Any], Any] = lambda batch: batch) -> Read:
    """Reads samples of a loader in this process, as its fetching does."""

    def read(indices: Sequence[Any]) -> Any:
        return convert(loader.collate_fn(read_samples(loader.dataset, indices)))

    return read


def read_samples(dataset: Any, indices: Sequence[Any]) -> list[Any]:
    """Samples as a DataLoader fetches them."""
    together = getattr(dataset, "__getitems__", None)
    return list(together(list(indices))) if together else [dataset[index] for index in indices]


def _what(loader: DataLoader[Any]) -> str:
    collate = getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__)
    return f"{type(loader.dataset).__name__} with {collate}"


def whole_because(
    loader: Any, samples: list[Any], batch: Any, indices: Sequence[int], asked: bool | None
) -> str | None:
    """Why batches of a loader have to be read whole; None where rows can be read alone.

    Args:
        samples: those of ``indices``, from which ``batch`` was collated without a draw.
        asked: ``SpindleStrategy``'s ``row_loading``.
    """
    if asked is False:
        return "row_loading=False"
    if asked is None and loader.collate_fn is not default_collate:
        return "its collate function is the user's"
    if type(loader) is not DataLoader or not loader.in_order:
        return "only a plain torch DataLoader that gives batches in order can read rows alone"
    layout = batch_layout(batch, loader.collate_fn, samples)
    leaves, _ = flatten(batch, layout.lists)
    backwards = list(reversed(range(len(samples))))
    again = read_samples(loader.dataset, [indices[row] for row in backwards])
    together = "its collate function does not treat each row by itself (it may pad to the longest)"
    trials = [([row], [sample], together) for row, sample in enumerate(samples)]
    trials.append((backwards, [samples[row] for row in backwards], together))
    trials.append(
        (backwards, again, "a sample that is read again is another one: reading draws, or keeps count")
    )
    for rows, given, reason in trials:
        try:
            found, spec = flatten(loader.collate_fn(given), layout.lists)
            alike = spec == layout.spec and _alike(found, pick_rows(leaves, layout, rows))
        except Exception as e:
            return f"its collate function fails on some rows of a batch ({type(e).__name__}: {e})"
        if not alike:
            return reason
    return None


def _alike(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(_same, ours, theirs))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return _alike(a, b)
    return type(a) is type(b) and (a is b or bool(a == b))
