"""Pre-norm transformer blocks: encoders, causal ones, and decoders that read a memory.

Shapes: B rows, T positions, S positions of a memory, D width, H heads. Nothing here branches on a tensor or a
shape, so that a trace of a training step holds for every batch.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a stack of blocks.

    Args:
        layers: how many blocks.
        width: D, a multiple of ``heads``.
        heads: H.
        mlp_ratio: hidden width of the MLPs over D.
    """

    layers: int
    width: int
    heads: int
    mlp_ratio: float = 4.0

    def narrow(self) -> "Shape":
        """As many layers, as narrow as all kinds of blocks can be."""
        return replace(self, width=4, heads=2, mlp_ratio=1.0)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of [B, T, D] to [B, S, D], by heads → [B, T, D].

    ``mask`` [B, S] is True where a key is real (None: everywhere); ``causal``: position t sees none after t.
    """
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if mask is None else mask[:, None, None, :],
        dropout_p=dropout,
        is_causal=causal,
    )
    return mixed.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Attention of positions to each other.

    Args:
        width: D, a multiple of ``heads``.
        heads: H.
        dropout: on attention weights.
        causal: see ``attend``; masks are for attention that is not.
        bias_token: one learned key and value more, which every position sees.
    """

    def __init__(
        self, width: int, heads: int, dropout: float = 0.0, causal: bool = False, bias_token: bool = False
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of {heads} heads")
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.bias_token = nn.Parameter(torch.zeros(2, 1, width)) if bias_token else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, T, D] → [B, T, D]; ``mask`` [B, T] is True where a position is real (None: everywhere)."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        if self.bias_token is not None:
            key, value = (
                torch.cat([own, extra.expand(len(x), -1, -1)], dim=1)
                for own, extra in zip((key, value), self.bias_token, strict=True)
            )
            mask = None if mask is None else F.pad(mask, (0, 1), value=True)
        dropout = self.dropout if self.training else 0.0
        return self.out(attend(query, key, value, self.heads, mask, self.causal, dropout))


class CrossAttention(nn.Module):
    """Attention of positions to a memory.

    Args:
        width: D of positions and memory, a multiple of ``heads``.
        heads: H.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of {heads} heads")
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, T, D], [B, S, D] → [B, T, D]; ``mask`` [B, S] is True where the memory is real."""
        key, value = self.key_value(memory).chunk(2, dim=-1)
        return self.out(attend(self.query(x), key, value, self.heads, mask))


def mlp(width: int, ratio: float) -> nn.Sequential:
    """Two layers with a hidden width of ``ratio`` · D, rounded."""
    hidden = round(ratio * width)
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Block(nn.Module):
    """Attention over the valid positions, then an MLP, both residual.

    Args:
        width: D, a multiple of ``heads``.
        heads: H.
        mlp_ratio: hidden width of the MLP over D.
        dropout: on attention weights and on both residual branches.
        causal: see ``attend``.
        bias_token: see ``Attention``.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_ratio: float = 4,
        dropout: float = 0.0,
        causal: bool = False,
        bias_token: bool = False,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, causal, bias_token)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp(width, mlp_ratio)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, T, D] → [B, T, D]; ``mask`` [B, T] is True where a position is real (None: everywhere)."""
        x = x + self.drop(self.attention(self.attention_norm(x), mask))
        return x + self.drop(self.mlp(self.mlp_norm(x)))


class DecoderBlock(nn.Module):
    """Causal attention, attention to a memory, then an MLP, all residual.

    Padding is at the end of a row, where no real position sees it.

    Args:
        width: D, a multiple of ``heads``.
        heads: H.
        mlp_ratio: hidden width of the MLP over D.
    """

    def __init__(self, width: int, heads: int, mlp_ratio: float = 4) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=True)
        self.memory_norm = nn.LayerNorm(width)
        self.memory_attention = CrossAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp(width, mlp_ratio)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, T, D], [B, S, D] → [B, T, D]; ``mask`` [B, S] is True where the memory is real."""
        x = x + self.attention(self.attention_norm(x))
        x = x + self.memory_attention(self.memory_norm(x), memory, mask)
        return x + self.mlp(self.mlp_norm(x))


class TransformerEncoder(nn.Module):
    """Learned positions, ``layers`` equal blocks and a final norm.

    Args:
        length: the most positions a row may have.
        width: D.
        layers: how many blocks.
        heads: H.
        mlp_ratio: hidden width of the MLPs over D.
        dropout: of the blocks.
        causal: see ``attend``.
        bias_token: see ``Attention``.
    """

    # 0.02, as usual for large models, learns slowly or not at all at these sizes.
    POSITION_SPREAD = 0.3

    def __init__(
        self,
        length: int,
        width: int,
        layers: int,
        heads: int,
        mlp_ratio: float = 4,
        dropout: float = 0.0,
        causal: bool = False,
        bias_token: bool = False,
    ) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(length, width) * self.POSITION_SPREAD)
        self.blocks = nn.ModuleList(
            [Block(width, heads, mlp_ratio, dropout, causal, bias_token) for _ in range(layers)]
        )
        self.norm = nn.LayerNorm(width)

    @classmethod
    def of(
        cls, shape: Shape, length: int, causal: bool = False, bias_token: bool = False
    ) -> "TransformerEncoder":
        """One of a shape, over at most ``length`` positions."""
        return cls(length, shape.width, shape.layers, shape.heads, shape.mlp_ratio, 0.0, causal, bias_token)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, T, D] → [B, T, D]; ``mask`` [B, T] is True where a position is real (None: everywhere)."""
        x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


class TransformerDecoder(nn.Module):
    """Learned positions, equal decoder blocks and a final norm.

    Args:
        shape: of the blocks.
        length: the most positions a row may have.
    """

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(length, shape.width) * TransformerEncoder.POSITION_SPREAD)
        self.blocks = nn.ModuleList(
            [DecoderBlock(shape.width, shape.heads, shape.mlp_ratio) for _ in range(shape.layers)]
        )
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, T, D], [B, S, D] → [B, T, D]; ``mask`` [B, S] is True where the memory is real."""
        x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x, memory, mask)
        return self.norm(x)
