"""The instructions of a program and their text form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What an instruction does; the value is its letter in the text form."""

    __hash__ = str.__hash__  # many times faster than that of Enum

    FORWARD = "F"
    ACTIVATION = "A"
    """Rows of a value go from the producing to a consuming shard."""
    EXCHANGE = "X"
    """Loss and logged values become known on all ranks."""
    BACKWARD = "B"
    GRADIENT = "G"
    """The gradient of what ACTIVATION carried goes back the same way."""
    REDUCE = "R"
    """A bucket of gradients is summed over its parameter device group."""
    BROADCAST = "P"
    """After the optimizer's step, new values of parameters go from their owner to the other holders."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of the global order.

    ``index`` is a run (F, B), an edge (A, G), a bucket (R) or a broadcast (P). ``source`` and ``target`` are
    shards of the edge's runs; the direction of a GRADIENT is target to source. The text
    form parses back:

    >>> Instruction.parse("A5:0>1")
    Instruction(kind=<Kind.ACTIVATION: 'A'>, index=5, source=0, target=1)
    >>> str(Instruction(Kind.FORWARD, 3))
    'F3'
    """

    kind: Kind
    index: int = 0
    source: int = 0
    target: int = 0

    def __str__(self) -> str:
        if self.kind is Kind.EXCHANGE:
            return "X"
        if self.kind in (Kind.ACTIVATION, Kind.GRADIENT):
            return f"{self.kind}{self.index}:{self.source}>{self.target}"
        return f"{self.kind}{self.index}"

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """Raises ValueError where ``text`` is no instruction."""
        match = re.fullmatch(r"X|([FBRP])(\d+)|([AG])(\d+):(\d+)>(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is no instruction")
        single, index, message, edge, source, target = match.groups()
        if message:
            return cls(Kind(message), int(edge), int(source), int(target))
        return cls(Kind(single), int(index)) if single else cls(Kind.EXCHANGE)
