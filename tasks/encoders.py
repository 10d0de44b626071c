"""Encoders of the modalities: embed, transform, take the mean over real positions, project.

Shapes: B rows, T positions, D width, E width of the common embedding. Nothing here branches on a tensor or a
shape, so that a trace of a training step holds for every batch.
"""

import torch
from torch import Tensor, nn

from tasks.transformer import TransformerEncoder


def length_mask(x: Tensor, lengths: Tensor) -> Tensor:
    """[B, T] True at the first ``lengths[b]`` positions of each row of ``x`` [B, T, …]."""
    return torch.arange(x.shape[1], device=x.device) < lengths[:, None]


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T, D] → [B, D], the mean over the positions where ``mask`` [B, T] is True."""
    return (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)


class ImageEncoder(nn.Module):
    """Square images cut into square patches, one position each.

    Args:
        transformer: for at least (size / patch)² positions of width D.
        width: D.
        embedding: E.
        size: pixels of a side.
        patch: pixels of a patch's side, a divisor of ``size``.
    """

    def __init__(
        self, transformer: TransformerEncoder, width: int, embedding: int, size: int = 8, patch: int = 2
    ) -> None:
        super().__init__()
        if size % patch:
            raise ValueError(f"images of side {size} cannot be cut into patches of side {patch}")
        self.patch, self.count = patch, size // patch
        self.embed = nn.Linear(patch * patch, width)
        self.transformer = transformer
        self.project = nn.Linear(width, embedding, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """[B, size, size] → [B, E]."""
        cut = images.unflatten(2, (self.count, self.patch)).unflatten(1, (self.count, self.patch))
        patches = cut.transpose(2, 3).flatten(3).flatten(1, 2)
        return self.project(self.transformer(self.embed(patches)).mean(1))


class FrameEncoder(nn.Module):
    """Series of frames, ``frames`` neighbours to a position.

    Args:
        transformer: for at least as many positions as the longest series has, of width D.
        width: D.
        embedding: E.
        channels: values of a frame.
        frames: frames to a position; with more than one, every series has a multiple of it and no padding.
    """

    def __init__(
        self, transformer: TransformerEncoder, width: int, embedding: int, channels: int, frames: int = 1
    ) -> None:
        super().__init__()
        self.frames = frames
        self.embed = nn.Linear(channels * frames, width)
        self.transformer = transformer
        self.project = nn.Linear(width, embedding, bias=False)

    def forward(self, series: Tensor, lengths: Tensor | None = None) -> Tensor:
        """[B, T·frames, channels] → [B, E]; ``lengths`` [B], in positions, where series are padded."""
        x = self.embed(series.unflatten(1, (-1, self.frames)).flatten(2))
        if lengths is None:
            return self.project(self.transformer(x).mean(1))
        mask = length_mask(x, lengths)
        return self.project(masked_mean(self.transformer(x, mask), mask))


class TextEncoder(nn.Module):
    """Token ids, padded.

    Args:
        transformer: for at least as many positions as the longest text has words, of width D.
        width: D.
        embedding: E.
        vocabulary: how many different ids there are.
    """

    def __init__(self, transformer: TransformerEncoder, width: int, embedding: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.transformer = transformer
        self.project = nn.Linear(width, embedding, bias=False)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """[B, T] int64 → [B, E]; ``lengths`` [B] int64."""
        x = self.embed(tokens)
        mask = length_mask(x, lengths)
        return self.project(masked_mean(self.transformer(x, mask), mask))
