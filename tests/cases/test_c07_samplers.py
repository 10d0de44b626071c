"""C07: every task's own loader, sampler and order, whatever ranks feed it."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from lightning_spindle import MultiTaskDataModule, SpindleStrategy
from lightning_spindle.plan import ExecutionPlan
from tests.support.fitting import fit_once
from tests.support.ranks import run_ranks, watch_ranks
from tests.support.small import Layer, Part, Sample, Small, metagraph, multi, placement

SIZES = {"a": 13, "b": 10}


class Ids(Dataset[Sample]):
    """Items that are their own index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return {"id": torch.tensor([float(index)])}


class Shuffled(Sampler[int]):
    """A user's sampler that shuffles with Python's own generator, and differently when told the epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epochs = size, [-1]

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        random.shuffle(order)
        return iter(order[self.epochs[-1] % 2 :] + order[: self.epochs[-1] % 2])


class IdData(LightningDataModule):
    """``kind``: "shuffle", "own" (``Shuffled``), "generator" (an own generator), "rank" (a mistake)."""

    def __init__(self, size: int, batch_size: int, kind: str, workers: int) -> None:
        super().__init__()
        self.size, self.batch_size, self.kind, self.workers = size, batch_size, kind, workers

    def train_dataloader(self) -> DataLoader[Any]:
        data, options = Ids(self.size), {"batch_size": self.batch_size, "num_workers": self.workers}
        if self.kind == "own":
            return DataLoader(data, sampler=Shuffled(self.size), **options)
        if self.kind == "generator":
            generator = torch.Generator().manual_seed(11)
            return DataLoader(data, sampler=RandomSampler(data, generator=generator), **options)
        if self.kind == "rank":
            generator = torch.Generator().manual_seed(self.trainer.global_rank)
            return DataLoader(data, shuffle=True, generator=generator, **options)
        return DataLoader(data, shuffle=True, **options)


class Reads(Small):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Layer(1, 2), Layer(2, 1)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        return self.head(self.body(batch["id"])).mean()


class Seen(Callback):
    """By task and epoch, the rows of each batch that this rank's shard of the task's first operator got."""

    def __init__(self) -> None:
        self.rows: dict[str, list[list[list[float]]]] = {name: [] for name in SIZES}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for name, task in module.tasks.items():
            task.body.register_forward_pre_hook(
                lambda _, args, name=name: self.rows[name][-1].append(args[0].flatten().tolist())
            )

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        for rows in self.rows.values():
            rows.append([])


def model() -> Any:
    torch.manual_seed(0)
    return multi({name: Reads() for name in SIZES})


def data(kind: str, workers: int = 0) -> MultiTaskDataModule:
    return MultiTaskDataModule(
        {"a": IdData(SIZES["a"], 4, kind, workers), "b": IdData(SIZES["b"], 3, kind, workers)}, "min_size"
    )


def consumed(kind: str, workers: int, plan: ExecutionPlan | None) -> list[Any]:
    """``Seen.rows`` by rank; of one plain process where there is no plan."""

    def rank(index: int, size: int) -> Any:
        seen = Seen()
        strategy = SpindleStrategy(plan=plan, operators=(Part,), timeline=False) if plan else "auto"
        options = {"max_epochs": 2, "max_steps": -1, "callbacks": [seen]}
        fit_once(model, lambda: data(kind, workers), strategy, size, **options)
        return seen.rows

    return run_ranks(rank, plan.devices if plan else 1, init_group=plan is not None)


@pytest.mark.parametrize(("kind", "workers"), [("shuffle", 0), ("shuffle", 1), ("own", 0), ("generator", 0)])
def test_c07_each_sample_once_an_epoch(kind: str, workers: int) -> None:
    """A on rank 0, B on ranks 1 to 3; 13 and 10 items, two epochs: ONCE, as one process draws them."""
    plan = placement(metagraph(model(), data("shuffle")), 4, {"a/": (0,), "b/": (1, 2, 3)})
    ours, (reference,) = consumed(kind, workers, plan), consumed(kind, workers, None)
    assert [ours[r]["a"] for r in (1, 2, 3)] == [[[], []]] * 3
    assert ours[0]["b"] == [[], []]
    for epoch in range(2):
        assert ours[0]["a"][epoch] == reference["a"][epoch]
        batches = reference["b"][epoch]
        assert [len(batch) for batch in batches] == [3, 3, 3, 1]
        # A row a rank; the single row of the last batch is the last shard's.
        assert ours[1]["b"][epoch] == [batch[:1] for batch in batches[:3]]
        assert ours[2]["b"][epoch] == [batch[1:2] for batch in batches[:3]]
        assert ours[3]["b"][epoch] == [batch[-1:] for batch in batches]
        for name, size in SIZES.items():
            rows = [row for rank in ours for batch in rank[name][epoch] for row in batch]
            assert sorted(rows) == [float(i) for i in range(size)]
    assert ours[0]["a"][0] != ours[0]["a"][1]
    assert ours[3]["b"][0] != ours[3]["b"][1]


def test_c07_the_epoch_reaches_a_sampler() -> None:
    """``set_epoch`` of a nested sampler is called on every rank, also where its samples are not read."""
    plan = placement(metagraph(model(), data("own")), 2, {"a/": (0,), "b/": (1,)})

    def rank(index: int, size: int) -> Any:
        made: list[Any] = []

        def keep() -> Any:
            module = data("own")
            original = module.train_dataloader

            def loaders() -> Any:
                made.append(original())
                return made[-1]

            module.train_dataloader = loaders
            return module

        strategy = SpindleStrategy(plan=plan, operators=(Part,), timeline=False)
        fit_once(model, keep, strategy, size, max_epochs=2, max_steps=-1)
        return [[loader.sampler.epochs for loader in m.flattened] for m in made]

    for told in run_ranks(rank, 2):
        assert [-1, 0, 1] in [epochs for loaders in told for epochs in loaders]
        assert sum(epochs == [-1, 0, 1] for loaders in told for epochs in loaders) == 2


def test_c07_a_sampler_seeded_by_the_rank_is_refused() -> None:
    """Ranks of one group would train on rows of unlike batches: an error on all of them, before a step."""
    plan = placement(metagraph(model(), data("shuffle")), 2, {"a/": (0, 1), "b/": (0, 1)})

    def rank(index: int, size: int) -> None:
        strategy = SpindleStrategy(plan=plan, operators=(Part,), timeline=False)
        fit_once(model, lambda: data("rank"), strategy, size, max_steps=2)

    for outcome in watch_ranks(rank, 2, timeout_s=40, group_timeout_s=5):
        assert "ranks drew different batches" in (outcome.error or ""), outcome.describe()
