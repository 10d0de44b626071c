"""Small multi-task projects as a user would write them, with data made from a seed."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_spindle import MultiTaskDataModule, MultiTaskModule

WIDTH = 8
CLASSES = 3


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Encoder(nn.Module):
    """Stem, equal blocks, masked mean over a sequence: [rows, length, features] to [rows, width]."""

    def __init__(self, features: int, blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(features, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(x.shape[1], device=x.device) < lengths[:, None]).unsqueeze(-1)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm((x * mask).sum(1) / lengths[:, None])


class Task(LightningModule):
    """Common to all: the optimizer, and a logged loss."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.optimizer_name = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class Contrast(Task):
    """Pairs of a modality and a text; the loss couples all rows of the batch."""

    def __init__(self, encoder: Encoder, text: Encoder, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.encoder, self.text = encoder, text
        self.logit_scale = nn.Parameter(torch.tensor(0.3))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        a = F.normalize(self.encoder(batch["x"], batch["length"]), dim=-1)
        b = F.normalize(self.text(batch["text"], batch["text_length"]), dim=-1)
        logits = self.logit_scale.exp() * a @ b.t()
        same = (batch["label"][:, None] == batch["label"][None, :]).to(logits.dtype)
        target = same / same.sum(1, keepdim=True)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("scale", self.logit_scale)
        return loss


class Classify(Task):
    """Classes of rows: a loss that is a mean over rows, and an accuracy in validation."""

    def __init__(self, encoder: Encoder, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.encoder = encoder
        self.head = nn.Linear(WIDTH, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def logits(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.head(self.encoder(batch["x"], batch["length"]))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.logits(batch)
        loss = F.cross_entropy(logits, batch["label"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("hit", (logits.argmax(-1) == batch["label"]).to(logits.dtype).mean(), on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        logits = self.logits(batch)
        self.accuracy.update(logits, batch["label"])
        self.log("val_loss", F.cross_entropy(logits, batch["label"]))
        self.log("accuracy", self.accuracy)

    test_step = validation_step


class Sequences(Dataset[dict[str, Any]]):
    """Sequences of unlike lengths; which item it is can be read from the item."""

    def __init__(self, size: int, features: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(2, 7, (size,), generator=draw)
        self.x = [torch.randn(int(n), features, generator=draw) for n in self.lengths]
        self.text_lengths = torch.randint(1, 5, (size,), generator=draw)
        self.text = [torch.randn(int(n), 4, generator=draw) for n in self.text_lengths]
        self.labels = torch.randint(0, CLASSES, (size,), generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "text": self.text[index], "label": self.labels[index], "index": index}


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads to the longest of the batch."""
    pad = nn.utils.rnn.pad_sequence
    return {
        "x": pad([s["x"] for s in samples], batch_first=True),
        "length": torch.tensor([len(s["x"]) for s in samples]),
        "text": pad([s["text"] for s in samples], batch_first=True),
        "text_length": torch.tensor([len(s["text"]) for s in samples]),
        "label": torch.stack([s["label"] for s in samples]),
        "index": torch.tensor([s["index"] for s in samples]),
    }


class Data(LightningDataModule):
    def __init__(self, size: int, batch_size: int, features: int, seed: int, workers: int = 0) -> None:
        super().__init__()
        self.train_set = Sequences(size, features, seed)
        self.val_set = Sequences(7, features, seed + 1)
        self.batch_size, self.workers = batch_size, workers

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            self.train_set, self.batch_size, shuffle=True, collate_fn=collate, num_workers=self.workers
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, 4, collate_fn=collate)

    test_dataloader = val_dataloader


def model(optimizer: str = "adamw", dropout: float = 0.0, seed: int = 0) -> MultiTaskModule:
    """Three tasks: two contrastive ones and a classification, all of which share the text encoder's width."""
    torch.manual_seed(seed)
    text = Encoder(4, 2, dropout)
    image = Encoder(5, 3, dropout)
    return MultiTaskModule(
        {
            "image_text": Contrast(image, text, optimizer),
            "audio_text": Contrast(Encoder(3, 2, dropout), text, optimizer),
            "image_class": Classify(image, optimizer),
        },
        weights={"audio_text": 0.5},
    )


def data(mode: str = "max_size_cycle", workers: int = 0) -> MultiTaskDataModule:
    """Batches of 6, 4 and 5 rows; the last of each epoch is smaller (1, 3 and 2 rows)."""
    return MultiTaskDataModule(
        {
            "image_text": Data(13, 6, 5, seed=10, workers=workers),
            "audio_text": Data(11, 4, 3, seed=20, workers=workers),
            "image_class": Data(12, 5, 5, seed=30, workers=workers),
        },
        mode,
    )
