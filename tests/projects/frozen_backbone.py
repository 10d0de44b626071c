"""A project as its author wrote it: three heads on a backbone that came trained, and metrics everywhere.

One LightningModule whose batches are a dict of the tasks', with torchmetrics collections for each task.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, KINDS, TAGS = 12, 4, 5


class Backbone(nn.Module):
    """Convolutions with BatchNorm and Dropout, as image models have."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(self.stage(i, o) for i, o in [(3, 8), (8, WIDTH), (WIDTH, WIDTH)]))
        self.dropout = nn.Dropout(0.3)

    @staticmethod
    def stage(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.stages(x)).mean((2, 3))


def pretrained() -> Backbone:
    """With the statistics of some images, as from a checkpoint."""
    backbone = Backbone()
    with torch.no_grad():
        for _ in range(5):
            backbone(torch.randn(16, 3, 6, 6) + 0.5)
    return backbone


class LitHeads(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = pretrained()
        self.backbone.requires_grad_(False)
        self.backbone.eval()
        self.neck = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU())
        self.heads = nn.ModuleDict(
            {"kind": nn.Linear(16, KINDS), "tags": nn.Linear(16, TAGS), "size": nn.Linear(16, 1)}
        )
        metrics = {
            "kind": torchmetrics.MetricCollection(
                {
                    "acc": torchmetrics.classification.MulticlassAccuracy(KINDS, average="micro"),
                    "f1": torchmetrics.classification.MulticlassF1Score(KINDS),
                    "auroc": torchmetrics.classification.MulticlassAUROC(KINDS),
                }
            ),
            "tags": torchmetrics.MetricCollection(
                {
                    "acc": torchmetrics.classification.MultilabelAccuracy(TAGS),
                    "map": torchmetrics.classification.MultilabelAveragePrecision(TAGS),
                }
            ),
            "size": torchmetrics.MetricCollection(
                {"mae": torchmetrics.MeanAbsoluteError(), "r2": torchmetrics.R2Score()}
            ),
        }
        self.train_metrics = nn.ModuleDict({t: m.clone(prefix=f"train/{t}_") for t, m in metrics.items()})
        self.val_metrics = nn.ModuleDict({t: m.clone(prefix=f"val/{t}_") for t, m in metrics.items()})
        self.tasks = list(metrics)

    def forward(self, task: str, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(x)
        return self.heads[task](self.neck(features))

    def loss(self, task: str, output: Tensor, target: Tensor) -> Tensor:
        if task == "kind":
            return F.cross_entropy(output, target)
        if task == "tags":
            return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))
        return F.smooth_l1_loss(output.squeeze(-1), target)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        losses = []
        for task in self.tasks:
            x, target = batch[task]
            output = self(task, x)
            losses.append(self.loss(task, output, target))
            self.train_metrics[task].update(output.squeeze(-1) if task == "size" else output, target)
            self.log(f"train/{task}_loss", losses[-1])
            self.log_dict(self.train_metrics[task], on_step=False, on_epoch=True)
        total = torch.stack(losses).sum()
        self.log("train/loss", total, prog_bar=True)
        return total

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        task = self.tasks[dataloader_idx]
        x, target = batch
        output = self(task, x)
        self.val_metrics[task].update(output.squeeze(-1) if task == "size" else output, target)
        self.log(f"val/{task}_loss", self.loss(task, output, target), add_dataloader_idx=False)
        self.log_dict(self.val_metrics[task], on_epoch=True, add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.01)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3),
        }


class Pictures(L.LightningDataModule):
    """Three tasks on random pictures whose brightness decides their targets."""

    def dataset(self, task: str, rows: int, seed: int) -> TensorDataset:
        draw = torch.Generator().manual_seed(seed)
        light = torch.rand(rows, generator=draw)
        x = torch.randn(rows, 3, 6, 6, generator=draw) + 2 * light[:, None, None, None]
        targets = {
            "kind": (light * KINDS).long(),
            "tags": (light[:, None] + 0.3 * torch.randn(rows, TAGS, generator=draw) > 0.5).long(),
            "size": light,
        }
        return TensorDataset(x, targets[task])

    def train_dataloader(self) -> dict[str, DataLoader[Any]]:
        sizes = {"kind": (14, 8), "tags": (17, 6), "size": (9, 4)}
        return {
            task: DataLoader(self.dataset(task, rows, at), batch, shuffle=True)
            for at, (task, (rows, batch)) in enumerate(sizes.items())
        }

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [DataLoader(self.dataset(t, 7, 10 + at), 4) for at, t in enumerate(["kind", "tags", "size"])]


def model() -> LitHeads:
    torch.manual_seed(0)
    return LitHeads()


def data() -> Pictures:
    return Pictures()
