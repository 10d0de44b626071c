"""Encoders of the modalities: embed, transform, and for one embedding a row also pool and project.

Shapes: B rows, T positions, D width, E width of the common embedding. Nothing here branches on a tensor or a
shape, so that a trace of a training step holds for every batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.transformer import CrossAttention, TransformerEncoder


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


class LastTokenEncoder(TextEncoder):
    """Token ids, padded; of a causal transformer, whose last real position has read the whole text."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """[B, T] int64 → [B, E]; ``lengths`` [B] int64, at least 1."""
        x = self.transformer(self.embed(tokens))
        return self.project(x.take_along_dim((lengths - 1)[:, None, None], dim=1).squeeze(1))


class Positions(nn.Module):
    """The outputs of a convolution of one to three dimensions, as positions.

    Args:
        convolution: of D outputs.
    """

    def __init__(self, convolution: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, …] → [B, T, D]."""
        return self.convolution(x).flatten(2).transpose(1, 2)


class SequenceEncoder(nn.Module):
    """A stem and a transformer over its positions.

    Args:
        stem: gives [B, T, D].
        transformer: for at least T positions of width D.
    """

    def __init__(self, stem: nn.Module, transformer: TransformerEncoder) -> None:
        super().__init__()
        self.stem, self.transformer = stem, transformer

    def forward(self, x: Tensor) -> Tensor:
        """A batch of the stem's inputs → [B, T, D]."""
        return self.transformer(self.stem(x))


class ClassTokenEncoder(SequenceEncoder):
    """The same with one learned token ahead, which becomes the embedding.

    Args:
        stem: gives [B, T, D].
        transformer: for at least T + 1 positions of width D.
        width: D.
        embedding: E.
    """

    def __init__(self, stem: nn.Module, transformer: TransformerEncoder, width: int, embedding: int) -> None:
        super().__init__(stem, transformer)
        self.token = nn.Parameter(torch.randn(1, width) * TransformerEncoder.POSITION_SPREAD)
        self.project = nn.Linear(width, embedding, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """A batch of the stem's inputs → [B, E]."""
        positions = self.stem(x)
        token = self.token.expand(len(x), -1, -1)
        return self.project(self.transformer(torch.cat([token, positions], dim=1))[:, 0])


class SpeechStem(nn.Module):
    """Two convolutions over time, the second with stride 2 (Whisper).

    Args:
        bands: of the spectrogram.
        width: D.
    """

    def __init__(self, bands: int, width: int) -> None:
        super().__init__()
        self.widen = nn.Conv1d(bands, width, 3, padding=1)
        self.halve = nn.Conv1d(width, width, 3, stride=2, padding=1)

    def forward(self, spectrogram: Tensor) -> Tensor:
        """[B, bands, frames] → [B, frames / 2, D]; an even number of frames."""
        return F.gelu(self.halve(F.gelu(self.widen(spectrogram)))).transpose(1, 2)


class FilterBankStem(nn.Module):
    """Two convolutions over time and bands with stride 2 each, then one layer over bands and channels.

    Args:
        bands: of the filter bank.
        width: D, also the number of channels.
    """

    def __init__(self, bands: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, stride=2)
        self.second = nn.Conv2d(width, width, 3, stride=2)
        self.mix = nn.Linear(width * self.positions(bands), width)

    @staticmethod
    def positions(frames: Any) -> Any:
        """How many of ``frames`` (or bands) are left: each sees seven, at a distance of four."""
        return ((frames - 1) // 2 - 1) // 2

    def forward(self, frames: Tensor) -> Tensor:
        """[B, T, bands] → [B, positions(T), D]."""
        x = F.gelu(self.second(F.gelu(self.first(frames[:, None]))))
        return self.mix(x.transpose(1, 2).flatten(2))


class Resampler(nn.Module):
    """Learned queries that read a sequence of any length.

    Args:
        count: of queries.
        inputs: width of the sequence.
        width: D.
        heads: of the attention.
    """

    def __init__(self, count: int, inputs: int, width: int, heads: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(count, width) * TransformerEncoder.POSITION_SPREAD)
        self.memory = nn.Linear(inputs, width, bias=False)
        self.memory_norm, self.query_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CrossAttention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, inputs] → [B, count, D]."""
        queries = self.query_norm(self.queries).expand(len(x), -1, -1)
        return self.project(self.norm(self.attention(queries, self.memory_norm(self.memory(x)))))
