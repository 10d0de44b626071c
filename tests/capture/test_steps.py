"""Evaluation steps, what cannot be traced, and what capture leaves untouched."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_spindle.capture import CaptureWarning
from lightning_spindle.graph import Layout, Reduction
from tests.capture.models import WIDTH, Block, Task, Tower, labels, multitask, rows
from tests.capture.shards import assert_parity, captured, expected, run


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class TextTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.project(x.mean(1)), dim=-1)


class ZeroShot(LightningModule):
    """Trains on pairs, validates against class prompts without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Tower(), TextTower()
        self.register_buffer("prompts", labels(3, 4, classes=11, seed=5))
        self.accuracy = MulticlassAccuracy(3)
        self.batch_accuracy = MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.image(batch["x"]), self.text(self.prompts)[batch["y"]])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.image(batch["x"]) @ self.text(self.prompts).T
        self.accuracy.update(logits, batch["y"])
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("batch_accuracy", self.batch_accuracy(logits, batch["y"]))
        self.log("loss", F.cross_entropy(logits, batch["y"]))


def zero_shot() -> tuple[Any, dict[str, Any]]:
    model = multitask(t=ZeroShot())
    return model, {"t": {"x": rows(7, 5, 4), "y": labels(7)}}


def test_class_prompts_are_encoded_once_and_metrics_run_everywhere() -> None:
    model, batches = zero_shot()
    made = captured(model, batches, "validation_step")
    assert not made.coarse
    of = {o.name: o for o in made.graph.operators}
    assert {n for n, o in of.items() if o.layout is Layout.EVERYWHERE} == {"t/accuracy", "t/batch_accuracy"}
    prompts = [n for n in of if n.startswith("t/text")]
    assert prompts == ["t/text.embed", "t/text.blocks.0", "t/text.blocks.1", "t/text.project"]
    assert {of[n].layout for n in prompts} == {Layout.WHOLE}
    assert all(made.graph.value_map()[v].dim is None for n in prompts for v in of[n].outputs)
    assert {of[n].layout for n in of if n.startswith("t/image")} == {Layout.SPLIT}
    assert of["t/loss"].layout is Layout.SPLIT
    (metric,) = [call for call in made.logs if call.metric]
    assert (metric.key, metric.metric, metric.kwargs) == (
        "accuracy",
        "tasks.t.accuracy",
        (("on_epoch", True),),
    )
    assert not any(r.key == "log:accuracy" for r in made.graph.results)

    model.eval()
    wanted = expected(model, batches, "validation_step")
    state = model.tasks["t"].accuracy.metric_state["tp"].clone()
    for parts in ((99,), (1, 2, 9)):
        found = run(made, batches, parts)
        assert found.keys() == wanted.keys()
        for key in wanted:
            torch.testing.assert_close(found[key], wanted[key], rtol=1e-9, atol=0)
    assert torch.equal(model.tasks["t"].accuracy.metric_state["tp"], 3 * state)


def test_prompts_in_training_pass_gradients_to_one_operator() -> None:
    model, batches = zero_shot()
    assert_parity(model, batches, captured(model, batches))


def test_tasks_without_the_step_are_left_out() -> None:
    model = multitask(t=ZeroShot(), plain=Task(Tower(), lambda t, f, b: f.mean()))
    batch = {"x": rows(7, 5, 4), "y": labels(7)}
    made = captured(model, {"t": batch, "plain": batch}, "validation_step")
    assert {o.task for o in made.graph.operators} == {"t"} == set(made.layouts)


# ------------------------------------------------------------------------------------------ the ladder
def coarse(
    loss: Any, body: nn.Module | None = None, step: str = "training_step", **batch: Any
) -> tuple[Any, ...]:
    model = multitask(t=Task(body or Tower(), loss, head=nn.Linear(WIDTH, 3)))
    batches = {"t": {"x": rows(7, 5, 4), **batch}}
    with pytest.warns(CaptureWarning) as caught:
        made = captured(model, batches, step)
    assert len([w for w in caught if w.category is CaptureWarning]) == 1
    return model, batches, made, str(caught[0].message)


