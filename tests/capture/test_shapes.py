"""``capture_shapes``: the operators of models that are never computed, by narrow twins."""

import resource
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_spindle import MultiTaskModule, tasklog
from lightning_spindle.capture import capture
from lightning_spindle.capture.layout import batch_layout
from lightning_spindle.capture.shapes import capture_shapes
from lightning_spindle.graph import Layout, MetaGraph, OperatorGraph
from lightning_spindle.planner.contraction import contract
from tasks.workloads import WorkloadSize
from tests.support.ranks import run_ranks
from tests.support.small import Small, multi
from tests.support.workloads import data_of, model_of, size_of

Batches = dict[str, dict[str, torch.Tensor]]

LIMIT_S = 30.0
"""Processor seconds of a capture: a third of it on a core of its own, more where others share its caches."""


def largest(size: WorkloadSize, count: int | None, device: str) -> Batches:
    return {task: data.largest_batch(device) for task, data in data_of(size, count).datamodules.items()}


def drawn(size: WorkloadSize, count: int | None) -> Batches:
    return {
        task: next(iter(data.train_dataloader())) for task, data in data_of(size, count).datamodules.items()
    }


def by_twin(size: WorkloadSize, count: int | None = None, batches: Batches | None = None) -> OperatorGraph:
    """The graph of a size; ``batches`` of other shapes than the largest ones."""
    narrow = size.narrow()

    def make() -> tuple[MultiTaskModule, Any]:
        shapes = batches or largest(size, count, "meta")
        return model_of(size, count), {
            task: {k: torch.empty(v.shape, dtype=v.dtype) for k, v in batch.items()}
            for task, batch in shapes.items()
        }

    return capture_shapes(make, model_of(narrow, count), drawn(narrow, count))


def counted(size: WorkloadSize, count: int | None = None) -> int:
    """The forward FLOPs of all steps, by torch, on the meta device."""
    with torch.device("meta"):
        model = model_of(size, count)
    with FlopCounterMode(display=False) as counter, tasklog.sink(lambda *_: None):
        for task, batch in largest(size, count, "meta").items():
            model.tasks[task].training_step(batch, 0)
    return counter.get_total_flops()


# --------------------------------------------------------------------------------- against real captures
@pytest.mark.parametrize(("workload", "count"), [("multitask_clip", 2), ("ofasys", 4), ("qwen_val", None)])
def test_a_twin_gives_what_the_model_itself_would(workload: str, count: int | None) -> None:
    """Every operator, value and parameter of a model small enough to be captured by itself."""
    size = size_of(workload, "small")
    batches = drawn(size, count)
    layouts = {task: batch_layout(batch) for task, batch in batches.items()}
    own = capture(model_of(size, count), "training_step", batches, layouts).graph
    assert numbered(by_twin(size, count, batches)) == numbered(own)


def numbered(graph: OperatorGraph) -> OperatorGraph:
    """With numbers for the names of values: those of shared modules' values start with another task."""
    number = {value.name: str(i) for i, value in enumerate(graph.values)}
    return OperatorGraph(
        tuple(
            replace(o, inputs=tuple(number[v] for v in o.inputs), outputs=tuple(number[v] for v in o.outputs))
            for o in graph.operators
        ),
        tuple(replace(v, name=number[v.name]) for v in graph.values),
        graph.parameters,
        tuple(replace(r, value=number[r.value]) for r in graph.results),
        graph.rows,
    )


# ----------------------------------------------------------------------------------------- full models
def full(workload: str, count: int) -> tuple[OperatorGraph, float]:
    """The graph of the first tasks at full size and GB of memory, in a process of its own.

    Torch counts the same FLOPs, and it takes seconds.
    """
    size = size_of(workload, "full")

    def rank(index: int, ranks: int) -> tuple[OperatorGraph, float, float]:
        start = time.process_time()
        graph = by_twin(size, count)
        return graph, time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6

    graph, seconds, peak_gb = run_ranks(rank, 1, init_group=False, timeout_s=150)[0]
    assert seconds < LIMIT_S
    assert sum(o.forward_flops for o in graph.operators) == pytest.approx(counted(size, count), rel=0.01)
    assert list(graph.rows) == list(size.batch_sizes().items())[:count]
    return graph, peak_gb


def towers(graph: MetaGraph) -> Counter[tuple[int, Layout]]:
    """How many MetaOps there are of each number of layers."""
    return Counter((len(m.layers), m.layout) for m in graph.metaops)


