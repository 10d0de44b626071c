"""Model and data out of plain configuration (what ``conf/`` composes), for scripts and benchmarks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from datamodules import Digits, Motions, Vowels
from datamodules.described import DescribedDataModule
from lightning_spindle import MultiTaskDataModule, MultiTaskModule
from tasks.contrastive import AudioText, ContrastiveTask, ImageText, MotionText
from tasks.encoders import FrameEncoder, ImageEncoder, TextEncoder
from tasks.optimizers import AdamWSchedule
from tasks.transformer import TransformerEncoder
from tasks.workloads import SMALL, task_names, workload_data, workload_model, workload_size

DATAMODULES: dict[str, type[DescribedDataModule]] = {
    "image_text": Digits,
    "audio_text": Vowels,
    "motion_text": Motions,
}
TASKS: dict[str, type[ContrastiveTask]] = {
    "image_text": ImageText,
    "audio_text": AudioText,
    "motion_text": MotionText,
}

# What the data sets need: pixels of a side, frames and channels of a series, words of a description.
IMAGE_SIZE, AUDIO_FRAMES, AUDIO_CHANNELS, MOTION_FRAMES, MOTION_CHANNELS, WORDS = 8, 32, 12, 100, 6, 16


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes that all encoders share; see ``tasks.transformer`` and ``tasks.encoders`` for each."""

    width: int
    layers: int
    heads: int
    mlp_ratio: int
    embedding: int
    dropout: float
    patch: int
    frames: int

    def transformer(self, length: int) -> TransformerEncoder:
        """Blocks of this size over at most ``length`` positions."""
        return TransformerEncoder(length, self.width, self.layers, self.heads, self.mlp_ratio, self.dropout)


def build_data(tasks: Mapping[str, Mapping[str, Any]], shards: int = 1) -> MultiTaskDataModule:
    """The tasks' data.

    Args:
        tasks: name → ``{"batch_size": rows of a global batch, …}``.
        shards: the processes that share a global batch, each loading its part (DDP). Spindle's processes load
            whole batches: 1.

    Raises:
        ValueError: for a task that does not exist, a batch that does not divide.
    """
    datamodules = {}
    for name, options in tasks.items():
        rows = options["batch_size"]
        if name not in DATAMODULES:
            raise ValueError(f"there is no task {name!r}; the tasks are {list(DATAMODULES)}")
        if rows % shards:
            raise ValueError(f"task {name!r}: {rows} rows cannot be shared equally by {shards} processes")
        datamodules[name] = DATAMODULES[name](batch_size=rows // shards)
    return MultiTaskDataModule(datamodules)


def build_model(
    data: MultiTaskDataModule,
    size: ModelSize,
    optimization: AdamWSchedule,
    weights: Mapping[str, float] | None = None,
) -> MultiTaskModule:
    """The tasks over ``data``, with one text encoder for all."""
    tokens = len(next(iter(data.datamodules.values())).tokenizer)
    text = TextEncoder(size.transformer(WORDS), size.width, size.embedding, tokens)
    tasks = {
        name: TASKS[name](_encoder(name, size), text, datamodule.class_prompts(), optimization)
        for name, datamodule in data.datamodules.items()
    }
    return MultiTaskModule(tasks, weights)


def build(
    config: Mapping[str, Any], optimization: AdamWSchedule, shards: int = 1
) -> tuple[MultiTaskModule, MultiTaskDataModule]:
    """Model and data of a composed configuration: of its ``workload`` where it has sizes, else of its tasks.

    Raises:
        ValueError: for what there is not; for a workload with ``shards``, see ``build_data``.
    """
    workload = config.get("workload") or {}
    if "sizes" in workload:
        if shards != 1:
            raise ValueError(f"workload {workload['name']}: its losses are of whole batches, not of shards")
        size = workload_size(workload["name"], workload["sizes"][workload["size"] or SMALL])
        names = task_names(size, workload["tasks"])
        data = workload_data(size, names, workload["batches"], config["seed"])
        return workload_model(size, names, optimization), data
    data = build_data(config["tasks"], shards)
    weights = {task: settings["weight"] for task, settings in config["tasks"].items()}
    return build_model(data, ModelSize(**config["model"]), optimization, weights), data


def _encoder(name: str, size: ModelSize) -> nn.Module:
    if name == "image_text":
        positions = (IMAGE_SIZE // size.patch) ** 2
        return ImageEncoder(size.transformer(positions), size.width, size.embedding, IMAGE_SIZE, size.patch)
    if name == "audio_text":
        return FrameEncoder(size.transformer(AUDIO_FRAMES), size.width, size.embedding, AUDIO_CHANNELS)
    positions = MOTION_FRAMES // size.frames
    return FrameEncoder(size.transformer(positions), size.width, size.embedding, MOTION_CHANNELS, size.frames)
