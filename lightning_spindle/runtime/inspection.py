"""``inspect``: what Spindle makes of a model, without training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_spindle.capture import CaptureWarning, batch_layout, capture
from lightning_spindle.capture.arrangement import SINGLE_TASK, Arrangement, Form
from lightning_spindle.capture.pieces import Capture
from lightning_spindle.graph import MetaGraph, Operator
from lightning_spindle.module import MultiTaskModule
from lightning_spindle.planner.contraction import contract
from lightning_spindle.runtime.arranging import arrangement_of, loaders_of
from lightning_spindle.runtime.loaders import example
from lightning_spindle.runtime.session import TRAIN, StepExample


@dataclass(frozen=True)
class Inspection:
    """A step taken apart; its text is a table of tasks, MetaOps, operators and flows.

    ``reasons`` say what could not be traced, and why.
    """

    capture: Capture
    metagraph: MetaGraph
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        graph = self.capture.graph
        lines = []
        for task, rows in graph.rows:
            own = [o for o in graph.operators if o.task == task]
            lines.append(f"task {task}: {rows} rows, {len(own)} operators")
            for metaop in self.metagraph.metaops:
                if metaop.task == task:
                    lines.append(f"  MetaOp {metaop.name}, {len(metaop.layers)} layers, {metaop.layout}")
                    names = [name for layer in metaop.layers for name in layer]
                    lines += [f"    {self._line(graph.operator(name))}" for name in names]
        for active, total in self.capture.totals.items():
            parts = ", ".join(sorted({s.task for s in total.sources if hasattr(s, "task")}))
            lines.append(f"loss with {', '.join(sorted(active))}: from scalars of {parts}, on every rank")
        lines += [f"not taken apart: {reason}" for reason in self.reasons]
        return "\n".join(lines)

    def _line(self, operator: Operator) -> str:
        values = self.capture.graph.value_map()
        parameters = {p.name: p.bytes for p in self.capture.graph.parameters}
        size = sum(parameters[name] for name in operator.parameters) / 1e6
        given = ", ".join(f"{v} {list(values[v].shape)}" for v in operator.inputs) or "the batch"
        return f"{operator.name} ({operator.layout}, {size:.3g} MB of parameters) from {given}"


def inspect(
    model: LightningModule,
    data: Any,
    step: str = TRAIN,
    *,
    operators: tuple[type[nn.Module], ...] = (),
) -> Inspection:
    """Takes a step apart as a fit would, without training; the model and all generators are as before.

    Args:
        model: a ``MultiTaskModule`` or any other LightningModule.
        data: a LightningDataModule or loaders as given to ``fit``; or an example batch. A dict whose
            values are batches (no tensors) holds the tasks' batches.
        step: "training_step"; of a datamodule, its training loaders are used.
        operators: as of ``SpindleStrategy``.

    Raises:
        ValueError: rows cannot be found in the batches; names the leaf.
    """
    with isolate_rng(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        found = _examples(data, step)
        captured = capture(
            model,
            step,
            found.batches,
            found.layouts,
            operators=operators,
            arrangement=None if isinstance(model, MultiTaskModule) else found.arrangement,
        )
    reasons = tuple(str(w.message) for w in caught if issubclass(w.category, CaptureWarning))
    refused = tuple(f"batches of {', '.join(sorted(a))}: {why}" for a, why in captured.refused.items())
    return Inspection(captured, contract(captured.graph), reasons + refused)


def _examples(data: Any, step: str) -> StepExample:
    if hasattr(data, "train_dataloader"):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    if not _has_loaders(data):
        return _of_batch(data)
    arrangement = arrangement_of(step, data)
    loaders = loaders_of(data.iterables if isinstance(data, CombinedLoader) else data)
    found = {name: example(loader) for name, loader in loaders.items()}
    layouts = {n: batch_layout(e.batch, e.collate, e.samples) for n, e in found.items()}
    return StepExample({n: e.batch for n, e in found.items()}, layouts, arrangement)


def _has_loaders(data: Any) -> bool:
    if isinstance(data, Mapping):
        return bool(data) and all(_is_loader(value) for value in data.values())
    return _is_loader(data)


def _is_loader(value: Any) -> bool:
    return isinstance(value, CombinedLoader) or (hasattr(value, "dataset") and hasattr(value, "__iter__"))


def _of_batch(batch: Any) -> StepExample:
    nested = (Mapping, list, tuple)
    if isinstance(batch, Mapping) and batch and all(isinstance(own, nested) for own in batch.values()):
        batches, form = {str(task): own for task, own in batch.items()}, Form.KEYED
    else:
        batches, form = {SINGLE_TASK: batch}, Form.SINGLE
    layouts = {task: batch_layout(own) for task, own in batches.items()}
    return StepExample(batches, layouts, Arrangement(form, tuple(batches), (frozenset(batches),)))