@pytest.mark.slow
def test_full_multitask_clip() -> None:
    """Text with sounds, images with depths: a tower is one MetaOp in each task, and a loss needs all rows."""
    graph, peak_gb = full("multitask_clip", 2)
    assert peak_gb < 2
    assert sum(p.bytes for p in graph.parameters) == pytest.approx(4 * 1.097e9, rel=0.01)
    assert towers(contract(graph)) == {
        (24, Layout.SPLIT): 1,
        (12, Layout.SPLIT): 2,
        (32, Layout.SPLIT): 1,
        (1, Layout.WHOLE): 2,
    }


@pytest.mark.slow
def test_full_qwen_val() -> None:
    """Images and text, in seconds and without the memory of 9.7 billion parameters."""
    graph, peak_gb = full("qwen_val", 1)
    assert peak_gb < 2
    assert sum(p.bytes for p in graph.parameters) == pytest.approx(4 * 9.65e9, rel=0.01)
    stacks = towers(contract(graph))
    assert stacks[48, Layout.SPLIT] == stacks[32, Layout.SPLIT] == stacks[1, Layout.WHOLE] == 1


@pytest.mark.slow
def test_full_ofasys() -> None:
    """Images that are captioned."""
    graph, peak_gb = full("ofasys", 1)
    assert peak_gb < 2
    stacks = towers(contract(graph))
    assert stacks[18, Layout.SPLIT] == 1  # images
    assert stacks[12, Layout.SPLIT] == 2
    assert stacks[1, Layout.WHOLE] == 1


# ------------------------------------------------------------------------------------------- small ones
class Tower(Small):
    """Layers, then a mean; ``tail`` is another step."""

    def __init__(self, layers: int, width: int, tail: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.tail = tail

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        return (x.relu() if self.tail else x).square().mean()


class Clips(Tower):
    """Clips of a sample are rows of the layers."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return super().training_step({"x": batch["x"].flatten(0, 1)}, 0)


class Attending(Small):
    """Attention of positions to each other, without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = batch["x"] * self.scale
        return nn.functional.scaled_dot_product_attention(x, x, x).square().mean()


def shapes_of(width: int, **twin: Any) -> OperatorGraph:
    narrow = {"layers": 3, "width": 4, **twin}

    def make() -> tuple[MultiTaskModule, Batches]:
        return multi({"t": Tower(3, width)}), {"t": {"x": torch.empty(8, width)}}

    return capture_shapes(make, multi({"t": Tower(**narrow)}), {"t": {"x": torch.randn(6, 4)}})


def test_a_model_too_large_to_exist() -> None:
    graph = shapes_of(1_000_000)
    assert [o.forward_flops for o in graph.operators[:3]] == [2 * 8 * 1e12] * 3
    assert sum(p.bytes for p in graph.parameters) == 3 * 4 * (10**12 + 10**6)


def test_entries_of_a_row_are_the_model_s() -> None:
    def make() -> tuple[MultiTaskModule, Batches]:
        return multi({"t": Clips(3, 9)}), {"t": {"x": torch.empty(8, 5, 9)}}

    graph = capture_shapes(make, multi({"t": Clips(3, 4)}), {"t": {"x": torch.randn(6, 2, 4)}})
    inner = graph.value_map()[graph.operators[0].outputs[0]]
    assert (inner.shape, inner.dim, inner.per_row) == ((40, 9), 0, 5)


def test_attention_is_counted_on_cpus_too() -> None:
    """Two products of all pairs of positions: 2 · 2 · B · H · T² · D."""
    model, batch = multi({"t": Attending()}), {"x": torch.randn(6, 2, 5, 4)}
    graph = capture(model, "training_step", {"t": batch}, {"t": batch_layout(batch)}).graph
    assert sum(o.forward_flops for o in graph.operators) == 4 * 6 * 2 * 5 * 5 * 4


@pytest.mark.parametrize(
    ("twin", "message"),
    [
        ({"layers": 2}, "task 't': the model's step does .*layers.2.* where the twin's does .*square"),
        ({"tail": True}, "task 't': the model's step does .*square.* where the twin's does .*relu"),
    ],
    ids=["fewer layers", "another step"],
)
def test_another_model_is_no_twin(twin: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes_of(16, **twin)


class Choosy(Tower):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, 0) * (2.0 if batch["x"].sum() > 0 else 1.0)


def test_a_twin_that_cannot_be_traced() -> None:
    def make() -> Any:
        raise AssertionError("the twin comes first")

    twin = multi({"t": Choosy(2, 4)})
    with pytest.raises(ValueError, match="task 't': the twin's step cannot be traced"):
        capture_shapes(make, twin, {"t": {"x": torch.randn(6, 4)}})
