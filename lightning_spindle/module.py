"""``MultiTaskModule``: several LightningModules fitted as one."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_spindle import merging, tasklog
from lightning_spindle.taskhooks import TaskHooks

# Hooks that replace a piece of the training loop: with one loop for all tasks they cannot be a task's.
_OF_THE_LOOP = (
    "backward",
    "configure_gradient_clipping",
    "configure_sharded_model",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
)


class MultiTaskModule(TaskHooks):
    """Minimises Σ wᵢ·lossᵢ over tasks that are ordinary LightningModules, under any strategy.

    One iteration takes ``{task: batch}``; a task that is absent or None is idle. Every task behaves as in a
    fit of its own: ``self.log("loss", …)`` arrives as ``"<task>/loss"`` weighted by the task's own rows,
    ``self.trainer``, ``self.optimizers()`` and the like work, and each hook of the task is called once per
    event (``on_before_backward`` with the joint loss, optimizer hooks with the merged optimizer).

    The tasks' optimizers, one each and all of one class, merge into one: every task's parameter groups with
    their own options, in the tasks' order; a parameter that several tasks list is in the group of the first,
    and must have the same options in all; each task's schedulers drive its own groups. Tasks may share
    modules (the same Python object). Hooks that replace a part of the loop (``optimizer_step``, ``backward``,
    …) belong in a subclass, not in a task.

    ``state_dict`` keys are ``tasks.<name>.…``.

    Args:
        tasks: name → task; the order is the order of everything. Names have no dots.
        weights: name → weight in the sum; 1 for those not named.

    Example::

        model = MultiTaskModule({"image_text": image_text, "audio_text": audio_text}, {"audio_text": 0.5})
        Trainer().fit(model, MultiTaskDataModule({"image_text": digits, "audio_text": vowels}))
    """

    def __init__(
        self, tasks: Mapping[str, LightningModule], weights: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        _check_tasks(tasks)
        unknown = [name for name in weights or {} if name not in tasks]
        if unknown:
            raise ValueError(f"weights for tasks that do not exist: {unknown}; the tasks are {list(tasks)}")
        self.tasks = nn.ModuleDict(tasks)
        self.weights = {name: float((weights or {}).get(name, 1.0)) for name in tasks}
        for name, task in tasks.items():
            tasklog.bind(task, name, self)
        self._take_over_data_hooks()

    # --------------------------------------------------------------------------------------------- steps
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any] | None:
        """Σ wᵢ·lossᵢ over the tasks that have a batch.

        Returns:
            ``{"loss": the sum, "tasks": {task: what it returned, losses detached}}``; None if no task has a
            loss, as Lightning skips such a step.
        """
        total, outputs = None, {}
        for name, own in self.active_batches(batch).items():
            loss, outputs[name] = _loss_of(name, self._step(name, "training_step", own, batch_idx))
            if loss is not None:
                weighted = self.weights[name] * loss
                total = weighted if total is None else total + weighted
        return None if total is None else {"loss": total, "tasks": outputs}

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Each task's ``validation_step`` on its own batch, of the tasks that have one."""
        return self._evaluation_step("validation_step", batch, batch_idx)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Each task's ``test_step`` on its own batch, of the tasks that have one."""
        return self._evaluation_step("test_step", batch, batch_idx)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Each task's ``predict_step`` on its own batch (Lightning's own calls the task)."""
        batches = self.active_batches(batch)
        return {name: self._step(name, "predict_step", own, batch_idx) for name, own in batches.items()}

    def _evaluation_step(self, hook: str, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        batches = self.active_batches(batch)
        return {
            name: self._step(name, hook, batches[name], batch_idx)
            for name, _ in self.overriding(hook, batches)
        }

    def _step(self, name: str, hook: str, batch: Any, batch_idx: int) -> Any:
        step = getattr(self.tasks[name], hook)
        # Lightning lets a step leave out batch_idx.
        rest = (batch_idx,) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()
        with tasklog.batch_of_task(batch):
            return step(batch, *rest)

    # ---------------------------------------------------------------------------------------- optimizers
    def configure_optimizers(self) -> Any:
        """The tasks' optimizers and schedulers, merged (see the class and ``merging.merge``)."""
        parts = [merging.configured(name, task) for name, task in self.tasks.items()]
        names = {parameter: name for name, parameter in self.named_parameters()}
        return merging.merge([part for part in parts if part is not None], names)

    # ---------------------------------------------------------------------------- what tasks know of the run
    @property
    def trainer(self) -> Any:
        """The Trainer, known to every task too."""
        return LightningModule.trainer.fget(self)

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        # Lightning's setter reaches direct children only.
        LightningModule.trainer.fset(self, trainer)
        for task in self.tasks.values():
            task.trainer = trainer

    # ------------------------------------------------------------------------------------------ data hooks
    # Lightning asks whether the module overrides these, and acts on it (warnings, another source of data):
    # so this module overrides one exactly when a task does.
    def _take_over_data_hooks(self) -> None:
        forwards = {
            "on_before_batch_transfer": self._tasks_before_transfer,
            "transfer_batch_to_device": self._tasks_transfer,
            "on_after_batch_transfer": self._tasks_after_transfer,
        }
        for hook, forward in forwards.items():
            if any(self.overriding(hook)) and not is_overridden(hook, self):
                setattr(self, hook, forward)

    def _tasks_before_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._each(batch, "on_before_batch_transfer", dataloader_idx)

    def _tasks_transfer(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return self._each(batch, "transfer_batch_to_device", device, dataloader_idx)

    def _tasks_after_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._each(batch, "on_after_batch_transfer", dataloader_idx)

    def _each(self, batch: Any, hook: str, *args: Any) -> dict[str, Any]:
        active = self.active_batches(batch)
        return {
            name: getattr(self.tasks[name], hook)(own, *args) if name in active else None
            for name, own in batch.items()
        }


def _check_tasks(tasks: Mapping[str, LightningModule]) -> None:
    if not tasks:
        raise ValueError("MultiTaskModule needs at least one task")
    names_by_task: dict[LightningModule, str] = {}
    for name, task in tasks.items():
        if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict, name):
            raise ValueError(
                f"task name {name!r}: names are strings, not empty, without dots (they are part of the names "
                "of parameters), and not a method of torch.nn.ModuleDict"
            )
        if not isinstance(task, LightningModule):
            raise ValueError(
                f"task {name!r} is a {type(task).__name__}, not a lightning.pytorch.LightningModule"
            )
        if task in names_by_task:
            raise ValueError(f"tasks {names_by_task[task]!r} and {name!r} are the same object")
        names_by_task[task] = name
        _check_loop(name, task)


def _check_loop(name: str, task: LightningModule) -> None:
    if not task.automatic_optimization:
        raise ValueError(
            f"task {name!r} optimises manually; MultiTaskModule takes automatic optimization only"
        )
    for hook in _OF_THE_LOOP:
        if is_overridden(hook, task):
            raise ValueError(
                f"task {name!r} overrides {hook}, but all tasks share one training loop and one optimizer; "
                "override it in a subclass of MultiTaskModule"
            )


def _loss_of(name: str, output: Any) -> tuple[Tensor | None, dict[str, Any]]:
    """A step's loss, and its output in the form Lightning gives to ``on_train_batch_end``."""
    if output is None:
        return None, {}
    if isinstance(output, Tensor):
        output = {"loss": output}
    if not isinstance(output, Mapping) or not isinstance(output.get("loss"), Tensor):
        raise ValueError(
            f"task {name!r}: training_step returns a loss tensor, a dict with the key 'loss', or None; "
            f"got {type(output).__name__}"
        )
    return output["loss"], {**output, "loss": output["loss"].detach()}
