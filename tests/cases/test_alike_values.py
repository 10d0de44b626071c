"""Layers that hand on, beside their rows, a table that has none: T5's positions.

Every device of a layer computes the same table; who reads it takes it from one of them, and gives the
gradient to that one. The same steps in one plain process are the reference.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_spindle import MultiTaskDataModule, MultiTaskModule
from lightning_spindle.graph import Layout
from tests.support.fitting import assert_same_fit, captured, metagraph_of, plain_fit, random_plan, spindle_fit
from tests.support.library import MODELS, require
from tests.support.library_fits import data_of, model_of
from tests.support.small import Part, Sample, Small, Validated, forced_fit, multi, random_samples, together

SIZES = [6, 5, 1, 3]  # at times fewer rows than devices


class Biased(Part):
    """Rows [B, T, 4] and a table [1, T, T] of positions: of its own, or the one that it is given."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.bias = nn.Embedding(5, 1) if own else None

    def forward(self, x: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.bias is not None:
            at = torch.arange(x.shape[1], device=x.device)
            table = self.bias(at[:, None] - at[None] + x.shape[1] - 1)[None, :, :, 0]
        assert table is not None
        return torch.tanh(self.linear((table * x[..., :1]).softmax(-1) @ x)), table


class Stack(Small):
    """Three such layers; the table is in the loss, in a metric and in a logged value, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Biased(own=i == 0) for i in range(3))
        self.seen = MeanMetric()

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        table = None
        for layer in self.layers:
            x, table = layer(x, table)
        assert table is not None
        return x, table

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        x, table = self._forward(batch["x"])
        loss = (x[:, 0] - batch["y"]).square().mean() + 0.1 * table.square().mean()
        self.seen.update(table.abs().sum())
        self.log("loss", loss)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        x, table = self._forward(batch["x"])
        self.log("near", x.square().mean())
        self.log("bias", table.mean())


def model() -> MultiTaskModule:
    torch.manual_seed(0)
    return multi({"stack": Stack()}, "adamw")


def data() -> MultiTaskDataModule:
    given = random_samples(sum(SIZES), 0, x=(3, 4), y=(4,))
    return together(stack=Validated(given, SIZES, validation=random_samples(3, 1, x=(3, 4))))


@functools.cache
def reference() -> Any:
    return plain_fit(model, data, max_epochs=2, max_steps=-1)


def test_layers_that_hand_on_a_table_are_split() -> None:
    graph = captured(model(), data(), operators=(Part,)).graph
    layers = [o for o in graph.operators if "layers" in o.name]
    assert [o.layout for o in layers] == [Layout.SPLIT] * 3
    tables = [v for v in graph.values if v.shape == (1, 3, 3)]
    assert [(v.dim, v.differentiable) for v in tables] == [(None, True)] * 3


CASES: dict[str, tuple[int, dict[str, tuple[int, ...]]]] = {
    "two": (2, {"": (0, 1), "stack/layers.1": (1, 0)}),
    "from-one": (2, {"": (0, 1), "stack/layers.0": (1,)}),
    "to-one": (2, {"": (0, 1), "stack/layers.2": (1,), "stack/loss": (0,)}),
    "two-to-three": (3, {"": (0, 1, 2), "stack/layers.0": (2, 0), "stack/layers.2": (1, 2)}),
    "three-to-two": (3, {"": (1, 2), "stack/layers.0": (2, 0, 1), "stack/layers.2": (0, 2, 1)}),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str) -> None:
    devices, groups = CASES[case]
    assert_same_fit(forced_fit(model, data, devices, groups, max_epochs=2, max_steps=-1), reference())


class Watched(Biased):
    """A layer whose table tells what none of the example's rows shows."""

    def forward(self, x: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, table = super().forward(x, table)
        return x, table + (x > 1e6).any()


def test_a_table_that_depends_on_rows_that_the_example_lacks() -> None:
    """Number by number it is the same on all parts; it runs on whole batches, as does who passes it on."""
    task = Stack()
    task.layers[1] = Watched(own=False)
    graph = captured(multi({"stack": task}), data(), operators=(Part,)).graph
    layouts = [o.layout for o in graph.operators if "layers" in o.name]
    assert layouts == [Layout.SPLIT, Layout.WHOLE, Layout.WHOLE]


T5 = {"text": "T5EncoderModel", "pairs": "T5Model, use_cache=False"}


@functools.cache
def t5_reference() -> Any:
    return plain_fit(lambda: model_of(**T5), lambda: data_of(**T5), max_steps=3)


@pytest.mark.parametrize(("devices", "seed"), [(2, 1), (3, 3)])
def test_t5(devices: int, seed: int) -> None:
    """Encoders and decoders under random placements, layers of one run apart and together."""
    require(*MODELS[T5["text"]].needs)
    plan = random_plan(metagraph_of(model_of(**T5), data_of(**T5)), devices, seed)
    ours = spindle_fit(
        lambda: model_of(**T5), lambda: data_of(**T5), devices, strategy={"plan": plan}, max_steps=3
    )
    assert_same_fit(ours, t5_reference())
