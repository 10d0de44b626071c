"""Generated samples of given shapes: for workloads whose sizes matter and whose data do not.

Shapes: B rows, T entries of a row, padded where rows have unlike lengths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningDataModule
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

Batch = dict[str, Tensor]


class Field(Protocol):
    """One entry of a sample."""

    def sample(self, generator: Generator) -> Tensor:
        """One row's value."""

    def collated(self, name: str, values: Sequence[Tensor]) -> Batch:
        """Rows' values as a batch's entries."""

    def largest(self, name: str, rows: int, device: str) -> Batch:
        """A batch's entries where all rows have the greatest length, with any values."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Normal values of one shape: ``name`` [B, *shape] float32."""

    shape: tuple[int, ...]

    def sample(self, generator: Generator) -> Tensor:
        """See ``Field``."""
        return torch.randn(self.shape, generator=generator)

    def collated(self, name: str, values: Sequence[Tensor]) -> Batch:
        """See ``Field``."""
        return {name: torch.stack(list(values))}

    def largest(self, name: str, rows: int, device: str) -> Batch:
        """See ``Field``."""
        return {name: torch.empty(rows, *self.shape, device=device)}


@dataclass(frozen=True, slots=True)
class Frames:
    """Series of normal values: ``name`` [B, T, channels] float32 and ``name_length`` [B] int64.

    Lengths are drawn from ``shortest`` to ``longest``; T is the longest of the batch.
    """

    channels: int
    shortest: int
    longest: int

    def sample(self, generator: Generator) -> Tensor:
        """See ``Field``."""
        return torch.randn(
            _length(self.shortest, self.longest, generator), self.channels, generator=generator
        )

    def collated(self, name: str, values: Sequence[Tensor]) -> Batch:
        """See ``Field``."""
        return _padded(name, values)

    def largest(self, name: str, rows: int, device: str) -> Batch:
        """See ``Field``."""
        values = torch.empty(rows, self.longest, self.channels, device=device)
        return {name: values, f"{name}_length": _lengths(rows, device)}


@dataclass(frozen=True, slots=True)
class Tokens:
    """Texts: ``name`` [B, T] int64 from 1 up, padded with 0, and ``name_length`` [B] int64.

    Lengths are drawn from ``shortest`` to ``longest``. T is the longest of the batch; or, for a model that
    takes one size only (``fixed``), always ``longest``.
    """

    vocabulary: int
    shortest: int
    longest: int
    fixed: bool = False

    def sample(self, generator: Generator) -> Tensor:
        """See ``Field``."""
        length = _length(self.shortest, self.longest, generator)
        return torch.randint(1, self.vocabulary, (length,), generator=generator)

    def collated(self, name: str, values: Sequence[Tensor]) -> Batch:
        """See ``Field``."""
        batch = _padded(name, values)
        if self.fixed:
            missing = self.longest - batch[name].shape[1]
            batch[name] = torch.nn.functional.pad(batch[name], (0, missing))
        return batch

    def largest(self, name: str, rows: int, device: str) -> Batch:
        """See ``Field``."""
        tokens = torch.empty(rows, self.longest, dtype=torch.int64, device=device)
        return {name: tokens, f"{name}_length": _lengths(rows, device)}


def _length(shortest: int, longest: int, generator: Generator) -> int:
    return int(torch.randint(shortest, longest + 1, (), generator=generator))


def _padded(name: str, values: Sequence[Tensor]) -> Batch:
    lengths = torch.tensor([len(value) for value in values])
    return {name: pad_sequence(list(values), batch_first=True), f"{name}_length": lengths}


def _lengths(rows: int, device: str) -> Tensor:
    return torch.empty(rows, dtype=torch.int64, device=device)


class GeneratedSamples(Dataset[Batch]):
    """Sample i depends on the fields, the seed and i alone. Its ``label`` is i: no two are of a kind."""

    def __init__(self, fields: Mapping[str, Field], count: int, seed: int) -> None:
        self.fields, self.count, self.seed = fields, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        made = {name: field.sample(generator) for name, field in self.fields.items()}
        return made | {"label": torch.tensor(index)}


class Generated(LightningDataModule):
    """Training batches of generated samples, in a new order each epoch.

    Batches hold each field's entries, and ``label`` [B] int64.

    Args:
        fields: by name.
        batch_size: rows of a batch.
        samples: in an epoch; where it is no multiple of ``batch_size`` the last batch is smaller.
        seed: of the samples.
    """

    def __init__(self, fields: Mapping[str, Field], batch_size: int, samples: int, seed: int = 0) -> None:
        super().__init__()
        self.fields, self.batch_size = fields, batch_size
        self.samples = GeneratedSamples(fields, samples, seed)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled."""
        return DataLoader(self.samples, self.batch_size, shuffle=True, collate_fn=self.collate)

    def collate(self, items: Sequence[Batch]) -> Batch:
        """Samples as a batch."""
        batch: Batch = {}
        for name, field in self.fields.items():
            batch |= field.collated(name, [item[name] for item in items])
        return batch | {"label": torch.stack([item["label"] for item in items])}

    def largest_batch(self, device: str) -> Batch:
        """A batch in which every row has the greatest length, with any values: for the meta device."""
        batch: Batch = {}
        for name, field in self.fields.items():
            batch |= field.largest(name, self.batch_size, device)
        return batch | {"label": _lengths(self.batch_size, device)}
