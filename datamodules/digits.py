"""Handwritten digits with descriptions."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from datamodules.described import DescribedDataModule
from datamodules.text import DIGITS


class Digits(DescribedDataModule):
    """scikit-learn's digits: ``image`` [B, 8, 8] float32 in 0 to 1; 1437 for training, 360 held out.

    The split is stratified and the same in every process.
    """

    modality = "image"
    descriptions = DIGITS

    def read(self) -> tuple[tuple[Sequence[Tensor], Tensor], tuple[Sequence[Tensor], Tensor]]:
        """Images and labels of both splits."""
        from sklearn.datasets import load_digits  # 1 s; a process that only composes the model does without
        from sklearn.model_selection import train_test_split

        bunch = load_digits()
        rows = np.arange(len(bunch.target))
        splits = train_test_split(rows, test_size=360, random_state=0, stratify=bunch.target)
        images = torch.from_numpy(bunch.images).float() / 16
        labels = torch.from_numpy(bunch.target).long()
        train, held_out = ((images[rows], labels[rows]) for rows in map(torch.from_numpy, splits))
        return train, held_out
