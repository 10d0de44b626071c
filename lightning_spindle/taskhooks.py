"""Lightning's hooks, forwarded to the tasks of a ``MultiTaskModule``.

Lightning calls a hook of the fitted module once per event; each task that overrides the hook hears of it
once, in the tasks' order. Events of a batch (from ``on_train_batch_start`` to ``on_train_batch_end``, and
the evaluation counterparts) reach the tasks that have a batch in that iteration, with their own batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_spindle import tasklog

# A checkpoint's key for what the tasks' own on_save_checkpoint added, by task.
TASKS_KEY = "tasks"


def _forwarded(hook: str) -> Callable[..., None]:
    """A method that calls ``hook`` of every task that overrides it."""

    def forward(self: "TaskHooks", *args: Any, **kwargs: Any) -> None:
        for _, task in self.overriding(hook):
            getattr(task, hook)(*args, **kwargs)

    forward.__name__ = hook
    forward.__doc__ = f"Forward ``{hook}`` to the tasks."
    return forward


def _forwarded_in_batch(hook: str) -> Callable[..., None]:
    """A method that calls ``hook`` of the tasks that take part in the running iteration."""

    def forward(self: "TaskHooks", *args: Any) -> None:
        for name, task in self.overriding(hook, self._running):
            with tasklog.batch_of_task(self._running[name]):
                getattr(task, hook)(*args)

    forward.__name__ = hook
    forward.__doc__ = f"Forward ``{hook}`` to the tasks of the running iteration."
    return forward


def _evaluation_batch_start(hook: str) -> Callable[..., None]:
    def forward(self: "TaskHooks", batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._running = self.active_batches(batch)
        self._call_with_batches(hook, batch_idx)

    forward.__name__ = hook
    forward.__doc__ = f"Forward ``{hook}`` to the tasks that have a batch, each with its own."
    return forward


def _evaluation_batch_end(hook: str) -> Callable[..., None]:
    def forward(self: "TaskHooks", outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._running = self.active_batches(batch)
        own = outputs if isinstance(outputs, Mapping) else {}
        for name, task in self.overriding(hook, self._running):
            with tasklog.batch_of_task(self._running[name]):
                getattr(task, hook)(own.get(name), self._running[name], batch_idx)
        self._running = {}

    forward.__name__ = hook
    forward.__doc__ = f"Forward ``{hook}`` to the tasks that had a batch, each with its own output and batch."
    return forward


def _model_mode(hook: str) -> Callable[..., None]:
    """Lightning's own change of mode (here: the inherited method), then the tasks' changes."""

    def forward(self: "TaskHooks") -> None:
        # By name: the hash of a torchmetrics Metric changes with its state.
        self._modes = {name: module.training for name, module in self.named_modules()}
        getattr(LightningModule, hook)(self)
        for _, task in self.overriding(hook):
            getattr(task, hook)()

    forward.__name__ = hook
    forward.__doc__ = f"Evaluation mode for the model, then the tasks' ``{hook}``."
    return forward


def _model_mode_back(hook: str) -> Callable[..., None]:
    """Lightning restores every module's mode itself unless the hook is overridden, as it is here."""

    def forward(self: "TaskHooks") -> None:
        for name, module in self.named_modules():
            module.training = self._modes.get(name, module.training)
        self._modes = {}
        for _, task in self.overriding(hook):
            getattr(task, hook)()

    forward.__name__ = hook
    forward.__doc__ = f"Every module's mode as it was, then the tasks' ``{hook}``."
    return forward


