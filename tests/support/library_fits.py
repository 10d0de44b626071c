"""Fits of ``library.MODELS``: their data, and plans that spread their operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_spindle import MultiTaskDataModule, MultiTaskModule
from lightning_spindle.graph import MetaGraph
from lightning_spindle.plan import ExecutionPlan
from tests.support import library
from tests.support.fitting import Fit, metagraph_of, placed, plain_fit, spindle_fit
from tests.support.library import MODELS, Batch


class Batches(LightningDataModule):
    """Batches of 6, 5 and 3 rows, of lengths 6, 4 and 7 where the model takes unlike lengths."""

    def __init__(self, of: library.Model) -> None:
        super().__init__()
        self.of = of

    def train_dataloader(self) -> DataLoader[Any]:
        rows = (6, 5, 3)
        lengths = (6, 4, 7) if self.of.lengths else (6, 6, 6)
        samples = [s for r, n in zip(rows, lengths, strict=True) for s in split(self.of.batch(r, n), r)]
        batches = [list(range(6)), list(range(6, 11)), list(range(11, 14))]
        return DataLoader(samples, batch_sampler=batches, collate_fn=padded)  # type: ignore[arg-type]


def split(batch: Batch, rows: int) -> list[Batch]:
    """Samples, in torch's usual types: Lightning makes them the model's."""
    given = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    return [{k: v[i] for k, v in given.items()} for i in range(rows)]


def padded(samples: Sequence[Batch]) -> Batch:
    """To the longest of the batch, with zeros: also in the masks."""
    return {
        k: pad_sequence([s[k] for s in samples], batch_first=True)
        if samples[0][k].dim()
        else torch.stack([s[k] for s in samples])
        for k in samples[0]
    }


def model_of(**names: str) -> MultiTaskModule:
    torch.manual_seed(0)
    return MultiTaskModule({task: MODELS[name].task() for task, name in names.items()})


def data_of(**names: str) -> MultiTaskDataModule:
    return MultiTaskDataModule({task: Batches(MODELS[name]) for task, name in names.items()})


def spread(graph: MetaGraph, devices: int) -> ExecutionPlan:
    """Every third MetaOp over all devices, the others on one each, in turn."""
    at = {m.name: i for i, m in enumerate(graph.metaops)}
    everywhere = tuple(reversed(range(devices)))
    return placed(graph, devices, lambda name: (at[name] % devices,) if at[name] % 3 else everywhere)


def both_fits(devices: int = 2, **names: str) -> tuple[list[Fit], Fit]:
    """Three steps of the models as tasks, under ``spread`` and in one process."""

    def model() -> MultiTaskModule:
        return model_of(**names)

    def data() -> MultiTaskDataModule:
        return data_of(**names)

    strategy = {"plan": spread(metagraph_of(model(), data()), devices)}
    ours = spindle_fit(model, data, devices, strategy=strategy, max_steps=3)
    return ours, plain_fit(model, data, max_steps=3)


class OneModule(LightningModule):
    """A step over a dict of batches, as for a CombinedLoader: Bert and ViT, each with a head."""

    def __init__(self) -> None:
        super().__init__()
        names = {"text": "BertModel", "image": "ViTModel"}
        self.parts = nn.ModuleDict({key: MODELS[name].task() for key, name in names.items()})

    def training_step(self, batch: dict[str, Batch], batch_idx: int) -> torch.Tensor:
        losses = {}
        for key, task in self.parts.items():
            features = task.encode(task.encoder, batch[key])
            losses[key] = F.cross_entropy(task.head(features), batch[key]["y"])
        self.log_dict(losses, batch_size=len(batch["text"]["y"]))
        return losses["text"] + 0.5 * losses["image"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class BatchesOfBoth(LightningDataModule):
    def train_dataloader(self) -> Any:
        loaders = {"text": Batches(MODELS["BertModel"]), "image": Batches(MODELS["ViTModel"])}
        return CombinedLoader({k: d.train_dataloader() for k, d in loaders.items()}, "max_size_cycle")
