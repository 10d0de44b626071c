"""A step's logged values, given to Lightning on every rank as one process would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torchmetrics import Metric

from lightning_spindle.capture.pieces import Capture
from lightning_spindle.runtime.iteration import Iteration
from lightning_spindle.runtime.telling import logged

LOCAL_OPTIONS = ("sync_dist", "sync_dist_group", "metric_attribute")
"""Options of ``self.log`` that say nothing here: values are global already, metrics are found by name."""


def replay_logs(model: LightningModule, captured: Capture, iteration: Iteration) -> None:
    """Repeats the step's ``self.log`` calls, with values that are already global.

    The same keys in the same order on every rank, weighted as the step says, else by the task's
    rows; nothing is left to reduce.
    """
    values = {(r.task, r.key): v for r, v in iteration.results.items()}
    for call in captured.logs:
        if call.metric is not None:
            value: Any = model.get_submodule(call.metric)
        elif (call.task, f"log:{call.key}") in values:
            value = values[(call.task, f"log:{call.key}")]
        else:
            continue
        per_row = 1 if call.rows is None else call.rows.per_row
        _log(model, iteration, call.task, call.key, value, dict(call.kwargs), per_row)
    tasks = {o.name: o.task for o in captured.graph.operators}
    for operator, did in iteration.told.items():
        for key, value, options in did.logs:
            _log(model, iteration, tasks[operator], key, logged(model, value), options)


def _log(
    model: LightningModule,
    iteration: Iteration,
    task: str,
    key: str,
    value: Any,
    options: dict[str, Any],
    per_row: int = 1,
) -> None:
    batch = iteration.batches.get(task)
    if batch is not None and batch.rows > 0:
        log_once(model, f"{task}/{key}", value, options, batch.rows * per_row)


def log_once(model: LightningModule, key: str, value: Any, options: dict[str, Any], rows: int) -> None:
    """Log what all ranks have alike; it weighs what the user said, else ``rows``, in the epoch's mean."""
    kept = {k: v for k, v in options.items() if k not in LOCAL_OPTIONS}
    given = kept.pop("batch_size", None)
    model.log(key, value, **kept, batch_size=rows if given is None else given)


def _never() -> bool:
    return False


def keep_metrics_local(model: LightningModule) -> dict[str, object]:
    """Stops torchmetrics from synchronising: every rank has the whole state already.

    Returns:
        What ``restore_metrics`` needs to undo it.
    """
    before: dict[str, object] = {}
    for name, module in model.named_modules():
        if isinstance(module, Metric):
            before[name] = module.distributed_available_fn
            module.distributed_available_fn = _never
    return before


def restore_metrics(model: LightningModule, before: Mapping[str, object]) -> None:
    """Undoes ``keep_metrics_local``."""
    for name, function in before.items():
        model.get_submodule(name).distributed_available_fn = function
