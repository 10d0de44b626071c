"""A decoder-only language model that reads features of other modalities ahead of its text.

Shapes: B rows, P positions of features, T tokens, D width, H heads, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.transformer import Shape, attend


def rotated(x: Tensor, heads: int) -> Tensor:
    """[B, T, D] with each head's pairs of values turned by its position (rotary embedding)."""
    x = x.unflatten(-1, (heads, 2, -1))
    left, right = x.unbind(-2)
    half = left.shape[-1]
    rates = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None] * rates
    cosine, sine = angles.cos()[:, None, :], angles.sin()[:, None, :]
    turned = torch.stack([left * cosine - right * sine, left * sine + right * cosine], dim=-2)
    return turned.flatten(-3)


class GatedBlock(nn.Module):
    """Causal attention with rotary positions, then a gated MLP (SwiGLU), both residual, without biases.

    The query, key and value alone have biases, as in Qwen.

    Args:
        width: D, a multiple of 2 · ``heads``.
        heads: H.
        mlp_ratio: hidden width of the MLP over D.
    """

    def __init__(self, width: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width {width} is not an even multiple of {heads} heads")
        hidden = round(mlp_ratio * width)
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        query, key, value = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        query, key = rotated(query, self.heads), rotated(key, self.heads)
        x = x + self.out(attend(query, key, value, self.heads, causal=True))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class PrefixEmbedding(nn.Embedding):
    """Embeds tokens behind features: one layer, where the parts of a sequence meet."""

    def forward(self, tokens: Tensor, features: list[Tensor]) -> Tensor:
        """[B, T] and parts [B, p, D] of the features → [B, P + T, D]."""
        return torch.cat([*features, super().forward(tokens)], dim=1)


class LanguageModel(nn.Module):
    """Predicts each token from the features and the tokens before it. Embedding and head are not tied.

    Args:
        shape: of the blocks.
        vocabulary: V.
    """

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.embed = PrefixEmbedding(vocabulary, shape.width)
        self.blocks = nn.ModuleList(
            [GatedBlock(shape.width, shape.heads, shape.mlp_ratio) for _ in range(shape.layers)]
        )
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, features: list[Tensor], length: int) -> Tensor:
        """Logits [B, T, V] of the tokens [B, T] behind features of together ``length`` ≥ 1 positions.

        Padding is at the end of a row, where no real position sees it.
        """
        x = self.embed(tokens, features)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, length - 1 : -1])
