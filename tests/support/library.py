"""Tiny models of the libraries that people use, made from a configuration: nothing is downloaded.

Legend: B rows, T tokens. Each batch has "y": a class for each row.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LAYERS, VOCABULARY, CLASSES = 16, 3, 40, 3
Batch = dict[str, Any]


class Classify(LightningModule):
    """``encode(encoder, batch)`` gives [B, features], a head the classes."""

    def __init__(self, encoder: Any, encode: Callable[..., Tensor], features: int = WIDTH) -> None:
        super().__init__()
        self.encoder, self.encode = encoder, encode
        self.head = nn.Linear(features, CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(self.encode(self.encoder, batch)), batch["y"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@dataclass(frozen=True)
class Model:
    """``make()`` gives the encoder, ``batch(rows, length)`` a batch for ``encode``.

    ``blocks``: repeated layers, each of which has to be an operator. ``lengths``: whether
    batches can have another length.
    """

    make: Callable[[], nn.Module]
    encode: Callable[[Any, Batch], Tensor]
    batch: Callable[[int, int], Batch]
    blocks: int = LAYERS
    lengths: bool = True
    needs: tuple[str, ...] = ("transformers",)

    def task(self) -> Classify:
        """The model in a task of its own; skips the test where its library is missing."""
        require(*self.needs)
        return Classify(self.make(), self.encode)


def require(*libraries: str) -> None:
    """Skip the test where one of the libraries is missing."""
    if not find_libraries(*libraries):
        pytest.skip(f"needs {' and '.join(libraries)}, which `make setup` installs")


def find_libraries(*names: str) -> bool:
    """Whether all of them are installed."""
    return all(importlib.util.find_spec(name) is not None for name in names)


# ------------------------------------------------------------------------------------------ batches
def draw(rows: int, length: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * rows + length)


def labels(rows: int, length: int) -> Tensor:
    return torch.randint(CLASSES, (rows,), generator=draw(rows, length))


def text(rows: int, length: int) -> Batch:
    """Token ids [B, T], and a mask [B, T] with padding in most rows."""
    ids = torch.randint(2, VOCABULARY, (rows, length), generator=draw(rows, length))
    lengths = 2 + torch.arange(rows) % (length - 1)
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"ids": ids, "mask": mask, "y": labels(rows, length)}


def images(rows: int, length: int) -> Batch:
    """[B, 3, 8, 8]."""
    pixels = torch.randn(rows, 3, 8, 8, generator=draw(rows, length), dtype=torch.float64)
    return {"pixels": pixels, "y": labels(rows, length)}


def pairs(rows: int, length: int) -> Batch:
    return text(rows, length) | images(rows, length)


def spectra(rows: int, length: int) -> Batch:
    """Mel spectra [B, 8 bins, 20 frames]."""
    mel = torch.randn(rows, 8, 20, generator=draw(rows, length), dtype=torch.float64)
    return {"mel": mel, "y": labels(rows, length)}


def sequences(rows: int, length: int) -> Batch:
    """[B, T, width] with a mask, and a memory [B, T + 1, width]."""
    at = draw(rows, length)
    x = torch.randn(rows, length, WIDTH, generator=at, dtype=torch.float64)
    memory = torch.randn(rows, length + 1, WIDTH, generator=at, dtype=torch.float64)
    return {"x": x, "memory": memory, "mask": text(rows, length)["mask"], "y": labels(rows, length)}


# ------------------------------------------------------------------------------------------ transformers
def sizes(**options: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 32,
    } | options  # fmt: skip


def bert_config(dropout: float = 0.0, **options: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        **sizes(vocab_size=VOCABULARY, max_position_embeddings=32),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **options,
    )


def bert(dropout: float = 0.0, **options: Any) -> Any:
    from transformers import BertModel

    return BertModel(bert_config(dropout, **options))


def bert_checkpointed() -> nn.Module:
    model = bert()
    model.activation_checkpointing_enable()
    return model


def bert_classifier() -> nn.Module:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(bert_config(num_labels=WIDTH))


def vit(dropout: float = 0.0) -> Any:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        **sizes(image_size=8, patch_size=4), hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    return ViTModel(config)


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    words = sizes(
        vocab_size=VOCABULARY, max_position_embeddings=32, projection_dim=WIDTH,
        pad_token_id=0, bos_token_id=1, eos_token_id=VOCABULARY - 1,
    )  # fmt: skip
    sight = sizes(image_size=8, patch_size=4, projection_dim=WIDTH)
    return CLIPModel(CLIPConfig(text_config=words, vision_config=sight, projection_dim=WIDTH))


def t5(name: str = "T5EncoderModel") -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=32,
        num_layers=LAYERS,
        num_heads=2,
        dropout_rate=0.0,
    )
    return getattr(transformers, name)(config)


def whisper() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=LAYERS, encoder_attention_heads=2,
        encoder_ffn_dim=32, num_mel_bins=8, max_source_positions=10, dropout=0.0, decoder_layers=1,
        decoder_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperEncoder(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=2, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return GPT2Model(config)


# ------------------------------------------------------------------------------------------ timm
def timm_vit() -> nn.Module:
    return vision_transformers().VisionTransformer(
        img_size=8, patch_size=4, embed_dim=WIDTH, depth=LAYERS, num_heads=2, num_classes=0
    )


def vision_transformers() -> Any:
    """``timm.models.vision_transformer``; what comes along gets stand-ins for torchvision."""
    names = (
        "torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.ops",
        "torchvision.ops.misc", "torchvision.datasets", "torchvision.models",
        "torchvision.models.feature_extraction",
    )  # fmt: skip
    before = {name: sys.modules.get(name) for name in names}
    try:
        if "timm" not in sys.modules:
            sys.modules.update({name: _Stub(name) for name in names})
        from timm.models import vision_transformer
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
    return vision_transformer


class _Stub(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


# ------------------------------------------------------------------------------------------ torch
def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    return nn.ModuleDict({"stem": nn.Linear(WIDTH, WIDTH), "body": body})


def torch_decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
    return nn.ModuleDict({"stem": nn.Linear(WIDTH, WIDTH), "body": nn.TransformerDecoder(layer, LAYERS)})


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


def convolutions() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    blocks = nn.Sequential(*(Residual() for _ in range(LAYERS)))
    return nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, WIDTH))


# ------------------------------------------------------------------------------------------ all of them
def _hidden(model: Any, batch: Batch) -> Tensor:
    output = model(input_ids=batch["ids"], attention_mask=batch["mask"], output_hidden_states=True)
    return output.hidden_states[1][:, 0] + output.last_hidden_state.mean(1)


def _clip(model: Any, batch: Batch) -> Tensor:
    output = model(input_ids=batch["ids"], pixel_values=batch["pixels"], attention_mask=batch["mask"])
    return output.text_embeds * output.image_embeds


def _translate(model: Any, batch: Batch) -> Tensor:
    ids, mask = batch["ids"], batch["mask"]
    output = model(ids, mask, decoder_input_ids=ids.flip(1)[:, 1:], use_cache=False)
    return output.last_hidden_state.mean(1)


def _of_text(key: str, **options: Any) -> Callable[[Any, Batch], Tensor]:
    """The output's entry ``key``, a mean over tokens where it has them."""

    def encode(model: Any, batch: Batch) -> Tensor:
        given = {k: batch[v] for k, v in options.items() if isinstance(v, str)}
        plain = {k: v for k, v in options.items() if not isinstance(v, str)}
        output = getattr(model(input_ids=batch["ids"], attention_mask=batch["mask"], **given, **plain), key)
        return output if output.dim() == 2 else output.mean(1)

    return encode


