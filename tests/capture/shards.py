"""A small stand-in for the engine: pieces run in order, SPLIT ones on consecutive ranges of rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_spindle import tasklog
from lightning_spindle.capture import (
    BatchLayout,
    Capture,
    LeafRef,
    ValueRef,
    batch_layout,
    capture,
    flatten,
    take_rows,
)
from lightning_spindle.graph import Layout, Operator, Reduction
from lightning_spindle.module import MultiTaskModule

Results = dict[tuple[str, str], torch.Tensor]


def captured(
    model: nn.Module, batches: dict[str, Any], step: str = "training_step", **options: Any
) -> Capture:
    return capture(model, step, batches, layouts_of(batches), **options)


def layouts_of(batches: dict[str, Any]) -> dict[str, BatchLayout]:
    return {task: batch_layout(batch) for task, batch in batches.items()}


def run(made: Capture, batches: dict[str, Any], parts: Sequence[int]) -> Results:
    """All tasks' results; ``parts`` are weights by which SPLIT operators' rows are cut."""
    values: dict[str, torch.Tensor] = {}
    results: Results = {}
    infos = made.graph.value_map()
    of_value = {r.value: r for r in made.graph.results}
    for operator in made.graph.operators:
        task = operator.task
        leaves, spec = flatten(batches[task])
        layout = made.layouts[task]
        assert spec == layout.spec
        rows = layout.rows(leaves)
        function = made.pieces[operator.name].build()
        ranges = cuts(rows, parts) if operator.layout is Layout.SPLIT else [(0, rows)]
        given = []
        for first, last in ranges:
            shard = take_rows(leaves, layout, first, last)
            args = []
            for source in made.pieces[operator.name].sources:
                if isinstance(source, LeafRef):
                    args.append(shard[source.index])
                elif isinstance(source, ValueRef):
                    args.append(sliced(values[source.name], infos[source.name], first, last))
                else:
                    args.append(0)
            given.append((function(*args), last - first))
        if operator.name in made.coarse:
            (loss, did), _ = given[0]
            results[task, "loss"] = loss
            results |= {(task, f"log:{key}"): value for key, value, _ in did.logs}
            continue
        join(operator, given, rows, infos, of_value, values)
    for result in made.graph.results:
        if result.value in values:
            results[result.task, result.key] = values[result.value]
    return results


def sliced(value: torch.Tensor, info: Any, first: int, last: int) -> torch.Tensor:
    if info.dim is None:
        return value
    return value.narrow(info.dim, first * info.per_row, (last - first) * info.per_row)


def join(operator: Operator, given: Any, rows: int, infos: Any, of_value: Any, values: Any) -> None:
    for i, name in enumerate(operator.outputs):
        shards = [(outputs[i], n) for outputs, n in given]
        if infos[name].dim is not None:
            values[name] = torch.cat([s for s, _ in shards], infos[name].dim)
        elif operator.layout is not Layout.SPLIT or name not in of_value:
            values[name] = shards[0][0]  # without rows: the same on each shard
        else:
            reduction = of_value[name].reduction
            assert reduction is not Reduction.WHOLE
            values[name] = sum(s * (n / rows if reduction is Reduction.MEAN else 1) for s, n in shards)  # type: ignore


def cuts(rows: int, parts: Sequence[int]) -> list[tuple[int, int]]:
    edges = [0]
    for part in parts:
        edges.append(min(rows, edges[-1] + part))
    edges[-1] = rows
    return [(a, b) for a, b in pairwise(edges) if b > a]


def expected(model: MultiTaskModule, batches: dict[str, Any], step: str = "training_step") -> Results:
    """The same results from the steps themselves."""
    results: Results = {}
    for task, module in model.tasks.items():
        if task not in batches or getattr(type(module), step) is getattr(LightningModule, step):
            continue
        logged: list[tuple[str, Any]] = []
        leaves, spec = flatten(batches[task])
        del leaves, spec
        with tasklog.sink(lambda _, key, value, kwargs, to=logged: to.append((key, value))):
            output = getattr(module, step)(copy.deepcopy(batches[task]), 0)
        if output is not None:
            results[task, "loss"] = output["loss"] if isinstance(output, dict) else output
        results |= {(task, f"log:{key}"): value for key, value in logged if not isinstance(value, nn.Module)}
    return results


def gradients(model: nn.Module, results: Results) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    sum(v for (_, key), v in results.items() if key == "loss").backward()  # type: ignore
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_parity(
    model: MultiTaskModule, batches: dict[str, Any], made: Capture, parts: Sequence[int] = (1, 2, 9)
) -> None:
    """Results and gradients of the pieces, whole and cut, equal those of the steps."""
    wanted = expected(model, batches)
    wanted_gradients = gradients(model, wanted)
    for cut in ((99,), tuple(parts)):
        found = run(made, batches, cut)
        assert found.keys() == wanted.keys()
        for key in wanted:
            torch.testing.assert_close(
                torch.as_tensor(found[key]).double(),
                torch.as_tensor(wanted[key]).double(),
                rtol=1e-9,
                atol=1e-11,
            )
        own = gradients(model, found)
        assert own.keys() == wanted_gradients.keys()
        for name, gradient in wanted_gradients.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-9, atol=1e-11)
