"""Fits of real libraries' models: two ranks equal one process, step by step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from lightning_spindle import MultiTaskDataModule, MultiTaskModule
from lightning_spindle.capture import CaptureWarning
from tests.support.fitting import assert_same_fit, metagraph_of, plain_fit, spindle_fit
from tests.support.library import MODELS, WIDTH, Classify
from tests.support.library_fits import Batches, BatchesOfBoth, OneModule, both_fits


def assert_parity(**names: str) -> None:
    """Three steps of the models as tasks, spread over two ranks."""
    ours, reference = both_fits(**names)
    assert_same_fit(ours, reference)


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


def test_one_module_over_a_dict_of_batches() -> None:
    """Bert and ViT in one LightningModule: no module falls back."""

    def model() -> OneModule:
        torch.manual_seed(0)
        return OneModule()

    reference = plain_fit(model, BatchesOfBoth, max_steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        assert_same_fit(spindle_fit(model, BatchesOfBoth, 2, max_steps=3), reference)
