"""A training step without a loss: skipped on all ranks alike, as one process skips it.

Every rank knows from the exchange whether there is a loss. Lightning cannot know that, and refuses None from
``training_step`` where there are several ranks; so the strategy gives it a word of its own instead.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.trainer import Trainer

SKIPPED = object()


class _Result(ClosureResult):
    """Lightning's own, for which ``SKIPPED`` is None."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        output = None if training_step_output is SKIPPED else training_step_output
        return super().from_training_step_output(output, normalize)


def allow_skipping(trainer: Trainer) -> None:
    """From now on ``training_step`` may give ``SKIPPED``."""
    trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls = _Result


def end_skipping(trainer: Trainer) -> None:
    """Undoes ``allow_skipping``."""
    vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("output_result_cls", None)
