"""QWen-VAL (paper, section 5.1): a language model that reads images and sounds ahead of its text.

Images go through a ViT and a resampler, sounds through a Whisper encoder; each is one object for all tasks.

Shapes: B rows, T tokens, D width of the language model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from datamodules.generated import Dense, Field, Tokens
from tasks.encoders import Positions, Resampler, SequenceEncoder, SpeechStem
from tasks.generative import GenerativeTask
from tasks.language import LanguageModel
from tasks.optimizers import AdamWSchedule
from tasks.transformer import Shape, TransformerEncoder

TASKS = {
    "vision_language": (("vision",), 64),
    "audio_language": (("audio",), 64),
    "vision_audio_language": (("vision", "audio"), 32),
}
"""What each task reads, and rows of its batch at full size, in the order in which tasks are taken."""


@dataclass(frozen=True, slots=True)
class QwenSize:
    """Sizes of QWen-VAL.

    Args:
        language: blocks of the language model.
        vocabulary: how many tokens there are.
        text_length: the most tokens of a text; the shortest has a quarter.
        vision: blocks of the ViT.
        image: pixels of a side.
        patch: pixels of a patch's side.
        queries: of the resampler, the positions of an image in the language model.
        audio: blocks of the speech encoder.
        bands: of the spectrogram.
        frames: of the spectrogram; four make a position in the language model.
        batch_divisor: batches are those of ``TASKS``, divided by this.
    """

    language: Shape
    vocabulary: int
    text_length: int
    vision: Shape
    image: int
    patch: int
    queries: int
    audio: Shape
    bands: int
    frames: int
    batch_divisor: int = 1

    def batch_sizes(self) -> dict[str, int]:
        """Rows of a batch of each task."""
        return {name: rows // self.batch_divisor for name, (_, rows) in TASKS.items()}

    def fields(self, task: str) -> dict[str, Field]:
        """What a task's samples hold."""
        dense = {
            "vision": Dense((3, self.image, self.image)),
            "audio": Dense((self.bands, self.frames)),
        }
        text = Tokens(self.vocabulary, max(1, self.text_length // 4), self.text_length)
        return {name: dense[name] for name in TASKS[task][0]} | {"text": text}

    def modules(self, tasks: Sequence[str], optimization: AdamWSchedule) -> dict[str, GenerativeTask]:
        """The tasks over shared encoders and one language model."""
        reads = dict.fromkeys(name for task in tasks for name in TASKS[task][0])
        encoders = {name: self._encoder(name) for name in reads}
        lengths = {"vision": self.queries, "audio": self.frames // 4}
        language = LanguageModel(self.language, self.vocabulary)
        return {
            task: PrefixTask(
                {name: encoders[name] for name in TASKS[task][0]},
                sum(lengths[name] for name in TASKS[task][0]),
                language,
                optimization,
            )
            for task in tasks
        }

    def narrow(self) -> "QwenSize":
        """The same layers at the smallest widths and lengths."""
        shapes = {name: getattr(self, name).narrow() for name in ("language", "vision", "audio")}
        return replace(
            self, **shapes, vocabulary=16, text_length=5, image=2 * self.patch, queries=3, bands=2, frames=8
        )

    def _encoder(self, name: str) -> nn.Module:
        if name == "vision":
            stem = Positions(nn.Conv2d(3, self.vision.width, self.patch, self.patch))
            vision = TransformerEncoder.of(self.vision, (self.image // self.patch) ** 2)
            return ImageFeatures(SequenceEncoder(stem, vision), self._resampler())
        stem = SpeechStem(self.bands, self.audio.width)
        audio = TransformerEncoder.of(self.audio, self.frames // 2)
        return AudioFeatures(SequenceEncoder(stem, audio), self.audio.width, self.language.width)

    def _resampler(self) -> Resampler:
        return Resampler(self.queries, self.vision.width, self.language.width, self.language.heads)


class ImageFeatures(nn.Module):
    """Images as a few positions of the language model.

    Args:
        vision: to [B, patches, width].
        resampler: from there.
    """

    def __init__(self, vision: nn.Module, resampler: Resampler) -> None:
        super().__init__()
        self.vision, self.resampler = vision, resampler

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, side, side] → [B, queries, D]."""
        return self.resampler(self.vision(images))


class AudioFeatures(nn.Module):
    """Sounds as positions of the language model, one for two of the encoder.

    Args:
        audio: to [B, frames / 2, width].
        width: of its positions.
        language: D.
    """

    def __init__(self, audio: nn.Module, width: int, language: int) -> None:
        super().__init__()
        self.audio = audio
        self.project = nn.Linear(width, language)

    def forward(self, spectrogram: Tensor) -> Tensor:
        """[B, bands, frames] → [B, frames / 4, D]."""
        return self.project(self.audio(spectrogram).unflatten(1, (-1, 2)).mean(2))


class PrefixTask(GenerativeTask):
    """Reads some modalities, each under its name, and writes ``text`` [B, T] (``text_length`` [B]).

    Args:
        encoders: modality → module that gives positions of the language model.
        length: how many positions they give together.
        language: shared.
        optimization: how to train.
    """

    def __init__(
        self,
        encoders: dict[str, nn.Module],
        length: int,
        language: LanguageModel,
        optimization: AdamWSchedule,
    ) -> None:
        super().__init__(optimization)
        self.encoders, self.length, self.language = nn.ModuleDict(encoders), length, language

    def predict(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the text, the text and its lengths."""
        features = [encoder(batch[name]) for name, encoder in self.encoders.items()]
        return self.language(batch["text"], features, self.length), batch["text"], batch["text_length"]
