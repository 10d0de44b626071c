"""Tasks that draw a sample and its description together, and samples and others' descriptions apart."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from tasks.encoders import FrameEncoder, ImageEncoder, TextEncoder
from tasks.optimizers import AdamWSchedule

Gather = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Samples [b, E], texts [b, E] and labels [b] of this process → those that are contrasted, [B, E] and [B]."""


def own_rows(samples: Tensor, texts: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows as they are."""
    return samples, texts, labels


def contrastive_loss(similarity: Tensor, labels: Tensor) -> Tensor:
    """Symmetric InfoNCE in which all pairs of one class are positives.

    Args:
        similarity: [B, B], samples by descriptions.
        labels: [B], the class of sample i and of description i.
    """
    same = (labels[:, None] == labels[None, :]).type_as(similarity)
    targets = same / same.sum(1, keepdim=True)
    return 0.5 * (F.cross_entropy(similarity, targets) + F.cross_entropy(similarity.t(), targets))


class Contrastive(LightningModule):
    """Two embeddings of each sample, which are drawn together; those of different samples apart.

    Subclasses say how a batch is embedded. Logs ``loss`` in training. ``gather`` says which rows are
    contrasted: those of the batch, unless it is replaced (under plain data parallelism a process has a shard
    of the batch only, see ``tasks.global_batch``).

    Args:
        optimization: how to train.
        temperature: the initial one; learned, as the logarithm of its inverse.
    """

    def __init__(self, optimization: AdamWSchedule, temperature: float = 0.07) -> None:
        super().__init__()
        self.optimization = optimization
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(temperature)))
        self.gather: Gather = own_rows

    def embed_both(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Both embeddings of the batch's samples, [B, E] each."""
        raise NotImplementedError

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The contrastive loss over the whole batch; samples of one ``label`` [B] are of a kind."""
        first, second, labels = self.gather(*self.embed_both(batch), batch["label"])
        loss = contrastive_loss(self._similarity(first, second), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW with warm-up and cosine."""
        return self.optimization.configure(self.parameters())

    def _similarity(self, first: Tensor, second: Tensor) -> Tensor:
        """Scaled cosines, [B, others]."""
        return self.logit_scale.exp() * F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).t()


class ContrastiveTask(Contrastive):
    """One modality against text; subclasses say how a batch's samples are embedded.

    Logs ``accuracy`` (zero-shot, over the held-out prompts) in validation and test.

    Args:
        encoder: of the modality, to [B, E].
        text: of token ids, to [B, E]; usually shared with other tasks.
        prompts: token ids [classes, words] and lengths [classes] of the classes' zero-shot prompts.
        optimization: how to train.
        temperature: the initial one; learned, as the logarithm of its inverse.
    """

    def __init__(
        self,
        encoder: nn.Module,
        text: TextEncoder,
        prompts: tuple[Tensor, Tensor],
        optimization: AdamWSchedule,
        temperature: float = 0.07,
    ) -> None:
        super().__init__(optimization, temperature)
        self.encoder, self.text = encoder, text
        self.register_buffer("prompts", prompts[0], persistent=False)
        self.register_buffer("prompt_lengths", prompts[1], persistent=False)
        self.accuracy = MulticlassAccuracy(len(prompts[0]), average="micro")

    def embed(self, batch: dict[str, Tensor]) -> Tensor:
        """The batch's samples, [B, E]."""
        raise NotImplementedError

    def embed_both(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The samples and their descriptions."""
        texts = self.text(batch["text"], batch["text_length"])
        return self.embed(batch), texts

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Which prompt is nearest to each sample."""
        prompts = self.text(self.prompts, self.prompt_lengths)
        self.accuracy.update(self._similarity(self.embed(batch), prompts), batch["label"])
        self.log("accuracy", self.accuracy, on_epoch=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """As in validation."""
        self.validation_step(batch, batch_idx)


class ImageText(ContrastiveTask):
    """``image`` [B, size, size]."""

    encoder: ImageEncoder

    def embed(self, batch: dict[str, Tensor]) -> Tensor:
        """The images' embeddings."""
        return self.encoder(batch["image"])


class AudioText(ContrastiveTask):
    """``audio`` [B, frames, channels], padded, and ``audio_length`` [B]."""

    encoder: FrameEncoder

    def embed(self, batch: dict[str, Tensor]) -> Tensor:
        """The recordings' embeddings."""
        return self.encoder(batch["audio"], batch["audio_length"])


class MotionText(ContrastiveTask):
    """``motion`` [B, frames, channels]."""

    encoder: FrameEncoder

    def embed(self, batch: dict[str, Tensor]) -> Tensor:
        """The recordings' embeddings."""
        return self.encoder(batch["motion"])
