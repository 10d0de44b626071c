"""Row loading: each rank reads only the rows that its operators need, and trains as one process does."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_spindle import MultiTaskDataModule, MultiTaskModule, SpindleStrategy
from tests.support.fitting import Fit, assert_same_fit, fit_once, plain_fit
from tests.support.ranks import run_ranks, watch_ranks
from tests.support.small import (
    Layer,
    Part,
    Sample,
    Small,
    metagraph,
    multi,
    placement,
    random_samples,
    together,
)

SIZES = {"a": 13, "b": 10}
BATCHES = {"a": (4, 4, 4, 1), "b": (5, 5)}
"""Rows of the batches of an epoch; in one of four iterations the second task starts again."""
EPOCHS = {"max_epochs": 2, "max_steps": -1}

Groups = Mapping[str, tuple[int, ...]]


class Counted(Dataset[Sample]):
    """Samples, and the index of each reading in this process."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples, self.log = samples, list[int]()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        self.log.append(index)
        return self.samples[index]


class Data(LightningDataModule):
    """Shuffled samples; also counts what is read, from the first training batch on."""

    def __init__(self, name: str, kind: type[Counted] = Counted, **options: Any) -> None:
        super().__init__()
        self.data = kind(random_samples(SIZES[name], SIZES[name], x=(3,), y=(1,)))
        self.batch, self.options = BATCHES[name][0], options

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, self.batch, shuffle=True, **self.options)


class Clearing(Callback):
    """Forgets readings before training, those of the examples."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for child in trainer.datamodule.datamodules.values():
            child.data.log.clear()


class Regression(Small):
    """The body reads "x"; the head gets what the body gives, and reads "y"."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Layer(3, 4), Layer(4, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        loss = ((self.head(self.body(batch["x"])) - batch["y"]) ** 2).mean()
        self.log("loss", loss)
        return loss


def model() -> Any:
    torch.manual_seed(0)
    return multi({name: Regression() for name in SIZES}, "adamw")


def data(kind: type[Counted] = Counted, **options: Any) -> Any:
    return together(**{name: Data(name, kind, **options) for name in SIZES})


