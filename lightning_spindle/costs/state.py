"""What training keeps of a parameter besides its value."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class State:
    """Bytes held for each byte of a trainable parameter.

    ``moments``: of Adam. ``master``: the copy in float32 that the optimizer steps where parameters
    are half as wide.
    """

    parameter: float = 1.0
    gradient: float = 1.0
    moments: float = 2.0
    master: float = 0.0

    @property
    def optimizer(self) -> float:
        return self.moments + self.master

    @property
    def total(self) -> float:
        return self.parameter + self.gradient + self.optimizer

    def moved_by_step(self) -> float:
        """Bytes that an optimizer step reads and writes for each byte of a parameter."""
        return self.gradient + 2.0 * self.optimizer + self.parameter * (1.0 if self.master else 2.0)

    def sharded(self, shards: int, stage: int) -> State:
        """What each of ``shards`` devices holds under ZeRO (Rajbhandari et al., 2020).

        Stage 1 divides the optimizer's state, 2 gradients too, 3 parameters too.

        >>> State().sharded(4, 2).total
        1.75
        """
        found = replace(self, moments=self.moments / shards, master=self.master / shards) if stage else self
        if stage >= 2:
            found = replace(found, gradient=self.gradient / shards)
        return replace(found, parameter=self.parameter / shards) if stage >= 3 else found


FULL = State()
"""All in one width: parameter, gradient, two moments."""
MIXED = State(moments=4.0, master=2.0)
"""Parameters and gradients in bfloat16 or float16, moments and a copy in float32: 16 bytes a parameter."""
