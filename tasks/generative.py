"""Tasks that write text: each token is predicted from those before it.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor

from tasks.encoders import length_mask
from tasks.optimizers import AdamWSchedule

IGNORED = -100
START = 0
"""The token ahead of a text. It is also the padding, of which nothing is predicted."""


Mean = Callable[[Tensor, Tensor], Tensor]
"""The sum of this process's losses and how many there are → the mean of all that count."""


def own_mean(total: Tensor, count: Tensor) -> Tensor:
    """Of the losses as they are."""
    return total / count


def shifted(tokens: Tensor) -> Tensor:
    """[B, T] → [B, T]: the last token that has been read when each is written."""
    return F.pad(tokens[:, :-1], (1, 0), value=START)


def token_mean(logits: Tensor, tokens: Tensor, lengths: Tensor, mean: Mean = own_mean) -> Tensor:
    """The mean cross-entropy over all real tokens of the batch: rows with more tokens count more.

    Args:
        logits: [B, T, V].
        tokens: [B, T], padded.
        lengths: [B], how many tokens of each row are real.
        mean: over which tokens.
    """
    labels = tokens.masked_fill(~length_mask(tokens, lengths), IGNORED)
    # The tokens' losses stay with the logits, on any number of devices; only their mean needs all rows.
    each = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return mean(each.sum(), lengths.sum())


class GenerativeTask(LightningModule):
    """Writes a text; subclasses say how. Logs ``loss`` in training.

    ``mean`` says over which tokens: those of the batch, unless it is replaced (under plain data parallelism a
    process has a shard of the batch only, see ``tasks.global_batch``).

    Args:
        optimization: how to train.
    """

    def __init__(self, optimization: AdamWSchedule) -> None:
        super().__init__()
        self.optimization = optimization
        self.mean: Mean = own_mean

    def predict(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, T, V] of the tokens [B, T] to be written, these, and their lengths [B]."""
        raise NotImplementedError

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean loss of the batch's tokens."""
        loss = token_mean(*self.predict(batch), self.mean)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW with warm-up and cosine."""
        return self.optimization.configure(self.parameters())
