"""Japanese vowels spoken by nine men, with descriptions of the speaker."""

from collections.abc import Sequence

import torch
from torch import Tensor

from datamodules.described import DescribedDataModule
from datamodules.text import SPEAKERS
from datamodules.ts import dataset_file, read_ts, standardised


class Vowels(DescribedDataModule):
    """JapaneseVowels: 270 recordings for training, 370 held out, 7 to 29 frames of 12 cepstral coefficients.

    ``audio`` [B, frames, 12] float32, padded with 0 to the longest of the batch; ``audio_length`` [B] int64.
    """

    modality = "audio"
    descriptions = SPEAKERS

    def read(self) -> tuple[tuple[Sequence[Tensor], Tensor], tuple[Sequence[Tensor], Tensor]]:
        """Recordings and speakers of both splits."""
        train, train_labels = read_ts(dataset_file("JapaneseVowels", "TRAIN"))
        test, test_labels = read_ts(dataset_file("JapaneseVowels", "TEST"))
        train, test = standardised(train, test)
        return (train, train_labels), (test, test_labels)

    def collate_samples(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """Frames padded to the longest recording, and how many are real."""
        return {
            "audio": torch.nn.utils.rnn.pad_sequence(samples, batch_first=True),
            "audio_length": torch.tensor([len(sample) for sample in samples]),
        }