def test_a_data_dependent_if_in_a_step_makes_it_coarse() -> None:
    """C20, the last rung."""

    def loss(t: Any, f: Tensor, b: Any) -> Tensor:
        return f.mean() if f.sum() > 0 else f.pow(2).mean()

    model, batches, made, message = coarse(loss)
    assert [o.name for o in made.graph.operators] == ["t/step"] == list(made.coarse)
    assert "'t'" in message
    assert "test_steps.py" in message
    assert "one operator" in message
    assert_parity(model, batches, made)


def test_a_module_that_cannot_be_traced_is_one_operator() -> None:
    """C20: everything around it is still taken apart."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            rows = [self.left(row) if row.sum() > 0 else self.right(row) for row in x]
            return {"features": torch.stack(rows), "norm": x.norm(dim=-1)}

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.router = Tower(), Router()

        def forward(self, x: Tensor) -> Tensor:
            out = self.router(self.tower(x))
            return out["features"] * out["norm"][:, None]

    model, batches, made, message = coarse(
        lambda t, f, b: F.mse_loss(t.head(f), b["y"]), Body(), y=rows(7, 3)
    )
    assert "tasks.t.body.router" in message
    # It might go by what all rows have in common, so it sees them all; the others do not have to.
    assert {o.name: o.layout for o in made.graph.operators}["t/body.router"] is Layout.WHOLE
    assert Layout.SPLIT in {o.layout for o in made.graph.operators}
    assert "t/body.router" in {o.name for o in made.graph.operators}
    assert_parity(model, batches, made)


def _epoch(t: Any, f: Tensor, b: Any) -> Tensor:
    return f.mean() * (1 + t.current_epoch)


def _python_random(t: Any, f: Tensor, b: Any) -> Tensor:
    return f.mean() * random.random()


def _numpy_random(t: Any, f: Tensor, b: Any) -> Tensor:
    return f.mean() + float(np.random.rand())


def _attribute(t: Any, f: Tensor, b: Any) -> Tensor:
    t.steps = getattr(t, "steps", 0) + 1
    return f.mean() * t.steps


def _listed(t: Any, f: Tensor, b: Any) -> Tensor:
    t.kept.append(f.mean())
    return f.mean()


def _autocast(t: Any, f: Tensor, b: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return t.head(f.float()).float().mean()


@pytest.mark.parametrize("loss", [_epoch, _python_random, _numpy_random, _attribute, _autocast, _listed])
def test_what_a_trace_would_freeze_makes_a_step_coarse(loss: Any) -> None:
    body = Tower()
    model = multitask(t=Task(body, loss, head=nn.Linear(WIDTH, 3)))
    model.tasks["t"].kept = []
    with pytest.warns(CaptureWarning):
        made = captured(model, {"t": {"x": rows(7, 5, 4)}})
    assert list(made.coarse) == ["t/step"]
    assert not hasattr(model.tasks["t"], "steps")
    assert model.tasks["t"].kept == []


def test_outputs_with_rows_are_given_to_every_rank_where_hooks_see_them() -> None:
    class Featured(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            y = self.layer(batch["x"])
            return {"loss": y.mean(), "features": y}

    alone, heard = (
        captured(multitask(t=Featured()), {"t": {"x": rows(7, 4)}}, listened=listened)
        for listened in (False, True)
    )
    assert not alone.giving
    assert heard.giving == {"t/given"}
    planned = [(o.name, o.layout) for o in alone.graph.operators]
    assert [(o.name, o.layout) for o in heard.graph.operators] == [*planned, ("t/given", Layout.EVERYWHERE)]


def test_random_glue_is_in_one_operator() -> None:
    """C45: dropout, and noise that two consumers share, are drawn once."""

    def loss(t: Any, f: Tensor, b: Any) -> Tensor:
        noise = torch.randn(f.shape[0], WIDTH, dtype=f.dtype) * 0.1
        return (t.head(f + noise).mean() + t.other(b["x"].mean(1).repeat(1, 2) + noise).mean()) ** 2

    body = Tower(dropout=0.5)
    model = multitask(t=Task(body, loss, head=nn.Linear(WIDTH, 3), other=nn.Linear(WIDTH, 3)))
    batches = {"t": {"x": rows(7, 5, 4)}}
    made = captured(model, batches)
    assert not made.coarse
    drawing = [p for p in made.pieces.values() if any(n.target is torch.randn for n in p.build().graph.nodes)]
    assert len(drawing) == 1
    torch.manual_seed(3)
    first = run(made, batches, (99,))
    torch.manual_seed(3)
    assert run(made, batches, (99,))["t", "loss"] == first["t", "loss"]
    assert run(made, batches, (99,))["t", "loss"] != first["t", "loss"]


# ---------------------------------------------------------------------------------------- untouched
def test_capture_leaves_everything_as_it_was() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.norm = Tower(dropout=0.5), nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.tower(x))

    def loss(t: Any, f: Tensor, b: Any) -> Tensor:
        t.accuracy.update(t.head(f), b["y"])
        t.log("accuracy", t.accuracy)
        return F.cross_entropy(t.head(f), b["y"])

    model = multitask(
        t=Task(Normed(), loss, head=nn.Linear(WIDTH, 3), accuracy=MulticlassAccuracy(3)), z=ZeroShot()
    )
    batch = {"x": rows(7, 5, 4), "y": labels(7)}
    model.tasks["t"].accuracy.update(torch.randn(4, 3), labels(4))
    model.tasks["z"].image.blocks[0].eval()
    before = snapshot(model)
    kept = copy.deepcopy(batch)
    for step in ("training_step", "validation_step"):
        captured(model, {"t": batch, "z": batch}, step)
        assert same(snapshot(model), before)
        assert same(batch, kept)


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "state": {k: (id(v), v.clone()) for k, v in model.state_dict(keep_vars=True).items()},
        "flags": [m.training for m in model.modules()],
        "metric": {k: v.clone() for k, v in model.tasks["t"].accuracy.metric_state.items()},
        "count": model.tasks["t"].accuracy.update_count,
        "grads": [p.grad for p in model.parameters()],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "dtype": torch.get_default_dtype(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def test_a_float32_model_with_casts_is_captured_in_its_own_type() -> None:
    def loss(t: Any, f: Tensor, b: Any) -> Tensor:
        return F.mse_loss(t.head(f.float()), b["y"].float())

    model = multitask(t=Task(Tower(), loss, head=nn.Linear(WIDTH, 3))).float()
    batches = {"t": {"x": rows(7, 5, 4).float(), "y": rows(7, 3)}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = captured(model, batches)
    assert {o.layout for o in made.graph.operators} == {Layout.SPLIT}
    assert next(r.reduction for r in made.graph.results) is Reduction.MEAN
    assert {v.bytes for v in made.graph.values if "blocks" in v.name} == {7 * 5 * WIDTH * 4}


def test_an_ignored_label_in_a_split_mean_raises() -> None:
    model = multitask(
        t=Task(Tower(), lambda t, f, b: F.cross_entropy(t.head(f), b["y"]), head=nn.Linear(WIDTH, 3))
    )
    batches = {"t": {"x": rows(7, 5, 4), "y": labels(7)}}
    made = captured(model, batches)
    batches["t"]["y"][2] = -100
    with pytest.raises(RuntimeError, match=r"'t'.*ignore_index"):
        run(made, batches, (3, 4))


def test_work_and_sizes_are_those_of_the_whole_batch() -> None:
    model = multitask(
        t=Task(Tower(), lambda t, f, b: F.mse_loss(t.head(f), b["y"]), head=nn.Linear(WIDTH, 3))
    )
    batches = {"t": {"x": rows(7, 5, 4), "y": rows(7, 3)}}
    made = captured(model, batches)
    block = made.graph.operator("t/body.blocks.0")
    assert block.forward_flops == 2 * (2 * 7 * 5 * WIDTH * 2 * WIDTH)
    assert block.activation_bytes > 7 * 5 * WIDTH * 8
    frozen = captured(model.requires_grad_(False), batches)
    assert [v.differentiable for v in frozen.graph.values] == [v.differentiable for v in made.graph.values]
    assert not any(p.trainable for p in frozen.graph.parameters)


class Forgetting(nn.Module):
    """Computes more than it gives: what autograd keeps for it is freed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            self.layer(x).exp()
        return self.layer(x)


def test_memory_that_is_freed_at_once_is_counted_whatever_comes_after_it() -> None:
    """Which addresses are given out again differs by rank; the captured graph must not."""
    model = multitask(t=Task(Forgetting(), lambda t, f, b: f.square().mean()))
    made = captured(model, {"t": {"x": rows(64, 4)}}, operators=(Forgetting,))
    (operator,) = [o for o in made.graph.operators if o.parameters]
    assert operator.activation_bytes >= 20 * 64 * 4 * 8
