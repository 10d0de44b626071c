"""What the three datamodules have in common: samples of a class beside a description of that class."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from datamodules.text import Descriptions, Tokenizer


class DescribedSamples(Dataset):
    """Pairs of a sample and a description. Which wording a sample has depends on its index alone.

    Items: ``(sample float32, description, label)``.
    """

    def __init__(self, samples: Sequence[Tensor], labels: Tensor, descriptions: Descriptions) -> None:
        self.samples, self.labels, self.descriptions = samples, labels.tolist(), descriptions

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, str, int]:
        label = self.labels[index]
        return self.samples[index], self.descriptions.of_sample(label, index), label


class DescribedDataModule(LightningDataModule):
    """A training and a held-out split of described samples. The held-out split serves validation and test.

    Batches are dicts: the modality (subclasses say how it is collated), ``text`` [B, words] int64 padded to
    the longest of the batch, ``text_length`` [B] int64, ``label`` [B] int64.

    Args:
        batch_size: rows of a training batch.
        eval_batch_size: rows of a held-out batch.
        num_workers: worker processes of each loader.
    """

    modality: str
    descriptions: Descriptions

    def __init__(self, batch_size: int, eval_batch_size: int = 128, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.eval_batch_size, self.num_workers = batch_size, eval_batch_size, num_workers
        self.tokenizer = Tokenizer()
        self._splits: tuple[DescribedSamples, DescribedSamples] | None = None

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.descriptions.names)

    def class_prompts(self) -> tuple[Tensor, Tensor]:
        """The zero-shot prompts: token ids [classes, words] and lengths [classes]."""
        return self.tokenizer(self.descriptions.prompts())

    def read(self) -> tuple[tuple[Sequence[Tensor], Tensor], tuple[Sequence[Tensor], Tensor]]:
        """(samples, labels) for training, and held out."""
        raise NotImplementedError

    def collate_samples(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """The modality's entries of a batch."""
        return {self.modality: torch.stack(samples)}

    def collate(self, items: list[tuple[Tensor, str, int]]) -> dict[str, Tensor]:
        """Items as a batch."""
        samples, texts, labels = zip(*items, strict=True)
        tokens, lengths = self.tokenizer(texts)
        modality = self.collate_samples(list(samples))
        return {**modality, "text": tokens, "text_length": lengths, "label": torch.tensor(labels)}

    def setup(self, stage: str) -> None:
        """Read the data, once."""
        if self._splits is None:
            train, held_out = self.read()
            self._splits = (
                DescribedSamples(*train, self.descriptions),
                DescribedSamples(*held_out, self.descriptions),
            )

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled; the last batch of an epoch may be smaller."""
        return self._loader(0, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """The held-out split in order."""
        return self._loader(1, self.eval_batch_size, shuffle=False)

    def test_dataloader(self) -> DataLoader[Any]:
        """The held-out split in order."""
        return self._loader(1, self.eval_batch_size, shuffle=False)

    def _loader(self, split: int, batch_size: int, shuffle: bool) -> DataLoader[Any]:
        assert self._splits is not None, "setup() comes first"
        return DataLoader(
            self._splits[split],
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            collate_fn=self.collate,
        )
