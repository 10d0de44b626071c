"""Random numbers of operators, the same wherever an operator runs.

Every rank's own generator must stay in step with the others' (samplers draw from it), so an
operator draws from a generator of its own, seeded by what it is and by its first row. Two
shards of a batch thus draw different masks, and shards of a replicated operator equal ones.
"""

from __future__ import annotations

import pickle
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def operator_randomness(
    device: torch.device, seed: int, step: int, operator: str, first_row: int
) -> Iterator[None]:
    """Draws inside come from (seed, step, operator, first row); the outer state is kept."""
    mixed = zlib.crc32(f"{seed}/{step}/{operator}/{first_row}".encode())
    # Not torch.manual_seed: with CUDA not yet in use it formats a whole stack trace each time.
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(mixed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def shared_generators() -> tuple[Any, ...]:
    """The state of the generators that samplers and datasets share, to be compared."""
    numbers = np.random.get_state(legacy=False)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), pickle.dumps(numbers)