class TaskHooks(LightningModule):
    """The part of ``MultiTaskModule`` that hands Lightning's events on to ``self.tasks``."""

    tasks: torch.nn.ModuleDict

    def __init__(self) -> None:
        super().__init__()
        self._running: dict[str, Any] = {}  # task → its batch, during an iteration
        self._since_step: set[str] = set()  # tasks that ran since the last optimizer step
        self._done_with_epoch: set[str] = set()  # tasks whose on_train_batch_start returned -1
        self._modes: dict[str, bool] = {}  # each module's training flag before an evaluation

    def overriding(
        self, hook: str, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, LightningModule]]:
        """The tasks (of ``names``, default all) whose class overrides ``hook``, in order."""
        for name, task in self.tasks.items():
            if (names is None or name in names) and is_overridden(hook, task):
                yield name, task

    def active_batches(self, batch: Any) -> dict[str, Any]:
        """The batches of the tasks that take part in this iteration, in the tasks' order.

        Args:
            batch: ``{task: its batch}``; a task that is absent or None is idle.

        Raises:
            ValueError: if ``batch`` is not such a dict, or has a key that no task has.
        """
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"MultiTaskModule takes batches of the form {{task: batch}}, not {type(batch).__name__}; "
                f"use MultiTaskDataModule, or a CombinedLoader with the keys {list(self.tasks)}"
            )
        unknown = [key for key in batch if key not in self.tasks]
        if unknown:
            raise ValueError(
                f"the batch has keys that no task has: {unknown}; the tasks are {list(self.tasks)}"
            )
        return {name: batch[name] for name in self.tasks if batch.get(name) is not None}

    def _call_with_batches(self, hook: str, batch_idx: int) -> dict[str, Any]:
        """Call ``hook(batch, batch_idx)`` of the running tasks; their answers."""
        answers = {}
        for name, task in self.overriding(hook, self._running):
            with tasklog.batch_of_task(self._running[name]):
                answers[name] = getattr(task, hook)(self._running[name], batch_idx)
        return answers

    # ------------------------------------------------------------------------------------- the whole run
    prepare_data = _forwarded("prepare_data")
    on_fit_start = _forwarded("on_fit_start")
    on_fit_end = _forwarded("on_fit_end")
    configure_model = _forwarded("configure_model")

    def setup(self, stage: str) -> None:
        """Forward ``setup`` to the tasks."""
        for _, task in self.overriding("setup"):
            task.setup(stage)

    def teardown(self, stage: str) -> None:
        """Forward ``teardown`` to the tasks."""
        for _, task in self.overriding("teardown"):
            task.teardown(stage)

    def configure_callbacks(self) -> list[Callback]:
        """The callbacks of all tasks. They see this module: a monitored key needs the task's prefix."""
        callbacks: list[Callback] = []
        for _, task in self.overriding("configure_callbacks"):
            own = task.configure_callbacks()
            callbacks += own if isinstance(own, (list, tuple)) else [own]
        return callbacks

    # -------------------------------------------------------------------------------------------- training
    on_train_start = _forwarded("on_train_start")
    on_train_end = _forwarded("on_train_end")
    on_train_epoch_end = _forwarded("on_train_epoch_end")
    on_before_zero_grad = _forwarded_in_batch("on_before_zero_grad")
    on_before_backward = _forwarded_in_batch("on_before_backward")
    on_after_backward = _forwarded_in_batch("on_after_backward")

    def on_train_epoch_start(self) -> None:
        """Forward ``on_train_epoch_start``; a task that left the last epoch early is back."""
        self._done_with_epoch.clear()
        for _, task in self.overriding("on_train_epoch_start"):
            task.on_train_epoch_start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Forward ``on_train_batch_start`` to the tasks that have a batch.

        A task that returns -1 is idle for the rest of the epoch: its entry of ``batch`` becomes None. When
        every task has returned -1, so does this.
        """
        self._running = self.active_batches(batch)
        for name in self._done_with_epoch & self._running.keys():
            self._leave(name, batch)
        answers = self._call_with_batches("on_train_batch_start", batch_idx)
        for name in [name for name, answer in answers.items() if answer == -1]:
            self._done_with_epoch.add(name)
            self._leave(name, batch)
        self._since_step.update(self._running)
        return -1 if len(self._done_with_epoch) == len(self.tasks) else None

    def _leave(self, name: str, batch: Any) -> None:
        # In place: whoever runs the step, this module or a strategy, then sees an idle task.
        batch[name] = None
        del self._running[name]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Forward to the tasks that took part since the last step of the (merged) optimizer."""
        for name, task in self.overriding("on_before_optimizer_step", self._since_step):
            with tasklog.batch_of_task(self._running.get(name)):
                task.on_before_optimizer_step(optimizer)
        self._since_step.clear()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Forward ``on_train_batch_end``, each task with its own output and batch."""
        for name, task in self.overriding("on_train_batch_end", self._running):
            with tasklog.batch_of_task(self._running[name]):
                task.on_train_batch_end(self._own_outputs(name, outputs), self._running[name], batch_idx)
        self._running = {}

    def _own_outputs(self, name: str, outputs: Any) -> Any:
        """What Lightning would hand to a task fitted alone (its loss already divided for accumulation)."""
        if not isinstance(outputs, Mapping) or "tasks" not in outputs:
            return outputs
        own = dict(outputs["tasks"].get(name, {}))
        if "loss" in own:
            own["loss"] = own["loss"] / self.trainer.accumulate_grad_batches
        return own

    # ------------------------------------------------------------------------------------------ evaluation
    on_validation_start = _forwarded("on_validation_start")
    on_validation_end = _forwarded("on_validation_end")
    on_validation_epoch_start = _forwarded("on_validation_epoch_start")
    on_validation_epoch_end = _forwarded("on_validation_epoch_end")
    on_validation_batch_start = _evaluation_batch_start("on_validation_batch_start")
    on_validation_batch_end = _evaluation_batch_end("on_validation_batch_end")
    on_validation_model_eval = _model_mode("on_validation_model_eval")
    on_validation_model_train = _model_mode_back("on_validation_model_train")

    def on_validation_model_zero_grad(self) -> None:
        """Release all gradients, then the tasks' ``on_validation_model_zero_grad``."""
        super().on_validation_model_zero_grad()
        for _, task in self.overriding("on_validation_model_zero_grad"):
            task.on_validation_model_zero_grad()

    on_test_start = _forwarded("on_test_start")
    on_test_end = _forwarded("on_test_end")
    on_test_epoch_start = _forwarded("on_test_epoch_start")
    on_test_epoch_end = _forwarded("on_test_epoch_end")
    on_test_batch_start = _evaluation_batch_start("on_test_batch_start")
    on_test_batch_end = _evaluation_batch_end("on_test_batch_end")
    on_test_model_eval = _model_mode("on_test_model_eval")
    on_test_model_train = _model_mode_back("on_test_model_train")

    on_predict_start = _forwarded("on_predict_start")
    on_predict_end = _forwarded("on_predict_end")
    on_predict_epoch_start = _forwarded("on_predict_epoch_start")
    on_predict_epoch_end = _forwarded("on_predict_epoch_end")
    on_predict_batch_start = _evaluation_batch_start("on_predict_batch_start")
    on_predict_batch_end = _evaluation_batch_end("on_predict_batch_end")
    on_predict_model_eval = _model_mode("on_predict_model_eval")

    # ----------------------------------------------------------------------------------------- checkpoints
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Give each task a checkpoint as of a fit alone; keep what it added under ``checkpoint["tasks"]``."""
        added = {}
        for name, task in self.overriding("on_save_checkpoint"):
            own = self._own_checkpoint(name, checkpoint)
            before = dict(own)
            task.on_save_checkpoint(own)
            self._write_state(name, checkpoint, own.pop("state_dict"))
            added[name] = {key: value for key, value in own.items() if value is not before.get(key)}
        if added:
            checkpoint[TASKS_KEY] = added

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Give each task the checkpoint that it saved, with its own part of the parameters."""
        for name, task in self.overriding("on_load_checkpoint"):
            own = self._own_checkpoint(name, checkpoint) | checkpoint.get(TASKS_KEY, {}).get(name, {})
            task.on_load_checkpoint(own)
            self._write_state(name, checkpoint, own["state_dict"])

    def _own_checkpoint(self, name: str, checkpoint: dict[str, Any]) -> dict[str, Any]:
        prefix = f"tasks.{name}."
        state = checkpoint["state_dict"]
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        rest = {key: value for key, value in checkpoint.items() if key != TASKS_KEY}
        return {**rest, "state_dict": own}

    def _write_state(self, name: str, checkpoint: dict[str, Any], own: dict[str, Any]) -> None:
        prefix = f"tasks.{name}."
        state = checkpoint["state_dict"]
        for key in [key for key in state if key.startswith(prefix) and key.removeprefix(prefix) not in own]:
            del state[key]
        state.update({prefix + key: value for key, value in own.items()})
