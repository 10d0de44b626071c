"""Descriptions of the classes and the word tokenizer that all tasks share.

Each task has templates, filled with the name of a class. Templates for training are drawn from; the held-out
one, made of words that training has seen, is the zero-shot prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = 0


@dataclass(frozen=True, slots=True)
class Descriptions:
    """How to say which class a sample belongs to.

    Args:
        names: the classes, in the order of their labels.
        training: templates with one ``{}`` for the name.
        held_out: the template of the zero-shot prompt.
    """

    names: tuple[str, ...]
    training: tuple[str, ...]
    held_out: str

    def of_sample(self, label: int, index: int) -> str:
        """The training description of sample ``index``: its wording depends on nothing else."""
        return self.training[index % len(self.training)].format(self.names[label])

    def prompts(self) -> list[str]:
        """The held-out description of every class."""
        return [self.held_out.format(name) for name in self.names]


DIGITS = Descriptions(
    names=("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    training=(
        "an image of the digit {}",
        "a handwritten {}",
        "the number {} written by hand",
        "a small grey picture of the number {}",
        "this is the handwritten digit {}",
    ),
    held_out="a small picture of the handwritten digit {}",
)
SPEAKERS = Descriptions(
    names=("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"),
    training=(
        "a recording of the {} speaker",
        "the voice of the {} man",
        "two vowels spoken by the {} speaker",
        "speech in the {} voice",
        "the {} man says two vowels",
    ),
    held_out="a recording of vowels spoken by the {} man",
)
MOTIONS = Descriptions(
    names=("standing", "running", "walking", "playing badminton"),
    training=(
        "a person who is {}",
        "a student {} with a watch on the wrist",
        "the motion of {} seen by a watch",
        "sensors on a wrist of someone {}",
        "this student is {}",
    ),
    held_out="a watch on the wrist of a person {}",
)
ALL = (DIGITS, SPEAKERS, MOTIONS)


class Tokenizer:
    """Words to numbers from 1 up, in the order of first appearance in the training descriptions."""

    def __init__(self, descriptions: Sequence[Descriptions] = ALL) -> None:
        texts = (template.format(name) for d in descriptions for template in d.training for name in d.names)
        words = dict.fromkeys(word for text in texts for word in text.split())
        self.ids = {word: number for number, word in enumerate(words, PADDING + 1)}

    def __len__(self) -> int:
        """How many numbers there are, padding included."""
        return len(self.ids) + 1

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids [texts, longest] int64, padded with 0, and lengths [texts] int64.

        Raises:
            ValueError: for a word that no training description has.
        """
        rows = [self._row(text) for text in texts]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
        return tokens, torch.tensor([len(row) for row in rows])

    def _row(self, text: str) -> Tensor:
        unknown = [word for word in text.split() if word not in self.ids]
        if unknown:
            raise ValueError(f"{text!r} has words that no training description has: {unknown}")
        return torch.tensor([self.ids[word] for word in text.split()])
