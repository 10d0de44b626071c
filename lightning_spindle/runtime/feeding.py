"""Batches between Lightning and the engine: examples for capture, and each step's rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_spindle.capture import batch_layout, flatten
from lightning_spindle.capture.layout import require_like_example
from lightning_spindle.capture.pieces import BatchLayout
from lightning_spindle.module import MultiTaskModule
from lightning_spindle.runtime import arranging
from lightning_spindle.runtime.iteration import TaskBatch
from lightning_spindle.runtime.loaders import RowsOnly, TaskLoader, example, named_loaders
from lightning_spindle.runtime.session import TRAIN, Session, Step, StepExample

# A task that overrides one of these sees its batches, so that every rank must have them.
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


def examples(trainer: Any, strategy: Any) -> dict[str, StepExample]:
    """Example batches, on the device, of each step that this run of the Trainer executes.

    Loaders are requested from the user anew, so that the run's own are untouched.

    Raises:
        ValueError: a task has no usable batch; names it.
    """
    found: dict[str, StepExample] = {}
    for step, loop in _steps(trainer).items():
        source = loop._data_source
        if not source.is_defined():
            continue
        combined = _request_dataloader(source)
        if step != TRAIN and isinstance(combined, list) and not combined:
            continue
        if not isinstance(trainer.lightning_module, MultiTaskModule):
            found[step] = arranging.example_of(trainer, strategy, step, combined)
            continue
        overriding = tasks_with(trainer.lightning_module, step)
        found[step] = _example(trainer, strategy, step, combined, overriding)
    return found


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


def _example(trainer: Any, strategy: Any, step: str, combined: Any, wanted: Iterable[str]) -> StepExample:
    loaders = named_loaders(combined)
    _require_known(loaders, trainer.lightning_module.tasks)
    batches: dict[str, Any] = {}
    layouts: dict[str, BatchLayout] = {}
    drawing: set[str] = set()
    varying: set[str] = set()
    for task in sorted(set(wanted) & loaders.keys(), key=list(trainer.lightning_module.tasks).index):
        try:
            given = example(loaders[task])
            layouts[task] = batch_layout(given.batch, given.collate, given.samples)
        except ValueError as e:
            raise ValueError(f"task {task}, {step}: {e}") from e
        batches[task] = given.batch
        if given.draws:
            drawing.add(task)
        if given.varies:
            varying.add(task)
    batches = trainer.precision_plugin.convert_input(batches)
    batches = trainer.lightning_module._on_before_batch_transfer(batches, dataloader_idx=0)
    on_device = strategy.batch_to_device(batches, dataloader_idx=0)
    return StepExample(on_device, layouts, drawing=frozenset(drawing), varying=frozenset(varying))


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
        if isinstance(own, RowsOnly):
            found[task] = TaskBatch(own.rows, None)
            continue
        leaves, spec = flatten(own, layout.lists)
        if spec != layout.spec:
            raise ValueError(
                f"task {task}: this batch is built as {spec}, the example that was captured as {layout.spec}"
            )
        try:
            require_like_example(leaves, layout)
            found[task] = TaskBatch(layout.rows(leaves), leaves)
        except ValueError as e:
            raise ValueError(f"task {task}: {e}") from e
    return found


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
        batches = task_batches(batch, captured.layouts, model.tasks)
        return batches, frozenset(batches)
    own = arranging.parted(captured, batch, dataloader_idx)
    active = frozenset(captured.arrangement.parted(batch, dataloader_idx))
    return task_batches(own, captured.layouts, captured.layouts), active


def loads(trainer: Any, loader: TaskLoader, session: Session) -> bool:
    """Whether this rank needs the samples of a loader.

    It does where it runs an operator of the loader's task, where user code sees batches, where
    reading draws from generators that all ranks keep in step, and where the loader's place among
    the tasks is not known.
    """
    if _batches_are_seen(trainer):
        return True
    for step, loop in _steps(trainer).items():
        combined = loop._combined_loader
        if combined is None:
            continue
        for name, candidate in arranging.loaders_of(combined.iterables).items():
            if candidate is loader and step in session.steps:
                if name in session.steps[step].drawing:
                    return True
                captured = session.steps[step].capture
                if captured.arrangement is None:
                    return name in session.steps[step].engine.tasks
                task = arranging.task_of(captured, name)
                return task in session.steps[step].engine.tasks or arranging.guess_needs(captured, name)
            if candidate is loader:
                return False
    return True


def _batches_are_seen(trainer: Any) -> bool:
    model = trainer.lightning_module
    modules = model.tasks.values() if isinstance(model, MultiTaskModule) else [model]
    if any(is_overridden(hook, module, LightningModule) for module in modules for hook in _BATCH_HOOKS):
        return True
    datamodules = getattr(trainer.datamodule, "datamodules", {})
    sources = (
        [*datamodules.values()] if datamodules else [trainer.datamodule] * (trainer.datamodule is not None)
    )
    return any(is_overridden(hook, source) for source in sources for hook in _BATCH_HOOKS[:3])
