"""Motions of a wrist, with descriptions of the activity."""

from collections.abc import Sequence

from torch import Tensor

from datamodules.described import DescribedDataModule
from datamodules.text import MOTIONS
from datamodules.ts import dataset_file, read_ts, standardised


class Motions(DescribedDataModule):
    """BasicMotions: 40 recordings for training, 40 held out.

    ``motion`` [B, 100, 6] float32, accelerometer and gyroscope.
    """

    modality = "motion"
    descriptions = MOTIONS

    def read(self) -> tuple[tuple[Sequence[Tensor], Tensor], tuple[Sequence[Tensor], Tensor]]:
        """Recordings and activities of both splits."""
        train, train_labels = read_ts(dataset_file("BasicMotions", "TRAIN"))
        test, test_labels = read_ts(dataset_file("BasicMotions", "TEST"))
        train, test = standardised(train, test)
        return (train, train_labels), (test, test_labels)
