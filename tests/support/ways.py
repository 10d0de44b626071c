"""Projects that give one LightningModule to the Trainer: batches of several tasks in a dict, or of one."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from tests.support import toys

WIDTH, CLASSES = toys.WIDTH, toys.CLASSES


class Shared(LightningModule):
    """Two tasks with one encoder: classes of sequences, and a number for each; the loss is a fixed sum."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = toys.Encoder(5, 2, dropout)
        self.classes, self.number = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def losses(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = batch["a"], batch["b"]
        loss_a = F.cross_entropy(self.classes(self.encoder(a["x"], a["length"])), a["label"])
        number = self.number(self.encoder(b["x"], b["length"])).squeeze(-1)
        return loss_a, F.mse_loss(number, b["label"].to(number.dtype))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss_a, loss_b = self.losses(batch)
        loss = loss_a + 0.5 * loss_b
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("loss_a", loss_a, on_epoch=True, batch_size=batch["a"]["x"].size(0))
        self.log_dict({"root_b": loss_b.sqrt(), "product": loss_a * loss_b}, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class Weighted(Shared):
    """The losses meet under learned weights (C51), which the step logs and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.tensor([0.1, -0.2]))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, torch.Tensor]:
        losses = torch.stack(self.losses(batch))
        loss = (torch.exp(-self.log_variances) * losses + self.log_variances).sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("weight", self.log_variances[0])
        return {"loss": loss, "first": losses[0]}


class Tempered(Weighted):
    """A loss weight that scales one task's logits too: the task's ranks and the total add to its gradient."""

    def losses(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = batch["a"], batch["b"]
        logits = self.classes(self.encoder(a["x"], a["length"])) * self.log_variances[0].exp()
        number = self.number(self.encoder(b["x"], b["length"])).squeeze(-1)
        return F.cross_entropy(logits, a["label"]), number.square().mean()


class Ended(Shared):
    """Does without a task whose loader has ended."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        total: Any = 0
        for key, own in batch.items():
            if own is None:
                continue
            features = self.encoder(own["x"], own["length"])
            if key == "a":
                part = F.cross_entropy(self.classes(features), own["label"])
            else:
                part = self.number(features).square().mean()
            self.log(f"loss_{key}", part, on_epoch=True)
            total += part
        self.log("loss", total, on_step=True, on_epoch=True)
        return total


class Mixed(Shared):
    """Features of both tasks meet row by row: the step cannot be cut."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        a, b = (self.encoder(own["x"], own["length"]) for own in (batch["a"], batch["b"]))
        loss = self.number(torch.cat([a, b])).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Alone(LightningModule):
    """One task whose batches are tuples; validates on two loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([toys.Block(), toys.Block()])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Sequence[torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        if dataloader_idx == 0:
            self.accuracy.update(logits, y)
            self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class SharedData(LightningDataModule):
    """Loaders of unlike batch sizes, in a dict; the last batches are smaller."""

    def __init__(self, mode: str | None = None) -> None:
        super().__init__()
        self.mode = mode

    def train_dataloader(self) -> Any:
        loaders = {
            name: DataLoader(toys.Sequences(size, 5, seed), rows, shuffle=True, collate_fn=toys.collate)
            for name, size, rows, seed in (("a", 13, 6, 1), ("b", 14, 4, 2))
        }
        return loaders if self.mode is None else CombinedLoader(loaders, self.mode)


class AloneData(LightningDataModule):
    def __init__(self, validation: int = 2) -> None:
        super().__init__()
        self.validation = validation

    def _loader(self, size: int, rows: int, seed: int, **options: Any) -> DataLoader[Any]:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(size, WIDTH, generator=draw)
        return DataLoader(
            TensorDataset(x, torch.randint(0, CLASSES, (size,), generator=draw)), rows, **options
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(17, 5, 1, shuffle=True)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [self._loader(7 + i, 4, 2 + i) for i in range(self.validation)]
