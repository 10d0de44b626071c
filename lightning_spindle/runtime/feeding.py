"""Batches between Lightning and the engine: examples for capture, and each step's rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isclose, nan
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_spindle.capture import batch_layout, flatten
from lightning_spindle.capture.layout import require_like_example
from lightning_spindle.capture.pieces import BatchLayout
from lightning_spindle.module import MultiTaskModule
from lightning_spindle.runtime import arranging
from lightning_spindle.runtime.checks import checksum
from lightning_spindle.runtime.iteration import TaskBatch
from lightning_spindle.runtime.loaders import Example, TaskLoader, example, named_loaders, read_by_rows
from lightning_spindle.runtime.objects import broadcast_object, gather_objects
from lightning_spindle.runtime.rowloading import PartialBatch
from lightning_spindle.runtime.rowneeds import Needs, no_rows
from lightning_spindle.runtime.session import TRAIN, Session, Step, StepExample
from lightning_spindle.runtime.transport import Transport

# A module, task or datamodule that overrides one of these sees batches, so that every rank must have them.
_BATCH_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
)


def examples(trainer: Any, strategy: Any, row_loading: bool | None) -> dict[str, StepExample]:
    """Example batches, on the device, of each step that this run of the Trainer executes.

    Loaders are requested from the user anew, so that the run's own are untouched. None is read by rows where
    user code sees batches, or where there is one rank.

    Raises:
        ValueError: a task has no usable batch; names it.
    """
    if _batches_are_seen(trainer) or strategy.world_size == 1:
        row_loading = False
    found: dict[str, StepExample] = {}
    for step, loop in _steps(trainer).items():
        source = loop._data_source
        if not source.is_defined():
            continue
        combined = _request_dataloader(source)
        if step != TRAIN and isinstance(combined, list) and not combined:
            continue
        if not isinstance(trainer.lightning_module, MultiTaskModule):
            found[step] = arranging.example_of(trainer, strategy, step, combined, row_loading)
            continue
        overriding = tasks_with(trainer.lightning_module, step)
        found[step] = _example(trainer, strategy, step, combined, overriding, row_loading)
    return found


def agree_on_rows(
    examples: Mapping[str, StepExample], transport: Transport, device: torch.device
) -> dict[str, StepExample]:
    """The examples with those loaders read by rows of which every rank found that they can be, and has the
    same example (collective).

    Of the others whole batches are read, and compared in training.
    """
    own = {
        step: {task: checksum(flatten(e.batches[task], e.layouts[task].lists)[0]) for task in e.by_rows}
        for step, e in examples.items()
    }
    said = gather_objects(own, transport, device)
    agreed = broadcast_object(
        said
        and {
            (step, task)
            for step, tasks in own.items()
            for task, number in tasks.items()
            if all(isclose(other.get(step, {}).get(task, nan), number, rel_tol=1e-10) for other in said)
        },
        transport,
        device,
    )
    return {
        step: replace(e, by_rows=frozenset(task for task in e.by_rows if (step, task) in agreed))
        for step, e in examples.items()
    }


def _steps(trainer: Any) -> dict[str, Any]:
    """Steps of the current run by name, with the loop that executes each."""
    match trainer.state.fn:
        case TrainerFn.FITTING:
            steps = {TRAIN: trainer.fit_loop}
            if trainer.limit_val_batches != 0 and tasks_with(trainer.lightning_module, "validation_step"):
                steps["validation_step"] = trainer.fit_loop.epoch_loop.val_loop
            return steps
        case TrainerFn.VALIDATING:
            return {"validation_step": trainer.validate_loop}
        case TrainerFn.TESTING:
            return {"test_step": trainer.test_loop}
        case _:
            raise NotImplementedError("SpindleStrategy fits, validates and tests; it does not predict yet")


def tasks_with(model: Any, step: str) -> set[str]:
    """Tasks that have the step; of another module than a ``MultiTaskModule``, its class's name."""
    if not isinstance(model, MultiTaskModule):
        return {type(model).__name__} if is_overridden(step, model, LightningModule) else set()
    return {
        name
        for name, task in model.tasks.items()
        if step == TRAIN or is_overridden(step, task, LightningModule)
    }


def epoch_length(trainer: Any) -> float:
    """Batches that the running loop goes through (inf where it cannot know)."""
    loop = trainer._active_loop
    batches = trainer.num_training_batches if trainer.training else getattr(loop, "max_batches", 0)
    if trainer.validating or trainer.sanity_checking:
        loop = trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == TrainerFn.FITTING else loop
        batches = loop.max_batches
    return float(sum(batches)) if isinstance(batches, list) else float(batches)


def _example(
    trainer: Any, strategy: Any, step: str, combined: Any, wanted: Iterable[str], row_loading: bool | None
) -> StepExample:
    loaders = named_loaders(combined)
    _require_known(loaders, trainer.lightning_module.tasks)
    found: dict[str, Example] = {}
    layouts: dict[str, BatchLayout] = {}
    for task in sorted(set(wanted) & loaders.keys(), key=list(trainer.lightning_module.tasks).index):
        try:
            one = found[task] = example(loaders[task], row_loading)
            layouts[task] = batch_layout(one.batch, one.collate, one.samples)
        except ValueError as e:
            raise ValueError(f"task {task}, {step}: {e}") from e
    batches = trainer.precision_plugin.convert_input({task: one.batch for task, one in found.items()})
    batches = trainer.lightning_module._on_before_batch_transfer(batches, dataloader_idx=0)
    on_device = strategy.batch_to_device(batches, dataloader_idx=0)
    return StepExample(
        on_device,
        layouts,
        drawing=frozenset(task for task, one in found.items() if one.draws),
        varying=frozenset(task for task, one in found.items() if one.varies),
        by_rows=read_by_rows(found, row_loading),
    )


