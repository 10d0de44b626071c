"""The loaders of a LightningModule that is no ``MultiTaskModule``: their tasks, and examples."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from lightning.pytorch.utilities import CombinedLoader

from lightning_spindle.capture import batch_layout
from lightning_spindle.capture.arrangement import SINGLE_TASK, Arrangement, Form
from lightning_spindle.capture.pieces import BatchLayout, Capture
from lightning_spindle.runtime.iteration import TaskBatch
from lightning_spindle.runtime.loaders import example, read_by_rows
from lightning_spindle.runtime.rowloading import PartialBatch
from lightning_spindle.runtime.session import TRAIN, StepExample

_FEW = 3  # loaders of unknown length that may end in any order


def loaders_of(iterables: Any) -> dict[str, Any]:
    """Name to loader: keys of a dict, positions in a list, or the only one."""
    if isinstance(iterables, Mapping):
        return {str(name): loader for name, loader in iterables.items()}
    if isinstance(iterables, (list, tuple)):
        return {str(i): loader for i, loader in enumerate(iterables)}
    return {SINGLE_TASK: iterables}


def arrangement_of(step: str, given: Any) -> Arrangement:
    """How Lightning will hand the batches of the user's loaders to a step.

    Args:
        given: what the user's ``train_dataloader`` or ``val_dataloader`` returned.
    """
    combined = isinstance(given, CombinedLoader)
    mode = given._mode if combined else ("max_size_cycle" if step == TRAIN else "sequential")
    iterables = given.iterables if combined else given
    loaders = loaders_of(iterables)
    names = tuple(loaders)
    if not isinstance(iterables, (Mapping, list, tuple)) or (mode == "sequential" and len(names) == 1):
        return Arrangement(Form.SINGLE, names, (frozenset(names),))
    if mode == "sequential":
        return Arrangement(Form.SEQUENTIAL, names, tuple(frozenset([name]) for name in names))
    form = Form.KEYED if isinstance(iterables, Mapping) else Form.LISTED
    return Arrangement(form, names, _sets(loaders) if mode == "max_size" else (frozenset(names),))


def _sets(loaders: Mapping[str, Any]) -> tuple[frozenset[str], ...]:
    """Sets of loaders that have not ended yet, the fullest first."""
    names = frozenset(loaders)
    lengths = {name: len(loader) for name, loader in loaders.items() if hasattr(loader, "__len__")}
    if len(lengths) == len(names):
        left = [frozenset(n for n in names if lengths[n] > ended) for ended in sorted({0, *lengths.values()})]
        return tuple(dict.fromkeys([names, *(active for active in left if active)]))
    if len(names) > _FEW:
        return (names,)
    return tuple(
        frozenset(active) for size in range(len(names), 0, -1) for active in combinations(sorted(names), size)
    )


def example_of(trainer: Any, strategy: Any, step: str, given: Any, row_loading: bool | None) -> StepExample:
    """Example batches of a step's loaders, on the device.

    Raises:
        ValueError: a loader has no usable batch; names it.
    """
    arrangement = arrangement_of(step, given)
    loaders = loaders_of(given.iterables if isinstance(given, CombinedLoader) else given)
    found = {}
    for name, loader in loaders.items():
        try:
            found[name] = example(loader, row_loading)
        except (ValueError, TypeError) as e:
            raise ValueError(f"loader {name!r}, {step}: {e}") from e
    raw = {name: one.batch for name, one in found.items()}
    batches: dict[str, Any] = {}
    calls = arrangement.sets if arrangement.form is Form.SEQUENTIAL else arrangement.sets[:1]
    for active in calls:
        at = arrangement.dataloader_idx(active) or 0
        batch = trainer.precision_plugin.convert_input(arrangement.joined(raw, active))
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=at)
        batches |= arrangement.parted(strategy.batch_to_device(batch, dataloader_idx=at), at)
    layouts: dict[str, BatchLayout] = {}
    for name, one in found.items():
        try:
            layouts[name] = batch_layout(batches[name], one.collate, one.samples)
        except ValueError as e:
            raise ValueError(f"loader {name!r}, {step}: {e}") from e
    return StepExample(
        batches,
        layouts,
        arrangement,
        frozenset(n for n, one in found.items() if one.draws),
        frozenset(n for n, one in found.items() if one.varies),
        read_by_rows(found, row_loading),
    )


def task_of(captured: Capture, loader: str) -> str:
    """The task that a loader's batches belong to: its own, or the one that stands for the whole step."""
    return loader if loader in captured.layouts else next(iter(captured.layouts))


def parted(captured: Capture, batch: Any, dataloader_idx: int) -> dict[str, Any]:
    """A step's batch by the tasks of the captured step.

    Raises:
        ValueError: a set of tasks that the step was not captured for; says why.
    """
    assert captured.arrangement is not None
    own = captured.arrangement.parted(batch, dataloader_idx)
    active = frozenset(own)
    if active and active not in captured.totals:
        absent = sorted(set(captured.arrangement.names) - active)
        why = captured.refused.get(active, "the loaders' modes and lengths did not let it expect this")
        raise ValueError(
            f"a batch without {', '.join(absent)} came, which Spindle cannot run: {why}. Give every loader a "
            "batch in each iteration (CombinedLoader's modes 'max_size_cycle' and 'min_size')"
        )
    if active and not active <= captured.layouts.keys():
        task = task_of(captured, next(iter(own)))
        partial = [one for one in own.values() if isinstance(one, PartialBatch)]
        if any(not one.held for one in partial):
            return {task: partial[0]}
        whole = {n: one.whole() if isinstance(one, PartialBatch) else one for n, one in own.items()}
        return {task: captured.arrangement.joined(whole, active)}
    return own


def guessed_rows(captured: Capture, batches: Mapping[str, TaskBatch]) -> int:
    """The batch size that Lightning guesses where a value is logged without: its first tensor's length.

    The same on ranks that did not load that tensor (``guess_needs`` has it loaded where they could not know).
    """
    for task, layout in captured.layouts.items():
        batch = batches.get(task)
        if batch is None:
            continue
        for leaf, kind in zip(layout.leaves, layout.kinds, strict=True):
            if kind != "tensor":
                continue
            if leaf.dim == 0:
                return batch.rows * leaf.per_row
            if batch.leaves is None:
                return batch.rows
            tensor = next(v for v, k in zip(batch.leaves, layout.kinds, strict=True) if k == "tensor")
            return int(tensor.shape[0]) if tensor.dim() else 1
    return 1


def guess_needs(captured: Capture, loader: str) -> bool:
    """Whether every rank must load a loader's batches to guess as Lightning does."""
    layout = captured.layouts[task_of(captured, loader)]
    first = next(
        (leaf for leaf, kind in zip(layout.leaves, layout.kinds, strict=True) if kind == "tensor"), None
    )
    return first is not None and first.dim != 0
