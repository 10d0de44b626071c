"""The smallest tasks and data for tests of single cases: batches are given row by row, batch by batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_spindle import MultiTaskDataModule, MultiTaskModule
from lightning_spindle.graph import MetaGraph
from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.planner.contraction import contract
from tests.support.fitting import Fit, Make, captured, placed, spindle_fit

Sample = dict[str, torch.Tensor]


def random_samples(count: int, seed: int, **shapes: tuple[int, ...]) -> list[Sample]:
    """``count`` samples with a normal tensor of each named shape."""
    draw = torch.Generator().manual_seed(seed)
    return [{k: torch.randn(*shape, generator=draw) for k, shape in shapes.items()} for _ in range(count)]


def pairs(count: int, seed: int) -> list[Sample]:
    """``count`` samples of three inputs ``x`` and one target ``y``."""
    return random_samples(count, seed, x=(3,), y=(1,))


class Samples(Dataset[Sample]):
    """A list of samples."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


class Given(LightningDataModule):
    """Samples in batches of the given sizes, in order.

    ``collate`` is the default one where None; ``validation`` samples come in batches of two.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        sizes: Sequence[int],
        collate: Callable[[list[Sample]], Any] | None = None,
        validation: Sequence[Sample] = (),
    ) -> None:
        super().__init__()
        self.samples, self.collate, self.validation = samples, collate, validation
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self.batches = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(self.samples), batch_sampler=self.batches, collate_fn=self.collate)


class Validated(Given):
    """``Given`` with a validation loader."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(self.validation), 2, collate_fn=self.collate)


class Small(LightningModule):
    """A task whose optimizer is SGD with momentum or AdamW, both with weight decay."""

    optimizer_name = "sgd"

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)


class Part(nn.Module):
    """A module that is an operator of its own in fits by ``forced_fit``."""


class Layer(Part):
    """Linear, and tanh unless it is the last."""

    def __init__(self, inputs: int, outputs: int, last: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x if self.last else torch.tanh(x)


def multi(tasks: Mapping[str, LightningModule], optimizer: str = "sgd", **options: Any) -> MultiTaskModule:
    """The tasks as one model, all with the same optimizer."""
    for task in tasks.values():
        task.optimizer_name = optimizer
    return MultiTaskModule(tasks, **options)


def together(**datamodules: LightningDataModule) -> MultiTaskDataModule:
    """One batch of each at a time."""
    return MultiTaskDataModule(datamodules)


def metagraph(model: MultiTaskModule, data: MultiTaskDataModule) -> MetaGraph:
    """The MetaGraph of the training step in which every ``Part`` is an operator."""
    return contract(captured(model, data, operators=(Part,)).graph)


def placement(graph: MetaGraph, devices: int, groups: Mapping[str, tuple[int, ...]]) -> ExecutionPlan:
    """A forced plan: a MetaOp goes to the group of the longest prefix of its name in ``groups``.

    One that couples samples goes to the first device of its group.
    """

    def where(name: str) -> tuple[int, ...]:
        fitting = [prefix for prefix in groups if name.startswith(prefix)]
        assert fitting, f"no group for {name}, of {[m.name for m in graph.metaops]}"
        return groups[max(fitting, key=len)]

    return placed(graph, devices, where)


def forced_fit(
    make_model: Make, make_data: Make, devices: int, groups: Mapping[str, tuple[int, ...]], **options: Any
) -> list[Fit]:
    """A fit under the plan that ``placement`` makes of ``groups``, by rank."""
    plan = placement(metagraph(make_model(), make_data()), devices, groups)
    strategy = {"plan": plan, "operators": (Part,)}
    return spindle_fit(make_model, make_data, devices, strategy=strategy, **options)
