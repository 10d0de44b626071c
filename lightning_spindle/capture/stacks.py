"""Torch's stacks of layers, layer by layer: their own ``forward`` looks for fast paths first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def _encoder_layers(
    stack: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    """``nn.TransformerEncoder.forward`` layer by layer (its own looks for a nested-tensor path)."""
    for layer in stack.layers:
        src = layer(src, src_mask=mask, is_causal=bool(is_causal), src_key_padding_mask=src_key_padding_mask)
    return src if stack.norm is None else stack.norm(src)


def _decoder_layers(
    stack: nn.TransformerDecoder,
    tgt: Any,
    memory: Any,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> Any:
    """``nn.TransformerDecoder.forward`` layer by layer."""
    for layer in stack.layers:
        tgt = layer(
            tgt,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=bool(tgt_is_causal),
            memory_is_causal=memory_is_causal,
        )
    return tgt if stack.norm is None else stack.norm(tgt)


LAYER_STACKS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.TransformerEncoder: _encoder_layers,
    nn.TransformerDecoder: _decoder_layers,
}