MODELS: dict[str, Model] = {
    "BertModel": Model(bert, _of_text("pooler_output"), text),
    "BertModel, no mask": Model(bert, lambda m, b: m(b["ids"]).last_hidden_state[:, 0], text),
    "BertModel, return_dict=False": Model(
        bert, lambda m, b: m(b["ids"], attention_mask=b["mask"], return_dict=False)[1], text
    ),
    "BertModel, eager attention": Model(
        lambda: bert(attn_implementation="eager"), _of_text("last_hidden_state"), text
    ),
    "BertModel, output_hidden_states": Model(bert, _hidden, text),
    "BertModel, checkpointed": Model(bert_checkpointed, _of_text("last_hidden_state"), text),
    "BertForSequenceClassification, labels": Model(bert_classifier, _of_text("logits", labels="y"), text),
    "ViTModel": Model(vit, lambda m, b: m(b["pixels"]).last_hidden_state[:, 0], images, lengths=False),
    "CLIPModel": Model(clip, _clip, pairs, blocks=2 * LAYERS),
    "T5EncoderModel": Model(t5, _of_text("last_hidden_state"), text),
    "T5Model, use_cache=False": Model(lambda: t5("T5Model"), _translate, text, blocks=2 * LAYERS),
    "WhisperEncoder": Model(
        whisper, lambda m, b: m(b["mel"]).last_hidden_state.mean(1), spectra, lengths=False
    ),
    "GPT2Model, use_cache=False": Model(gpt2, _of_text("last_hidden_state", use_cache=False), text),
    "timm VisionTransformer": Model(
        timm_vit, lambda m, b: m(b["pixels"]), images, lengths=False, needs=("timm", "transformers")
    ),
    "nn.TransformerEncoder": Model(
        torch_encoder,
        lambda m, b: m["body"](m["stem"](b["x"]), src_key_padding_mask=b["mask"] == 0).mean(1),
        sequences,
        needs=(),
    ),
    "nn.TransformerDecoder": Model(
        torch_decoder, lambda m, b: m["body"](m["stem"](b["x"]), b["memory"]).mean(1), sequences, needs=()
    ),
    "convolutions with BatchNorm": Model(
        convolutions, lambda m, b: m(b["pixels"]), images, LAYERS + 1, lengths=False, needs=()
    ),
}
WHOLE = ("convolutions with BatchNorm",)
"""Models whose layers run on whole batches."""
