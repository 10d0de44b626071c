"""A project as its author wrote it: Hugging Face encoders in three tasks, with a text encoder that all share.

Nothing in it knows of Spindle but the two classes that hold tasks and their data together.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_spindle import MultiTaskDataModule, MultiTaskModule

WIDTH, VOCABULARY, CLASSES, PADDING = 16, 40, 3, 0


class TextEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertModel(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output = self.bert(input_ids=input_ids, attention_mask=attention_mask)
        mask = attention_mask.unsqueeze(-1)
        return (output.last_hidden_state * mask).sum(1) / mask.sum(1)


class ImageEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTModel

        config = ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=8,
            patch_size=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.vit = ViTModel(config, add_pooling_layer=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.vit(pixel_values=pixel_values).last_hidden_state[:, 0]


class Trained(LightningModule):
    """AdamW without weight decay on biases and norms, and a linear warm-up."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}], lr=2e-3
        )
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Sentiment(Trained):
    """Classes of texts."""

    def __init__(self, text: TextEncoder) -> None:
        super().__init__()
        self.text = text
        self.head = nn.Linear(WIDTH, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.text(batch["input_ids"], batch["attention_mask"]))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch), batch["label"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self(batch)
        self.accuracy(logits, batch["label"])
        self.log("val_loss", F.cross_entropy(logits, batch["label"]))
        self.log("val_accuracy", self.accuracy)


class Match(Trained):
    """Images and their captions."""

    def __init__(self, image: ImageEncoder, text: TextEncoder) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        images = F.normalize(self.image(batch["pixel_values"]), dim=-1)
        texts = F.normalize(self.text(batch["input_ids"], batch["attention_mask"]), dim=-1)
        logits = self.scale.exp() * images @ texts.T
        target = torch.arange(len(logits), device=self.device)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        self.log_dict({"train_loss": loss, "scale": self.scale}, on_epoch=True)
        return loss


class Recognise(Trained):
    """Classes of images."""

    def __init__(self, image: ImageEncoder) -> None:
        super().__init__()
        self.image = image
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(self.image(batch["pixel_values"])), batch["label"])
        self.log("train_loss", loss)
        return loss


class Pairs(Dataset[dict[str, Any]]):
    """Images with captions of unlike lengths; one class decides the look of both."""

    def __init__(self, size: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(CLASSES, (size,), generator=draw)
        self.images = torch.randn(size, 3, 8, 8, generator=draw) + self.labels[:, None, None, None]
        lengths = torch.randint(3, 9, (size,), generator=draw)
        self.captions = [
            torch.randint(1 + 12 * int(c), 13 + 12 * int(c), (int(n),), generator=draw)
            for c, n in zip(self.labels, lengths, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self.images[index], "ids": self.captions[index], "label": self.labels[index]}


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads captions to the longest of the batch."""
    ids = nn.utils.rnn.pad_sequence([s["ids"] for s in samples], batch_first=True, padding_value=PADDING)
    return {
        "pixel_values": torch.stack([s["pixel_values"] for s in samples]),
        "input_ids": ids,
        "attention_mask": (ids != PADDING).long(),
        "label": torch.stack([s["label"] for s in samples]),
    }


class Data(LightningDataModule):
    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        super().__init__()
        self.size, self.batch_size, self.seed = size, batch_size, seed

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Pairs(self.size, self.seed), self.batch_size, shuffle=True, collate_fn=collate)


class Validated(Data):
    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Pairs(7, self.seed + 1), 4, collate_fn=collate)


def model() -> MultiTaskModule:
    torch.manual_seed(0)
    text, image = TextEncoder(), ImageEncoder()
    return MultiTaskModule(
        {"sentiment": Sentiment(text), "match": Match(image, text), "recognise": Recognise(image)},
        weights={"match": 0.5},
    )


def data() -> MultiTaskDataModule:
    return MultiTaskDataModule(
        {"sentiment": Validated(14, 6, 10), "match": Data(13, 5, 20), "recognise": Data(9, 4, 30)}
    )
