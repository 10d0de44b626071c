"""What capture hands to the runtime: operators that can be run one by one.

Legend: a *leaf* is one entry of a task's flattened batch (``torch.utils._pytree``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from lightning_spindle.capture.arrangement import Arrangement
from lightning_spindle.graph import OperatorGraph


@dataclass(frozen=True, slots=True)
class LeafRef:
    """An input that a piece reads from the task's batch, by leaf index."""

    index: int


@dataclass(frozen=True, slots=True)
class ValueRef:
    """An input that another operator gives, by value name."""

    name: str


@dataclass(frozen=True, slots=True)
class BatchIndex:
    """The step's ``batch_idx``."""


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """The numbers in the whole batch of the rows that the piece sees, as int64."""


Source = LeafRef | ValueRef | BatchIndex | RowNumbers


@dataclass(frozen=True, slots=True)
class Piece:
    """One operator, ready to be built on a rank that runs it.

    ``build`` compiles it (after parameters were localised; it holds the user's own modules,
    not copies) and returns a callable: given the tensors of ``sources`` in order it returns
    a tuple with the values of ``outputs`` in order. All tensors cover the same rows, but for values
    of which each piece reads what all rows gave (``Value.meets``).
    """

    operator: str
    sources: tuple[Source, ...]
    outputs: tuple[str, ...]
    build: Callable[[], Callable[..., tuple[Any, ...]]]
    gives: bool = False
    """Whether it gives no values to other operators, but what its rank is to have of the step's output."""


@dataclass(frozen=True, slots=True)
class LeafLayout:
    """Where a leaf holds its rows: dimension ``dim``, ``per_row`` entries of it a row.

    ``dim`` is None for a leaf without rows (copied whole to every shard).
    """

    dim: int | None
    per_row: int = 1


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How a task's batch is taken apart: its tree, and the layout of each leaf.

    ``names`` are the leaves as the user would write them, ``kinds`` what they were in the example
    (``layout.leaf_kind``); both are empty where a layout was written by hand. ``lists`` are lists of
    other things than scalars that have an entry a row, each a leaf (``trees.flatten``).
    """

    spec: TreeSpec
    leaves: tuple[LeafLayout, ...]
    names: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    lists: frozenset[str] = frozenset()

    def rows(self, leaves: list[Any]) -> int:
        """Rows of a batch, from its first leaf that has rows.

        Raises:
            ValueError: leaves disagree, or none has rows.
        """
        counts = {
            (leaf.shape[layout.dim] if isinstance(leaf, torch.Tensor) else len(leaf)) // layout.per_row
            for leaf, layout in zip(leaves, self.leaves, strict=True)
            if layout.dim is not None
        }
        if len(counts) != 1:
            raise ValueError(f"the batch's leaves have {sorted(counts) or 'no'} rows; expected one number")
        return counts.pop()


@dataclass(frozen=True, slots=True)
class LogCall:
    """A ``self.log`` of a step. ``key`` is the user's, without the task's prefix.

    ``metric`` is the canonical name of a torchmetrics Metric that was logged as an object;
    None where a value was logged, which then is the graph's result "log:<key>".
    """

    task: str
    key: str
    kwargs: tuple[tuple[str, Any], ...]
    metric: str | None = None
    rows: RowsRef | None = None
    """What was given as ``batch_size``, where that was a number of rows."""
    number: bool = False
    """Of a total's: whether a number was logged, not a tensor."""


@dataclass(frozen=True, slots=True)
class RowsRef:
    """``per_row`` times the rows of a task's batch."""

    task: str
    per_row: int


@dataclass(frozen=True, slots=True)
class PartRef:
    """A task's scalar that a total reads: the graph's result ``key``, as a tensor of ``shape``.

    A number of the class ``number`` where that is not None. ``differentiable``: a gradient flows back to it.
    """

    task: str
    key: str
    shape: tuple[int, ...]
    differentiable: bool
    number: type | None = None


@dataclass(frozen=True, slots=True)
class Constant:
    """A part of what a step returns that is the same in every step."""

    value: Any


@dataclass(frozen=True, slots=True)
class ResultRef:
    """A scalar that a step returns: a result of the graph, or an output of a total, by its key.

    A number of the class ``number`` where that is not None, else a tensor.
    """

    key: str
    number: type | None = None


@dataclass(frozen=True, slots=True)
class GivenRef:
    """Entry ``index`` of what a task's operator that runs on every rank was given (``patches.given``)."""

    task: str
    index: int


@dataclass(frozen=True, slots=True)
class Returned:
    """What a step returns beside its loss: a tree and its leaves (``trees.flatten``)."""

    spec: TreeSpec
    leaves: tuple[Constant | ResultRef | GivenRef, ...]


@dataclass(frozen=True, slots=True)
class Total:
    """What a module's step computes from scalars of its tasks, run on every rank alike.

    ``build`` gives a callable from the sources' values to those of ``outputs``, which are "loss",
    "log:<key>" and "out:<number>". ``parameters`` are the canonical names of those that it uses.
    ``returned`` is what the step returns, where hooks see it and the step was taken apart.
    """

    sources: tuple[PartRef | RowsRef | BatchIndex, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    logs: tuple[LogCall, ...]
    returned: Returned | None
    build: Callable[[], Callable[..., tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class Capture:
    """A step of all tasks, taken apart.

    ``coarse`` maps operators that hold a task's whole step, because it could not be traced,
    to the reason. Such a piece takes the leaves in order and returns (loss, logs, output) with
    ``logs`` a list of (key, value, kwargs) and ``output`` what the step returned beside its loss.

    ``listened``: hooks see what steps return. ``returned`` then says it for each task of a
    ``MultiTaskModule`` whose step was taken apart; operators in ``giving`` have their part of it.

    The step of a module of its own, not of a ``MultiTaskModule``, has an ``arrangement`` and, for
    each set of tasks that a batch may hold, a total (with the logs), or a reason why such a batch
    is refused. A task that is no loader of the arrangement gets the step's whole batch.

    ``written`` names, by operator, buffers of each module of which it writes any. ``attributes`` are plain
    attributes of the model's modules that steps read, with the values that the pieces have in them.
    """

    graph: OperatorGraph
    pieces: Mapping[str, Piece]
    layouts: Mapping[str, BatchLayout]
    logs: tuple[LogCall, ...] = ()
    coarse: Mapping[str, str] = field(default_factory=dict)
    arrangement: Arrangement | None = None
    totals: Mapping[frozenset[str], Total] = field(default_factory=dict)
    refused: Mapping[frozenset[str], str] = field(default_factory=dict)
    written: Mapping[str, frozenset[str]] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    listened: bool = False
    returned: Mapping[str, Returned] = field(default_factory=dict)

    @property
    def giving(self) -> frozenset[str]:
        """Operators that every rank runs for what it is given."""
        return frozenset(name for name, piece in self.pieces.items() if piece.gives)

    @property
    def joining(self) -> frozenset[str]:
        """Parameters of totals, which every rank uses."""
        return frozenset(name for total in self.totals.values() for name in total.parameters)

    def batches(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Example batches by the tasks of this step."""
        if self.arrangement is None:
            return dict(given)
        everything = frozenset(self.arrangement.names)
        return {
            t: given[t] if t in given else self.arrangement.joined(given, everything) for t in self.layouts
        }
