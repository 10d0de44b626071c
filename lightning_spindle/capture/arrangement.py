"""How a step's batch is made of the tasks' own batches, by the loaders that it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SINGLE_TASK = "task"
"""Name of the one task of a module whose batches come from one loader."""


class Form(StrEnum):
    """What Lightning hands to a step."""

    KEYED = "keyed"
    """``{name: batch}``, from several loaders side by side; None where a loader has ended."""
    LISTED = "listed"
    """The same as a list."""
    SINGLE = "single"
    """The batch of the only loader."""
    SEQUENTIAL = "sequential"
    """The batch of one of several loaders, with its ``dataloader_idx``."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The loaders of a step, which are its tasks.

    ``sets`` are the sets of tasks that one batch may hold, the fullest first.
    """

    form: Form
    names: tuple[str, ...]
    sets: tuple[frozenset[str], ...]

    def joined(self, batches: Mapping[str, Any], active: frozenset[str]) -> Any:
        """The batch that a step gets for the tasks' own ones."""
        if self.form in (Form.SINGLE, Form.SEQUENTIAL):
            (name,) = active
            return batches[name]
        own = {name: batches[name] if name in active else None for name in self.names}
        return own if self.form is Form.KEYED else list(own.values())

    def parted(self, batch: Any, dataloader_idx: int = 0) -> dict[str, Any]:
        """The tasks' own batches in one that a step gets; absent tasks are left out.

        Raises:
            ValueError: the batch is no dict or list of such batches; a key that no loader has.
        """
        if self.form in (Form.SINGLE, Form.SEQUENTIAL):
            return {self.names[dataloader_idx]: batch}
        if self.form is Form.LISTED:
            if not isinstance(batch, (list, tuple)) or len(batch) != len(self.names):
                raise ValueError(f"a batch is a list of {len(self.names)} batches, not a {_describe(batch)}")
            return {name: own for name, own in zip(self.names, batch, strict=True) if own is not None}
        if not isinstance(batch, Mapping):
            raise ValueError(f"a batch is a dict {{task: batch}}, not a {_describe(batch)}")
        unknown = sorted(str(key) for key in batch if key not in self.names)
        if unknown:
            raise ValueError(f"batches come with keys {unknown}; the loaders are {list(self.names)}")
        return {name: batch[name] for name in self.names if batch.get(name) is not None}

    def dataloader_idx(self, active: frozenset[str]) -> int | None:
        """What Lightning tells a step of the loader that its batch is from."""
        if self.form is not Form.SEQUENTIAL:
            return None
        (name,) = active
        return self.names.index(name)


def _describe(batch: Any) -> str:
    return f"{type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (list, tuple)) else "")
