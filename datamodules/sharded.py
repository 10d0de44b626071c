"""Each process's rows of the global batches, for data parallelism: the batches of one process, cut."""

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Sampler

from datamodules.described import DescribedDataModule


def shard(batch: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Rows [r·B/n, (r+1)·B/n), rounded down, of a batch's B: every row on one rank, in order.

    Raises:
        ValueError: for fewer rows than ranks, which would leave a rank without any.
    """
    rows = len(batch)
    if rows < ranks:
        raise ValueError(f"a batch of {rows} rows cannot be shared by {ranks} processes")
    return list(batch[rank * rows // ranks : (rank + 1) * rows // ranks])


class ShardedBatches(Sampler[list[int]]):
    """This rank's rows of each batch of another batch sampler.

    With equal random state every rank draws the same global batches as one process would.
    """

    def __init__(self, batches: Any, rank: int, ranks: int) -> None:
        self.batches, self.rank, self.ranks = batches, rank, ranks

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            yield shard(batch, self.rank, self.ranks)

    def __len__(self) -> int:
        return len(self.batches)


class Sharded(LightningDataModule):
    """The training data of another datamodule, each process with its shard of every batch.

    For a Trainer with ``use_distributed_sampler=False``: another sampler would change the global batches.
    """

    def __init__(self, whole: DescribedDataModule) -> None:
        super().__init__()
        self.whole = whole

    def setup(self, stage: str) -> None:
        """Forward ``setup``."""
        self.whole.setup(stage)

    def train_dataloader(self) -> DataLoader[Any]:
        """The whole loader's batches, cut."""
        loader = self.whole.train_dataloader()
        return DataLoader(
            loader.dataset,
            batch_sampler=ShardedBatches(
                loader.batch_sampler, self.trainer.global_rank, self.trainer.world_size
            ),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
        )
