"""Small modules and tasks for tests of capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_spindle.module import MultiTaskModule

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), dropout
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), self.dropout, self.training)
        return x + self.down(hidden)


class Tower(nn.Module):
    """Rows of 5 tokens with 4 features each to one feature vector."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.position = nn.Parameter(torch.randn(5, WIDTH))
        self.blocks = nn.ModuleList([Block(dropout=dropout) for _ in range(layers)])
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.project(self.norm(x).mean(1)), dim=-1)


class Task(LightningModule):
    """``body`` gives features, ``loss(self, features, batch)`` the loss, which is logged."""

    def __init__(self, body: nn.Module, loss: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.body, self.loss_of = body, loss
        for name, part in parts.items():
            setattr(self, name, part)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(self, self.body(batch["x"]), batch)
        self.log("loss", loss, prog_bar=True)
        return loss


class Contrastive(LightningModule):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.logit_scale = nn.Parameter(torch.tensor(1.2))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        scale = self.logit_scale.exp()
        logits = self.first(batch["u"]) @ self.second(batch["v"]).T * scale
        target = torch.arange(len(logits), device=logits.device)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        self.log("loss", loss, batch_size=len(batch["u"]))
        self.log("scale", scale)
        return loss


def multitask(**tasks: LightningModule) -> MultiTaskModule:
    return MultiTaskModule(tasks).double()


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(*shape: int, classes: int = 3, seed: int = 0) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))