def in_batches(read: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """What one process read, batch by batch; the last round of a loader may have ended early."""
    batches, at = [], 0
    while at < len(read):
        size = sizes[len(batches) % len(sizes)]
        batches.append(list(read[at : at + size]))
        at += size
    return batches


def seen(groups: Groups, task: str, rank: int, rows: int) -> list[int]:
    """The rows that a rank sees of a task: shard i of n has rows [i*B//n, (i+1)*B//n)."""
    found: set[int] = set()
    for prefix, devices in groups.items():
        if prefix.startswith(f"{task}/") and rank in devices:
            i, n = devices.index(rank), len(devices)
            found |= set(range(i * rows // n, (i + 1) * rows // n))
    return sorted(found)


def reference(make: Callable[[], Any] = data, **options: Any) -> tuple[Fit, dict[str, list[int]]]:
    """The fit of one plain process, and what it read."""
    return counted(make, "auto", 1, **options)[0]


def counted(make: Callable[[], Any], strategy: Any, devices: int, **options: Any) -> list[Any]:
    """A fit and its readings by task, by rank. ``strategy`` holds SpindleStrategy's arguments."""

    def rank(index: int, size: int) -> Any:
        made = make()
        own = SpindleStrategy(operators=(Part,), **strategy) if isinstance(strategy, dict) else strategy
        fit = fit_once(model, lambda: made, own, size, callbacks=[Clearing()], **{**EPOCHS, **options})
        return fit, {name: child.data.log for name, child in made.datamodules.items()}

    return run_ranks(rank, devices, init_group=devices > 1)


def forced(groups: Groups, devices: int, make: Callable[[], Any] = data, **strategy: Any) -> list[Any]:
    plan = placement(metagraph(model(), make()), devices, groups)
    return counted(make, {"plan": plan, **strategy}, devices)


@pytest.fixture(scope="module")
def alone() -> tuple[Fit, dict[str, list[int]]]:
    return reference()


PLACEMENTS: list[Groups] = [
    {"a/": (0,), "b/": (0,)},
    {"a/body": (0, 1), "a/head": (1,), "b/": (0,)},
    # Rank 2 has the first half of b for its body and the last third for its head.
    {"a/": (0, 1, 2), "b/body": (2, 0), "b/head": (0, 1, 2)},
    {"a/body": (0,), "a/head": (1, 2, 3), "b/": (3, 1, 0, 2)},
]


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_each_rank_reads_only_its_rows(alone: Any, devices: int) -> None:
    """Of the very batches of one process (C07), in two epochs with ragged batches; all parameters agree."""
    groups = PLACEMENTS[devices - 1]
    fit, read = alone
    results = forced(groups, devices)
    for task in SIZES:
        batches = in_batches(read[task], BATCHES[task])
        assert len(batches) == 8
        for rank, (_, own) in enumerate(results):
            expected = [[batch[row] for row in seen(groups, task, rank, len(batch))] for batch in batches]
            assert own[task] == [index for batch in expected for index in batch], f"rank {rank}, {task}"
    assert_same_fit([ours for ours, _ in results], fit)


def test_rows_read_by_workers() -> None:
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    expected, _ = reference(lambda: data(**options))
    results = forced(PLACEMENTS[1], 2, lambda: data(**options))
    assert all(not own["a"] and not own["b"] for _, own in results), "training reads in workers only"
    assert_same_fit([ours for ours, _ in results], expected)


def stacked(samples: list[Sample]) -> Sample:
    """A collate function of the user's, which treats each row by itself."""
    return {name: value * 2 for name, value in default_collate(samples).items()}


def test_a_collate_function_of_ones_own() -> None:
    """Rows alone only on request; on request the reads are those under ``default_collate``."""
    groups = PLACEMENTS[1]
    fit, read = reference(lambda: data(collate_fn=stacked))
    asked = forced(groups, 2, lambda: data(collate_fn=stacked), row_loading=True)
    whole = forced(groups, 2, lambda: data(collate_fn=stacked))
    rows = [
        batch[row]
        for batch in in_batches(read["a"], BATCHES["a"])
        for row in seen(groups, "a", 0, len(batch))
    ]
    assert asked[0][1]["a"] == rows
    assert whole[0][1]["a"] == read["a"]
    assert_same_fit([ours for ours, _ in asked], fit)
    assert_same_fit([ours for ours, _ in whole], fit)


class Padded(Counted):
    """Samples of which one, which no example holds, has a longer "x"."""

    lengths: tuple[int, ...] = (3, 3, 3, 3, 3, 5, 3, 3, 3, 3, 3, 3, 3)

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        return {**sample, "x": torch.nn.functional.pad(sample["x"], (0, self.lengths[index] - 3))}


class Ragged(Padded):
    """Samples of which those of the examples are of unlike lengths."""

    lengths = (3, 4, 3, 5, 3, 5, 4, 3, 3, 5, 3, 3, 3)


def to_the_longest(samples: list[Sample]) -> Sample:
    longest = max(len(sample["x"]) for sample in samples)
    padded = [torch.nn.functional.pad(sample["x"], (0, longest - len(sample["x"]))) for sample in samples]
    return {"x": torch.stack(padded), "y": torch.stack([s["y"] for s in samples])}


class Sums(Small):
    """Takes rows of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Layer(1, 4), Layer(4, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        return ((self.head(self.body(batch["x"].cos().mean(1, keepdim=True))) - batch["y"]) ** 2).mean()


def sums() -> Any:
    torch.manual_seed(0)
    return multi({name: Sums() for name in SIZES})


def test_padding_is_found_before_training() -> None:
    """Rows alone would be padded to another length: whole batches are read, and a warning says so."""

    def make() -> Any:
        return data(Ragged, collate_fn=to_the_longest)

    plan = placement(metagraph(sums(), make()), 2, {"a/": (0, 1), "b/": (0, 1)})

    def rank(index: int, size: int) -> Fit:
        strategy = SpindleStrategy(plan=plan, operators=(Part,), row_loading=True, timeline=False)
        if index == 0:
            with pytest.warns(
                UserWarning, match="row_loading=True is not followed for a, .*pad to the longest"
            ):
                return fit_once(sums, make, strategy, size, **EPOCHS)
        return fit_once(sums, make, strategy, size, **EPOCHS)

    assert_same_fit(run_ranks(rank, 2), plain_fit(sums, make, **EPOCHS))


def test_padding_that_comes_later_is_an_error_on_every_rank() -> None:
    def make() -> Any:
        return data(Padded, collate_fn=to_the_longest)

    plan = placement(metagraph(sums(), make()), 2, {"a/": (0, 1), "b/": (0, 1)})

    def rank(index: int, size: int) -> None:
        strategy = SpindleStrategy(plan=plan, operators=(Part,), row_loading=True, timeline=False)
        fit_once(sums, make, strategy, size, **EPOCHS)

    for outcome in watch_ranks(rank, 2, timeout_s=40, group_timeout_s=5):
        assert "other shapes for other rows" in (outcome.error or ""), outcome.describe()


class Drawing(Counted):
    """Noise from the generator that samplers draw from."""

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] + 0.1 * torch.randn(3)}


class Remembering(Counted):
    """Each row is mixed with the row that was read before."""

    def __getitem__(self, index: int) -> Sample:
        before = self.samples[self.log[-1] if self.log else index]
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] + 0.1 * before["x"]}


class Sometimes(Counted):
    """Draws for one row, which no example holds."""

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] + 0.1 * random.random()} if index == 5 else sample


@pytest.mark.parametrize("kind", [Drawing, Remembering])
def test_rows_that_depend_on_what_else_is_read(kind: type[Counted]) -> None:
    """All batches are read whole, as by one process."""
    fit, read = reference(lambda: data(kind))
    results = forced(PLACEMENTS[1], 2, lambda: data(kind))
    assert all(own["a"] == read["a"] for _, own in results)
    assert_same_fit([ours for ours, _ in results], fit)


@pytest.mark.parametrize("workers", [0, 1])
def test_draws_that_come_later_are_an_error(workers: int) -> None:
    def make() -> Any:
        return data(Sometimes, num_workers=workers)

    plan = placement(metagraph(model(), make()), 2, {"a/": (0, 1), "b/": (0, 1)})

    def rank(index: int, size: int) -> None:
        fit_once(model, make, SpindleStrategy(plan=plan, operators=(Part,), timeline=False), size, **EPOCHS)

    outcomes = watch_ranks(rank, 2, timeout_s=40, group_timeout_s=5)
    assert any("Sometimes with default_collate drew" in (o.error or "") for o in outcomes), outcomes
    assert all(o.error for o in outcomes)


def test_data_that_differ_by_rank_are_refused() -> None:
    """Though the indices agree, and no rank reads another's rows."""
    plan = placement(metagraph(model(), data()), 2, {"a/": (0, 1), "b/": (0, 1)})

    def rank(index: int, size: int) -> None:
        made = data()
        for sample in made.datamodules["a"].data.samples:
            sample["x"] += index
        fit_once(
            model, lambda: made, SpindleStrategy(plan=plan, operators=(Part,), timeline=False), size, **EPOCHS
        )

    for outcome in watch_ranks(rank, 2, timeout_s=40, group_timeout_s=5):
        assert "task a: ranks drew different batches" in (outcome.error or ""), outcome.describe()


class Switching(Regression):
    """From the second epoch on the loss couples the rows of a batch, which one rank then sees whole."""

    def __init__(self) -> None:
        super().__init__()
        self.coupled = False

    def on_train_epoch_start(self) -> None:
        self.coupled = self.current_epoch > 0

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        x = self.body(batch["x"])
        if self.coupled:
            x = x - x.mean(0)
        return ((self.head(x) - batch["y"]) ** 2).mean()


def test_a_variant_of_the_step_reads_the_rows_that_it_sees() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return multi({name: Switching() for name in SIZES})

    plan = placement(metagraph(make(), data()), 3, {"a/": (0, 1), "b/": (0, 1, 2)})

    def rank(index: int, size: int) -> Fit:
        return fit_once(
            make, data, SpindleStrategy(plan=plan, operators=(Part,), timeline=False), size, **EPOCHS
        )

    assert_same_fit(run_ranks(rank, 3), plain_fit(make, data, **EPOCHS))


class Coupled(Small):
    """A loss of all pairs of rows, which reads nothing of the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Layer(3, 4)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        x = self.body(batch["x"])
        return (x @ x.T).logsumexp(1).mean()


def test_an_operator_that_reads_nothing_of_the_batch() -> None:
    """Its rank reads a row of each rank that sends to it, for shapes."""

    def make() -> Any:
        torch.manual_seed(0)
        return multi({name: Coupled() for name in SIZES})

    graph = metagraph(make(), data())
    (loss,) = (m.name for m in graph.metaops if m.name.startswith("a/") and m.name != "a/body")
    plan = placement(graph, 3, {"a/body": (0, 1), loss: (2,), "b/": (2,)})

    def rank(index: int, size: int, strategy: Any) -> Any:
        made = data()
        fit = fit_once(make, lambda: made, strategy, size, callbacks=[Clearing()], **EPOCHS)
        return fit, made.datamodules["a"].data.log

    ((fit, read),) = run_ranks(lambda *a: rank(*a, "auto"), 1, init_group=False)
    results = run_ranks(lambda *a: rank(*a, SpindleStrategy(plan=plan, operators=(Part,), timeline=False)), 3)
    assert_same_fit([ours for ours, _ in results], fit)
    batches = in_batches(read, BATCHES["a"])
    firsts = [batch[row] for batch in batches for row in sorted({0, len(batch) // 2}) if len(batch) > row]
    assert results[2][1] == firsts


class Looking(MultiTaskModule):
    """Adds up what it sees of its batches, before the step."""

    seen = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.seen += sum(float(own["x"].sum()) for own in batch.values())


def test_hooks_of_the_model_see_whole_batches_on_every_rank() -> None:
    """Also those of a ``MultiTaskModule`` itself, where a rank runs no operator of a task."""

    def looking() -> Any:
        torch.manual_seed(0)
        return Looking({name: Regression() for name in SIZES})

    plan = placement(metagraph(looking(), data()), 2, {"a/": (0,), "b/": (1,)})

    def rank(index: int, size: int) -> Any:
        module = looking()
        strategy = SpindleStrategy(plan=plan, operators=(Part,), timeline=False) if size > 1 else "auto"
        fit_once(lambda: module, data, strategy, size, **EPOCHS)
        return module.seen

    (expected,) = run_ranks(rank, 1, init_group=False)
    assert run_ranks(rank, 2) == [expected, expected]


class Scaling(MultiTaskDataModule):
    """Changes all tasks' batches together, when they are on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {name: {**own, "x": own["x"] / 2} for name, own in batch.items()}


def test_hooks_of_the_datamodule_see_whole_batches() -> None:
    def scaling() -> Any:
        return Scaling({name: Data(name) for name in SIZES})

    results = forced({"a/": (0, 1), "b/": (1,)}, 2, scaling)
    assert_same_fit([ours for ours, _ in results], plain_fit(model, scaling, **EPOCHS))


class Evaluated(Regression):
    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        self.log("val", ((self.head(self.body(batch["x"])) - batch["y"]) ** 2).mean())


class EvaluatedData(Data):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.held_out = Counted(random_samples(5, 50, x=(3,), y=(1,)))

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, 3)


def test_evaluation_reads_rows_too() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return multi({name: Evaluated() for name in SIZES})

    def both() -> Any:
        return together(**{name: EvaluatedData(name) for name in SIZES})

    plan = placement(metagraph(make(), both()), 2, {"a/": (0, 1), "b/": (1, 0)})

    def rank(index: int, size: int) -> Any:
        made = both()
        strategy = SpindleStrategy(plan=plan, operators=(Part,), timeline=False)
        fit = fit_once(make, lambda: made, strategy, size, **EPOCHS)
        return fit, [child.held_out.log for child in made.datamodules.values()]

    results = run_ranks(rank, 2)
    assert_same_fit([ours for ours, _ in results], plain_fit(make, both, **EPOCHS))
    for task in range(2):
        (first, second) = (logs[task][-4 if rank == task else -6 :] for rank, (_, logs) in enumerate(results))
        parts = (first, second) if task == 0 else (second, first)
        assert parts == ([0, 3] * 2, [1, 2, 4] * 2), "shards of batches (0, 1, 2) and (3, 4), two epochs"
