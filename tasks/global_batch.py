"""Losses over a global batch whose rows are spread over data-parallel processes.

Only for systems that shard batches (DDP). Spindle's processes and a single one have whole batches.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from tasks.generative import GenerativeTask


def couple_globally(tasks: Mapping[str, LightningModule], rows: Mapping[str, int]) -> None:
    """Make contrastive tasks contrast the rows of all processes, and generative ones count all tokens.

    Args:
        tasks: by name.
        rows: task → the most rows that one process has of a batch.
    """
    for name, task in tasks.items():
        if isinstance(task, GenerativeTask):
            task.mean = global_mean
        else:
            task.gather = GlobalRows(rows[name])


def global_mean(total: Tensor, count: Tensor) -> Tensor:
    """The mean over all processes of losses of which each has a sum and a number.

    All processes get the same mean. The gradient of each one's sum is that of the mean, times the number of
    processes, so that the mean of their gradients, which DDP takes, is one process's gradient.
    """
    sums: Tensor = _Sums.apply(torch.stack([total, count.to(total)]))
    return sums[0] / sums[1].detach()


class _Sums(torch.autograd.Function):
    """Values of every process, added."""

    @staticmethod
    def forward(ctx, own: Tensor) -> Tensor:
        sums = own.clone()
        dist.all_reduce(sums)
        return sums

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * dist.get_world_size()


class GlobalRows:
    """Gathers samples, texts and labels of all processes, in the order of their ranks, in one collective.

    Every process then computes the same loss over the same rows, which is the loss of one process on the
    global batch. Its gradient reaches this process's rows alone, times the number of processes, so that the
    *mean* of the processes' gradients, which DDP takes, is one process's gradient. The backward therefore
    communicates nothing.

    Args:
        most_rows: no process has more; shards may have fewer, each its own number.
    """

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows

    def __call__(self, samples: Tensor, texts: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[b, E], [b, E], [b] → [B, E], [B, E], [B].

        Raises:
            ValueError: for more rows than ``most_rows``.
        """
        if len(samples) > self.most_rows:
            raise ValueError(
                f"a batch of {len(samples)} rows on one process; at most {self.most_rows} were said"
            )
        # Labels are small integers, exact in any floating type that trains.
        packed = torch.cat([samples, texts, labels[:, None].to(samples)], dim=1)
        everyone: Tensor = _AllRows.apply(packed, self.most_rows)
        samples, texts, label = everyone.split([samples.shape[1], texts.shape[1], 1], dim=1)
        return samples, texts, label.detach().squeeze(1).round().to(labels)


class _AllRows(torch.autograd.Function):
    """Rows [b, C] of every process → [B, C], in the order of the ranks."""

    @staticmethod
    def forward(ctx, own: Tensor, most_rows: int) -> Tensor:
        rows, columns = own.shape
        ranks, rank = dist.get_world_size(), dist.get_rank()
        # Shards differ in rows, a collective's tensors must not: pad; a first line says how many are real.
        padded = own.new_zeros(1 + most_rows, columns)
        padded[0, 0] = rows
        padded[1 : 1 + rows] = own
        parts = own.new_empty(ranks, 1 + most_rows, columns)
        dist.all_gather(list(parts.unbind()), padded)
        counts = [round(count) for count in parts[:, 0, 0].tolist()]
        ctx.start, ctx.rows, ctx.ranks = sum(counts[:rank]), rows, ranks
        return torch.cat([part[1 : 1 + count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return own_gradient(gradient, ctx.start, ctx.rows, ctx.ranks), None


def own_gradient(gradient: Tensor, start: int, rows: int, ranks: int) -> Tensor:
    """This process's rows of a gradient that all ``ranks`` have, to be averaged over them."""
    return gradient[start : start + rows] * ranks