def _require_known(given: Mapping[str, Any], tasks: Iterable[str]) -> None:
    unknown = sorted(set(given) - set(tasks))
    if unknown:
        raise ValueError(
            f"batches come with keys {unknown}, which no task has; the tasks are {sorted(tasks)}"
        )


def task_batches(
    batch: Any, layouts: Mapping[str, BatchLayout], tasks: Iterable[str]
) -> dict[str, TaskBatch]:
    """The step's batches as the engine takes them; idle tasks are left out.

    Raises:
        ValueError: a key that no task has; a batch of another structure than the example's.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch is a dict {{task: batch}}, not a {type(batch).__name__}")
    _require_known(batch, tasks)
    found: dict[str, TaskBatch] = {}
    for task, layout in layouts.items():
        own = batch.get(task)
        if own is None:
            continue
        try:
            found[task] = _task_batch(own, layout)
        except ValueError as e:
            raise ValueError(f"task {task}: {e}") from e
    return found


def _task_batch(batch: Any, layout: BatchLayout) -> TaskBatch:
    if not isinstance(batch, PartialBatch):
        leaves = _leaves(batch, layout)
        return TaskBatch(layout.rows(leaves), leaves)
    if not batch.held:
        return TaskBatch(batch.rows, None, (), batch.drawn)
    leaves = _leaves(batch.batch, layout)
    rows, asked = layout.rows(leaves), sum(last - first for first, last in batch.held)
    if rows != asked:
        raise ValueError(
            f"{asked} samples were collated to {rows} rows, so that Spindle cannot tell which rank reads "
            "which; give SpindleStrategy(row_loading=False)"
        )
    return TaskBatch(batch.rows, leaves, batch.held, batch.drawn)


def _leaves(batch: Any, layout: BatchLayout) -> list[Any]:
    leaves, spec = flatten(batch, layout.lists)
    if spec != layout.spec:
        raise ValueError(f"this batch is built as {spec}, the example that was captured as {layout.spec}")
    require_like_example(leaves, layout)
    return leaves


def loader_batches(step: Step, batch: Any, dataloader_idx: int) -> Mapping[str, Any]:
    """A step's batch by its loaders: the tasks of a ``MultiTaskModule``, or those of the arrangement.

    Raises:
        ValueError: it is built in another way.
    """
    if step.capture.arrangement is not None:
        return step.capture.arrangement.parted(batch, dataloader_idx)
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch is a dict {{task: batch}}, not a {type(batch).__name__}")
    return batch


def step_batches(
    model: LightningModule, step: Step, batch: Any, dataloader_idx: int
) -> tuple[dict[str, TaskBatch], frozenset[str]]:
    """A step's batches as the engine takes them, and the tasks (loaders) that have one.

    Raises:
        ValueError: a batch that the step was not captured for.
    """
    captured = step.capture
    if captured.arrangement is None:
        assert isinstance(model, MultiTaskModule)
        batches = task_batches(_covered(step, batch), captured.layouts, model.tasks)
        return batches, frozenset(batches)
    own = arranging.parted(captured, batch, dataloader_idx)
    active = frozenset(captured.arrangement.parted(batch, dataloader_idx))
    return task_batches(_covered(step, own), captured.layouts, captured.layouts), active


def _covered(step: Step, batches: Any) -> Any:
    """The tasks' batches with all rows that this rank's operators see.

    Rows that the loader did not read are read now: a variant of the step may see others than the step that
    was planned.
    """
    if not isinstance(batches, Mapping):
        return batches
    return {
        task: own.covering(step.engine.needs(task)(own.rows)) if isinstance(own, PartialBatch) else own
        for task, own in batches.items()
    }


def rows_to_read(
    trainer: Any, loader: TaskLoader, session: Session, by_rows: Mapping[str, frozenset[str]]
) -> Needs | None:
    """The rows that this rank reads of a loader's batches; None for whole batches.

    Whole ones where user code sees batches, where reading draws from generators that all ranks keep
    in step, and where the loader's place among the tasks is not known.

    Args:
        by_rows: by step, the loaders that can be read row by row.
    """
    if _batches_are_seen(trainer):
        return None
    for name, loop in _steps(trainer).items():
        combined = loop._combined_loader
        if combined is None:
            continue
        for own, candidate in arranging.loaders_of(combined.iterables).items():
            if candidate is loader:
                return _rows_of(session.steps[name], own, by_rows[name]) if name in session.steps else no_rows
    return None


def _rows_of(step: Step, loader: str, by_rows: frozenset[str]) -> Needs | None:
    captured, task = step.capture, loader
    if loader in step.drawing:
        return None
    if captured.arrangement is not None:
        if arranging.guess_needs(captured, loader):
            return None
        task = arranging.task_of(captured, loader)
    if task not in step.engine.tasks:
        return no_rows
    return step.engine.needs(task) if task == loader and loader in by_rows else None


def _batches_are_seen(trainer: Any) -> bool:
    model = trainer.lightning_module
    modules = [(model, LightningModule)]
    if isinstance(model, MultiTaskModule):  # it has some of the hooks itself, to call the tasks'
        modules = [(model, MultiTaskModule), *((task, LightningModule) for task in model.tasks.values())]
    if any(is_overridden(hook, module, parent) for module, parent in modules for hook in _BATCH_HOOKS):
        return True
    # A ``MultiTaskDataModule`` overrides one where one of its datamodules does.
    data = trainer.datamodule
    return data is not None and any(is_overridden(hook, data) for hook in _BATCH_HOOKS[:3])
