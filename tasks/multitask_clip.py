"""Multitask-CLIP (paper, section 5.1): ten contrastive tasks, each over two of six modalities (ImageBind).

A tower is one object for all tasks with its modality.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from datamodules.generated import Dense, Field, Tokens
from tasks.contrastive import Contrastive
from tasks.encoders import ClassTokenEncoder, LastTokenEncoder, Positions
from tasks.optimizers import AdamWSchedule
from tasks.transformer import Shape, TransformerEncoder

TASKS = {
    "text_audio": 128,
    "vision_depth": 128,
    "audio_thermal": 128,
    "motion_thermal": 128,
    "vision_text": 128,
    "vision_audio": 64,
    "depth_text": 64,
    "thermal_text": 64,
    "vision_thermal": 64,
    "motion_text": 64,
}
"""Rows of a batch of each task at full size, in the order in which tasks are taken."""


@dataclass(frozen=True, slots=True)
class Tower:
    """A modality whose samples a convolution cuts into positions.

    Args:
        shape: of the blocks.
        sample: channels, then extents, of a sample.
        kernel: of the convolution, a number for each extent.
        stride: likewise.
        bias_token: see ``tasks.transformer.Attention``.
    """

    shape: Shape
    sample: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    bias_token: bool

    @property
    def positions(self) -> int:
        """How many the convolution gives, and the class token."""
        extents = zip(self.sample[1:], self.kernel, self.stride, strict=True)
        return 1 + math.prod((extent - kernel) // stride + 1 for extent, kernel, stride in extents)

    def narrow(self) -> "Tower":
        """The same layers at the smallest width, with samples of two positions in each extent."""
        extents = tuple(kernel + stride for kernel, stride in zip(self.kernel, self.stride, strict=True))
        return replace(self, shape=self.shape.narrow(), sample=(self.sample[0], *extents))

    def build(self, embedding: int) -> ClassTokenEncoder:
        """The tower's module."""
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(self.kernel) - 1]
        stem = Positions(convolution(self.sample[0], self.shape.width, self.kernel, self.stride))
        transformer = TransformerEncoder.of(self.shape, self.positions, bias_token=self.bias_token)
        return ClassTokenEncoder(stem, transformer, self.shape.width, embedding)


@dataclass(frozen=True, slots=True)
class ClipSize:
    """Sizes of Multitask-CLIP.

    Args:
        embedding: width of the common embedding.
        text: blocks of the causal text tower.
        vocabulary: how many tokens there are.
        text_length: positions of every text; shorter ones are padded.
        vision: and the other towers.
        batch_divisor: batches are those of ``TASKS``, divided by this.
    """

    embedding: int
    text: Shape
    vocabulary: int
    text_length: int
    vision: Tower
    audio: Tower
    thermal: Tower
    depth: Tower
    motion: Tower
    batch_divisor: int = 1

    def batch_sizes(self) -> dict[str, int]:
        """Rows of a batch of each task."""
        return {name: rows // self.batch_divisor for name, rows in TASKS.items()}

    def fields(self, task: str) -> dict[str, Field]:
        """What a task's samples hold."""
        return {name: self._field(name) for name in task.split("_")}

    def modules(self, tasks: Sequence[str], optimization: AdamWSchedule) -> dict[str, Contrastive]:
        """The tasks over shared towers."""
        names = dict.fromkeys(name for task in tasks for name in task.split("_"))
        towers = {name: self._tower(name) for name in names}
        return {
            task: PairTask({name: towers[name] for name in task.split("_")}, optimization) for task in tasks
        }

    def narrow(self) -> "ClipSize":
        """The same layers at the smallest widths and lengths."""
        return replace(
            self,
            embedding=4,
            text=self.text.narrow(),
            vocabulary=16,
            text_length=5,
            **{name: getattr(self, name).narrow() for name in _TOWERS},
        )

    def _field(self, name: str) -> Field:
        if name == "text":
            return Tokens(self.vocabulary, 1, self.text_length, fixed=True)
        return Dense(getattr(self, name).sample)

    def _tower(self, name: str) -> nn.Module:
        if name != "text":
            return getattr(self, name).build(self.embedding)
        transformer = TransformerEncoder.of(self.text, self.text_length, causal=True)
        return LastTokenEncoder(transformer, self.text.width, self.embedding, self.vocabulary)


_TOWERS = ("vision", "audio", "thermal", "depth", "motion")


class PairTask(Contrastive):
    """Two modalities, whose towers other tasks may have too.

    Batches hold ``text`` [B, T] with ``text_length`` [B], or the modality's samples under its name.

    Args:
        towers: modality → encoder to [B, E].
        optimization: how to train.
    """

    def __init__(self, towers: dict[str, nn.Module], optimization: AdamWSchedule) -> None:
        super().__init__(optimization)
        self.towers = nn.ModuleDict(towers)

    def embed_both(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Each tower's embeddings."""
        first, second = (self._embed(name, tower, batch) for name, tower in self.towers.items())
        return first, second

    def _embed(self, name: str, tower: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return tower(batch[name], batch["text_length"]) if name == "text" else tower(batch[name])
