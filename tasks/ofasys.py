"""OFASys (paper, section 5.1): seven tasks that read some modalities and write text, by one encoder-decoder.

Adaptors turn each modality into positions of the encoder; adaptors, encoder and decoder are one object each
for all tasks. Boxes and structures (tables, graphs) are written as tokens.

Shapes: B rows, S source positions, T target tokens, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules.generated import Dense, Field, Frames, Tokens
from tasks.encoders import FilterBankStem, Positions, SequenceEncoder, length_mask
from tasks.generative import GenerativeTask, shifted
from tasks.optimizers import AdamWSchedule
from tasks.transformer import Shape, TransformerDecoder, TransformerEncoder


@dataclass(frozen=True, slots=True)
class Spec:
    """What a task reads and writes (texts and series by their names in ``Lengths``).

    ``rows`` of a batch at full size.
    """

    reads: tuple[str, ...]
    writes: str
    rows: int


TASKS = {
    "image_captioning": Spec(("vision",), "caption", 128),
    "speech_recognition": Spec(("audio",), "transcript", 128),
    "motion_captioning": Spec(("motion",), "caption", 64),
    "visual_grounding": Spec(("vision", "phrase"), "box", 128),
    "text_infilling": Spec(("passage",), "passage", 256),
    "structure_to_text": Spec(("structure",), "caption", 128),
    "visual_question_answering": Spec(("vision", "phrase"), "answer", 64),
}
"""In the order in which tasks are taken."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The most tokens or frames of each kind of text or series. Shorter ones have at least a quarter."""

    phrase: int
    passage: int
    structure: int
    caption: int
    transcript: int
    answer: int
    box: int
    audio: int
    motion: int


