"""Fits of real libraries' models: two ranks equal one process, step by step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_spindle import MultiTaskDataModule, MultiTaskModule
from lightning_spindle.capture import CaptureWarning
from tests.support import library
from tests.support.fitting import assert_same_fit, metagraph_of, placed, plain_fit, spindle_fit
from tests.support.library import MODELS, WIDTH, Batch, Classify


class Batches(LightningDataModule):
    """Batches of 6, 5 and 3 rows, of lengths 6, 4 and 7 where the model takes unlike lengths."""

    def __init__(self, of: library.Model) -> None:
        super().__init__()
        self.of = of

    def train_dataloader(self) -> DataLoader[Any]:
        rows = (6, 5, 3)
        lengths = (6, 4, 7) if self.of.lengths else (6, 6, 6)
        samples = [s for r, n in zip(rows, lengths, strict=True) for s in split(self.of.batch(r, n), r)]
        batches = [list(range(0, 6)), list(range(6, 11)), list(range(11, 14))]
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


def assert_parity(devices: int = 2, **names: str) -> None:
    """Three steps with operators of each task spread over the ranks: each on another, then split over all."""

    def model() -> MultiTaskModule:
        return model_of(**names)

    def data() -> MultiTaskDataModule:
        return data_of(**names)

    graph = metagraph_of(model(), data())
    at = {m.name: i for i, m in enumerate(graph.metaops)}
    plan = placed(graph, devices, lambda name: (at[name] % devices,) if at[name] % 3 else (1, 0))
    reference = plain_fit(model, data, max_steps=3)
    assert_same_fit(spindle_fit(model, data, devices, strategy={"plan": plan}, max_steps=3), reference)


def test_c20_bert_with_and_without_a_mask_and_vit() -> None:
    assert_parity(masked="BertModel", plain="BertModel, no mask", images="ViTModel")


def test_clip_and_t5() -> None:
    assert_parity(pairs="CLIPModel", text="T5EncoderModel")


def test_whisper_and_timm() -> None:
    assert_parity(speech="WhisperEncoder", images="timm VisionTransformer")


def test_classifier_and_hidden_states() -> None:
    assert_parity(text="BertForSequenceClassification, labels", hidden="BertModel, output_hidden_states")


def test_torch_stacks_and_convolutions() -> None:
    assert_parity(
        text="nn.TransformerEncoder", pairs="nn.TransformerDecoder", images="convolutions with BatchNorm"
    )


class Choosing(nn.Module):
    """Goes by the values of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if x.sum() > 0 else self.right(x)


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.choosing = nn.Linear(WIDTH, WIDTH), Choosing()

    def forward(self, x: Tensor) -> Tensor:
        return self.choosing(self.stem(x)).mean(1)


def test_c20_a_module_that_branches_on_values() -> None:
    """One operator, one warning on each rank that names it; equal to one process."""
    of = MODELS["nn.TransformerEncoder"]

    def model() -> MultiTaskModule:
        torch.manual_seed(0)
        return MultiTaskModule({"t": Classify(Chosen(), lambda m, b: m(b["x"]))})

    def data() -> MultiTaskDataModule:
        return MultiTaskDataModule({"t": Batches(of)})

    reference = plain_fit(model, data, max_steps=3)
    with pytest.warns(CaptureWarning, match=r"module tasks\.t\.encoder\.choosing cannot be traced") as caught:
        metagraph_of(model(), data())
    assert len([w for w in caught if w.category is CaptureWarning]) == 1
    with warnings.catch_warnings(action="ignore", category=CaptureWarning):
        assert_same_fit(spindle_fit(model, data, 2, max_steps=3), reference)
