"""Where a task's ``self.log`` goes: the one place that overrides it.

A task inside a ``MultiTaskModule`` logs as in a fit of its own. Its calls reach the parent's ``log`` under
``"<task>/<key>"`` with the task's own row count, or, inside ``with sink(receive):``, the given receiver
(the capture tracer and the engine read logged values that way).
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torchmetrics import Metric

Receiver = Callable[[str, str, Any, dict[str, Any]], None]
"""``receive(task, key, value, kwargs)``: key without the prefix, kwargs the options that the user gave."""

# Context variables, not globals: ranks may be threads of one process.
_receiver: ContextVar[Receiver | None] = ContextVar("lightning_spindle_log_receiver", default=None)
_batch: ContextVar[Any] = ContextVar("lightning_spindle_task_batch", default=None)

_LOG_SIGNATURE = inspect.signature(LightningModule.log)


def bind(task: LightningModule, name: str, parent: LightningModule) -> None:
    """Send what ``task`` logs to ``parent`` under ``"<name>/<key>"``.

    Holds while both are attached to the same Trainer: a task that is later fitted alone logs for itself.

    Raises:
        ValueError: if the task's class overrides ``log``, which this would silently bypass.
    """
    if type(task).log is not LightningModule.log:
        raise ValueError(
            f"task {name!r}: {type(task).__name__} overrides `log`, which MultiTaskModule replaces; "
            "rename the method and call `self.log` from it"
        )
    task.log = _TaskLog(task, name, parent)


@contextmanager
def sink(receive: Receiver, module: LightningModule | None = None) -> Iterator[None]:
    """Inside, every ``log`` of a bound task calls ``receive`` and nothing else (innermost sink wins).

    The ``log`` of ``module``, which needs not be bound, does too, under the task "".

    Raises:
        ValueError: ``module`` is not bound and overrides ``log``.
    """
    token = _receiver.set(receive)
    lent = module is not None and "log" not in vars(module)
    try:
        if module is not None and lent:
            _require_own_log(module)
            vars(module)["log"] = partial(_received, module)
        yield
    finally:
        if module is not None and lent:
            vars(module).pop("log", None)
        _receiver.reset(token)


def _require_own_log(module: LightningModule) -> None:
    if type(module).log is not LightningModule.log:
        raise ValueError(
            f"{type(module).__name__} overrides `log`, which SpindleStrategy replaces while a step runs; "
            "rename the method and call `self.log` from it"
        )


def _received(module: LightningModule, *args: Any, **kwargs: Any) -> None:
    key, value, options = _arguments(module, args, kwargs)
    receive = _receiver.get()
    assert receive is not None
    receive("", key, value, options)


def _arguments(module: LightningModule, args: Any, kwargs: Any) -> tuple[str, Any, dict[str, Any]]:
    """Key, value and options of a call of ``log``."""
    options = _LOG_SIGNATURE.bind(module, *args, **kwargs).arguments
    del options["self"]
    return options.pop("name"), options.pop("value"), dict(options)


@contextmanager
def batch_of_task(batch: Any) -> Iterator[None]:
    """Inside, ``batch`` is what a task's row count is guessed from when it logs without ``batch_size``."""
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


class _TaskLog:
    """Stands in for the ``log`` of one task."""

    def __init__(self, task: LightningModule, name: str, parent: LightningModule) -> None:
        self.task, self.name, self.parent = task, name, parent

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        key, value, options = _arguments(self.task, args, kwargs)
        receive = _receiver.get()
        if receive is not None:
            receive(self.name, key, value, options)
        elif self.task._trainer is not self.parent._trainer:
            LightningModule.log(self.task, key, value, **options)
        else:
            self.parent.log(f"{self.name}/{key}", value, **self._completed(key, value, options))

    def _completed(self, key: str, value: Any, options: dict[str, Any]) -> dict[str, Any]:
        """The options with what Lightning would otherwise guess from the parent's point of view."""
        options = dict(options)
        if options.get("metric_attribute") is not None:
            options["metric_attribute"] = f"tasks.{self.name}.{options['metric_attribute']}"
        batch = _batch.get()
        if options.get("batch_size") is None and batch is not None and not isinstance(value, Metric):
            options["batch_size"] = self._rows(key, batch, options)
        return options

    def _rows(self, key: str, batch: Any, options: dict[str, Any]) -> int:
        try:
            return extract_batch_size(batch)
        except MisconfigurationException as error:
            if self._is_weighted(options):
                raise ValueError(
                    f"task {self.name!r}: the number of rows behind the epoch mean of {key!r} cannot be read "
                    f"from a batch of type {type(batch).__name__}; give `self.log(..., batch_size=...)`"
                ) from error
            return 1  # not used: Lightning weighs epoch means only

    def _is_weighted(self, options: dict[str, Any]) -> bool:
        hook = self.parent._current_fx_name
        if hook is None or options.get("reduce_fx", "mean") != "mean":
            return False
        _, on_epoch = _FxValidator.check_logging_and_get_default_levels(
            hook, on_step=options.get("on_step"), on_epoch=options.get("on_epoch")
        )
        return on_epoch
