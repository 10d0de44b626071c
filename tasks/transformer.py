"""Pre-norm transformer encoder blocks.

Shapes: B rows, T positions, D width, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention over the valid positions, then an MLP, both residual.

    Args:
        width: D, a multiple of ``heads``.
        heads: H.
        mlp_ratio: hidden width of the MLP over D.
        dropout: on attention weights and on both residual branches.
    """

    def __init__(self, width: int, heads: int, mlp_ratio: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of {heads} heads")
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_ratio * width), nn.GELU(), nn.Linear(mlp_ratio * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, T, D] → [B, T, D]; ``mask`` [B, T] is True where a position is real (None: everywhere)."""
        x = x + self.drop(self._attention(self.attention_norm(x), mask))
        return x + self.drop(self.mlp(self.mlp_norm(x)))

    def _attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if mask is None else mask[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class TransformerEncoder(nn.Module):
    """Learned positions, ``layers`` equal blocks and a final norm.

    Args:
        length: the most positions a row may have.
        width: D.
        layers: how many blocks.
        heads: H.
        mlp_ratio: hidden width of the MLPs over D.
        dropout: of the blocks.
    """

    # 0.02, as usual for large models, learns slowly or not at all at these sizes.
    POSITION_SPREAD = 0.3

    def __init__(
        self, length: int, width: int, layers: int, heads: int, mlp_ratio: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(length, width) * self.POSITION_SPREAD)
        self.blocks = nn.ModuleList([Block(width, heads, mlp_ratio, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, T, D] → [B, T, D]; ``mask`` [B, T] is True where a position is real (None: everywhere)."""
        x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)
