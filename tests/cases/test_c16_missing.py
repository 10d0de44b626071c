"""C16: a modality that is there in some batches only is refused, never taken for what it was at first."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_spindle import MultiTaskDataModule, MultiTaskModule
from tests.strategy.ending import assert_all_ended, watch_fit
from tests.support import toys


class Optional(toys.Task):
    """Uses an image where there is one."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.text, self.image = nn.Linear(4, 2), nn.Linear(3, 2)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        x = self.text(batch["text"])
        if batch["image"] is not None:
            x = x + self.image(batch["image"])
        return x.square().mean()


class Pictures(LightningDataModule):
    """Batches of four rows; ``pattern`` says which have the image."""

    def __init__(self, pattern: Sequence[bool]) -> None:
        super().__init__()
        self.pattern = pattern

    def train_dataloader(self) -> DataLoader[Any]:
        def collate(indices: list[int]) -> dict[str, Any]:
            there = self.pattern[indices[0] // 4]
            text = torch.arange(4.0 * len(indices)).reshape(-1, 4)
            return {"text": text, "image": torch.ones(len(indices), 3) if there else None}

        return DataLoader(range(4 * len(self.pattern)), 4, collate_fn=collate)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "now", "before"),
    [((True, True, False), "None", "tensor"), ((False, False, True), "tensor", "None")],
)
def test_leaf_that_comes_or_goes_is_refused(pattern: tuple[bool, ...], now: str, before: str) -> None:
    outcomes = watch_fit(
        2,
        lambda rank: MultiTaskModule({"pictures": Optional()}),
        lambda rank: MultiTaskDataModule({"pictures": Pictures(pattern)}),
    )
    assert_all_ended(outcomes, "task pictures", rf"\['image'\] is a {now} here and was a {before}")
