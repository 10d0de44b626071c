"""The paper's workloads out of plain configuration: models with the data that they train on.

Whether a model is as large as the paper's or fits a test is a question of sizes alone.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, Self

from lightning.pytorch import LightningModule

from datamodules.generated import Field, Generated
from lightning_spindle import MultiTaskDataModule, MultiTaskModule
from tasks.multitask_clip import ClipSize
from tasks.ofasys import OfasysSize
from tasks.optimizers import AdamWSchedule
from tasks.plain import from_plain
from tasks.qwen_val import QwenSize


class WorkloadSize(Protocol):
    """Sizes of a workload, which know its tasks."""

    def batch_sizes(self) -> dict[str, int]:
        """Rows of a (global) batch of each task, in the order in which tasks are taken."""

    def fields(self, task: str) -> Mapping[str, Field]:
        """What a task's samples hold."""

    def modules(self, tasks: Sequence[str], optimization: AdamWSchedule) -> Mapping[str, LightningModule]:
        """The tasks; what they have in common is the same object."""

    def narrow(self) -> Self:
        """The same layers and steps, as small as can be."""


SMALL = "small"
"""The size of a workload that is trained where none is asked for."""
SIZES: dict[str, type[Any]] = {"multitask_clip": ClipSize, "ofasys": OfasysSize, "qwen_val": QwenSize}


def workload_size(name: str, values: Mapping[str, Any]) -> WorkloadSize:
    """The sizes of a workload from plain values (``conf/workload``).

    Raises:
        ValueError: there is no such workload, or a value is missing or unknown.
    """
    if name not in SIZES:
        raise ValueError(f"there is no workload {name!r}; the workloads are {', '.join(SIZES)}")
    size: WorkloadSize = from_plain(SIZES[name], values)
    return size


def task_names(size: WorkloadSize, count: int | None = None) -> tuple[str, ...]:
    """The first ``count`` tasks; all of them where None.

    Raises:
        ValueError: there are not so many.
    """
    names = size.batch_sizes()
    if count is not None and not 1 <= count <= len(names):
        raise ValueError(f"workload.tasks={count}: there are 1 to {len(names)}")
    return tuple(islice(names, count))


def workload_model(size: WorkloadSize, tasks: Sequence[str], optimization: AdamWSchedule) -> MultiTaskModule:
    """The tasks as one model."""
    return MultiTaskModule(size.modules(tasks, optimization))


def workload_data(
    size: WorkloadSize, tasks: Sequence[str], batches: int, seed: int = 0
) -> MultiTaskDataModule:
    """The tasks' data: ``batches`` whole batches of each an epoch."""
    sizes = size.batch_sizes()
    return MultiTaskDataModule(
        {
            task: Generated(size.fields(task), sizes[task], batches * sizes[task], seed + number)
            for number, task in enumerate(tasks)
        }
    )