@dataclass(frozen=True, slots=True)
class OfasysSize:
    """Sizes of OFASys.

    Args:
        encoder: blocks of the encoder; the decoder has the same width.
        decoder: blocks of the decoder.
        vision: blocks of the vision adaptor, of the same width.
        vocabulary: V, of text, boxes and structures.
        image: pixels of a side.
        patch: pixels of a patch's side.
        bands: of the filter bank.
        motion: values of a frame.
        lengths: of texts and series.
        batch_divisor: batches are those of ``TASKS``, divided by this.
    """

    encoder: Shape
    decoder: Shape
    vision: Shape
    vocabulary: int
    image: int
    patch: int
    bands: int
    motion: int
    lengths: Lengths
    batch_divisor: int = 1

    @property
    def patches(self) -> int:
        """Positions of an image."""
        return (self.image // self.patch) ** 2

    def batch_sizes(self) -> dict[str, int]:
        """Rows of a batch of each task."""
        return {name: spec.rows // self.batch_divisor for name, spec in TASKS.items()}

    def fields(self, task: str) -> dict[str, Field]:
        """What a task's samples hold."""
        spec = TASKS[task]
        return {name: self._field(name) for name in spec.reads} | {"target": self._field(spec.writes)}

    def modules(self, tasks: Sequence[str], optimization: AdamWSchedule) -> dict[str, GenerativeTask]:
        """The tasks over shared adaptors and one trunk."""
        reads = dict.fromkeys(name for task in tasks for name in TASKS[task].reads)
        adaptors = {name: adaptor for name in reads if (adaptor := self._adaptor(name)) is not None}
        trunk = EncoderDecoder(self)
        return {
            task: Seq2SeqTask(
                {name: adaptors.get(name) for name in TASKS[task].reads}, self.patches, trunk, optimization
            )
            for task in tasks
        }

    def narrow(self) -> "OfasysSize":
        """The same layers at the smallest widths and lengths."""
        lengths = Lengths(2, 3, 4, 5, 6, 7, 8, 31, 9)
        shapes = {name: getattr(self, name).narrow() for name in ("encoder", "decoder", "vision")}
        return replace(
            self, **shapes, vocabulary=16, image=2 * self.patch, bands=7, motion=3, lengths=lengths
        )

    @property
    def source_positions(self) -> int:
        """The most positions that the encoder gets."""
        most = self.lengths
        return max(
            self.patches + most.phrase,
            FilterBankStem.positions(most.audio),
            most.motion,
            most.passage,
            most.structure,
        )

    @property
    def target_positions(self) -> int:
        """The most tokens that the decoder writes."""
        return max(getattr(self.lengths, spec.writes) for spec in TASKS.values())

    def _field(self, name: str) -> Field:
        if name == "vision":
            return Dense((3, self.image, self.image))
        longest = getattr(self.lengths, name)
        if name == "audio":
            return Frames(self.bands, max(7, longest // 4), longest)
        if name == "motion":
            return Frames(self.motion, max(1, longest // 4), longest)
        return Tokens(self.vocabulary, max(1, longest // 4), longest)

    def _adaptor(self, name: str) -> nn.Module | None:
        width = self.encoder.width
        if name == "vision":
            stem = Positions(nn.Conv2d(3, width, self.patch, self.patch))
            return SequenceEncoder(stem, TransformerEncoder.of(self.vision, self.patches))
        if name == "audio":
            return FilterBankStem(self.bands, width)
        return MotionAdaptor(self.motion, width) if name == "motion" else None


class MotionAdaptor(nn.Module):
    """Two layers for each frame.

    Args:
        inputs: values of a frame.
        width: D.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.widen, self.mix = nn.Linear(inputs, width), nn.Linear(width, width)

    def forward(self, frames: Tensor) -> Tensor:
        """[B, T, inputs] → [B, T, D]."""
        return self.mix(F.gelu(self.widen(frames)))


class EncoderDecoder(nn.Module):
    """The trunk of all tasks, with one embedding for what is read, what is written, and the logits."""

    def __init__(self, size: OfasysSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.encoder.width)
        # It makes the logits too: with torch's own spread these start far from even.
        nn.init.normal_(self.embed.weight, std=size.encoder.width**-0.5)
        self.source_norm = nn.LayerNorm(size.encoder.width)
        self.target_norm = nn.LayerNorm(size.encoder.width)
        self.encoder = TransformerEncoder.of(size.encoder, size.source_positions)
        self.decoder = TransformerDecoder(size.decoder, size.target_positions)

    def encode(self, positions: Tensor, mask: Tensor | None) -> Tensor:
        """[B, S, D] → [B, S, D]; ``mask`` [B, S] is True where a position is real."""
        return self.encoder(self.source_norm(positions), mask)

    def write(self, target: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """Logits [B, T, V] of each token of ``target`` [B, T], given those before it."""
        x = self.decoder(self.target_norm(self.embed(shifted(target))), memory, mask)
        return F.linear(x, self.embed.weight)


class Seq2SeqTask(GenerativeTask):
    """Reads some modalities and writes ``target`` [B, T] (``target_length`` [B]).

    Batches hold each modality under its name, and what varies in length with ``<name>_length`` [B]. What does
    not (``vision``) comes ahead of what does.

    Args:
        reads: modality → its adaptor; None for texts.
        patches: positions of an image.
        trunk: shared.
        optimization: how to train.
    """

    def __init__(
        self,
        reads: dict[str, nn.Module | None],
        patches: int,
        trunk: EncoderDecoder,
        optimization: AdamWSchedule,
    ) -> None:
        super().__init__(optimization)
        self.reads, self.patches, self.trunk = tuple(reads), patches, trunk
        self.adaptors = nn.ModuleDict({name: module for name, module in reads.items() if module is not None})

    def predict(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the target, the target and its lengths."""
        parts = [self._positions(name, batch[name]) for name in self.reads]
        mask = self._mask(batch)
        memory = self.trunk.encode(torch.cat(parts, dim=1), mask)
        return self.trunk.write(batch["target"], memory, mask), batch["target"], batch["target_length"]

    def _positions(self, name: str, values: Tensor) -> Tensor:
        return self.adaptors[name](values) if name in self.adaptors else self.trunk.embed(values)

    def _mask(self, batch: dict[str, Tensor]) -> Tensor | None:
        """[B, S], which source positions are real, told from the batch alone; None: all."""
        *images, last = self.reads
        if last == "vision":
            return None
        values, lengths = batch[last], batch[f"{last}_length"]
        if last == "audio":
            count, real = FilterBankStem.positions(values.shape[1]), FilterBankStem.positions(lengths)
            return torch.arange(count, device=lengths.device) < real[:, None]
        mask = length_mask(values, lengths)
        return F.pad(mask, (self.patches, 0), value=True) if images else mask
