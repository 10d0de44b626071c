"""The example tasks: shapes, padding, the loss, and that their steps can be traced once for all batches."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
import torch.fx
from torch import Tensor, nn

from lightning_spindle import MultiTaskModule, tasklog
from tasks import AdamWSchedule
from tasks.build import ModelSize, build_data, build_model
from tasks.contrastive import contrastive_loss
from tasks.encoders import ImageEncoder, length_mask, masked_mean
from tasks.optimizers import warmup_cosine
from tasks.transformer import Block, TransformerEncoder

SIZE = ModelSize(width=16, layers=2, heads=2, mlp_ratio=2, embedding=8, dropout=0.0, patch=4, frames=5)
ROWS = {"image_text": {"batch_size": 6}, "audio_text": {"batch_size": 5}, "motion_text": {"batch_size": 4}}
NAMES = list(ROWS)


@pytest.fixture(scope="module")
def data() -> Any:
    data = build_data(ROWS)
    data.setup("fit")
    return data


@pytest.fixture
def model(data: Any) -> MultiTaskModule:
    torch.manual_seed(0)
    return build_model(data, SIZE, AdamWSchedule(lr=1e-3, weight_decay=0.1, warmup=2, total=10))


def batches(data: Any, name: str) -> Iterator[dict[str, Tensor]]:
    torch.manual_seed(1)
    return iter(data.datamodules[name].train_dataloader())


# ------------------------------------------------------------------------------------------ the pieces
def test_masked_mean_ignores_padding() -> None:
    x = torch.randn(3, 5, 2)
    mask = length_mask(x, torch.tensor([1, 5, 3]))
    expected = torch.stack([x[0, :1].mean(0), x[1].mean(0), x[2, :3].mean(0)])
    torch.testing.assert_close(masked_mean(x, mask), expected)


def test_block_attends_to_real_positions_only() -> None:
    block = Block(8, 2)
    x = torch.randn(2, 4, 8)
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    out = block(x, mask)
    torch.testing.assert_close(out[:1, :2], block(x[:1, :2]))
    torch.testing.assert_close(out[1:], block(x[1:]))


def test_block_refuses_a_width_that_heads_do_not_divide() -> None:
    with pytest.raises(ValueError, match="width 10 is not a multiple of 4 heads"):
        Block(10, 4)


def test_images_are_cut_into_patches_row_by_row() -> None:
    encoder = ImageEncoder(TransformerEncoder(4, 16, 0, 1), 16, 8, size=8, patch=4)
    seen = []
    encoder.embed = nn.Identity()
    encoder.transformer = nn.Identity()
    encoder.project = nn.Identity()
    encoder.transformer.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    image = torch.arange(64.0).view(1, 8, 8)
    encoder(image)
    expected = [image[0, y : y + 4, x : x + 4].flatten() for y in (0, 4) for x in (0, 4)]
    torch.testing.assert_close(seen[0][0], torch.stack(expected))


def test_padding_of_a_batch_does_not_change_an_embedding(data: Any, model: MultiTaskModule) -> None:
    task = model.tasks["audio_text"].double()
    batch = {
        k: v.double() if v.is_floating_point() else v for k, v in next(batches(data, "audio_text")).items()
    }
    longer = {**batch, "audio": nn.functional.pad(batch["audio"], (0, 0, 0, 2), value=7.0)}
    torch.testing.assert_close(task.embed(longer), task.embed(batch), rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------------------------------- the loss
def test_contrastive_loss_without_repeated_classes_is_infonce() -> None:
    similarity = torch.randn(4, 4)
    each = torch.arange(4)
    expected = (
        nn.functional.cross_entropy(similarity, each) + nn.functional.cross_entropy(similarity.t(), each)
    ) / 2
    torch.testing.assert_close(contrastive_loss(similarity, torch.tensor([3, 0, 7, 1])), expected)


def test_contrastive_loss_takes_every_pair_of_a_class_as_positive() -> None:
    similarity, labels = torch.randn(3, 3), [0, 1, 0]
    total = 0.0
    for s in (similarity, similarity.t()):
        for i in range(3):
            positives = [j for j in range(3) if labels[j] == labels[i]]
            total -= sum(s[i].log_softmax(0)[j].item() for j in positives) / len(positives) / 3
    assert contrastive_loss(similarity, torch.tensor(labels)).item() == pytest.approx(total / 2, rel=1e-5)


def test_everything_is_trained_and_the_text_encoder_is_shared(data: Any, model: MultiTaskModule) -> None:
    assert len({id(model.tasks[name].text) for name in NAMES}) == 1
    batch = {name: next(batches(data, name)) for name in NAMES}
    with tasklog.sink(lambda *_: None):
        model.training_step(batch, 0)["loss"].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert all(model.tasks[name].logit_scale.grad != 0 for name in NAMES)


# ------------------------------------------------------------------------------------------- the trace
class BlockTracer(torch.fx.Tracer):
    """Blocks stay calls; buffers and factory functions become nodes."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        return isinstance(module, Block) or super().is_leaf_module(module, qualified_name)

    @contextmanager
    def tracing_factories(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        arange = torch.arange

        def traced(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(a, torch.fx.Proxy) for a in [*args, *kwargs.values()]):
                return self.create_proxy("call_function", arange, args, kwargs)
            return arange(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "arange", traced)
            yield


class Step(nn.Module):
    """A task's step as a forward that returns what it logged, or gave to its metric."""

    def __init__(self, task: L.LightningModule, step: str) -> None:
        super().__init__()
        self.task, self.step = task, step

    def forward(self, batch: Any) -> Any:
        given: list[Any] = []
        update, self.task.accuracy.update = self.task.accuracy.update, lambda *args: given.extend(args)
        try:
            with tasklog.sink(lambda task, key, value, kwargs: given.append(value)):
                getattr(self.task, self.step)(batch, 0)
        finally:
            self.task.accuracy.update = update
        return [value for value in given if not isinstance(value, nn.Module)]


@pytest.mark.parametrize("step", ["training_step", "validation_step", "test_step"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_trace_with_blocks_as_leaves(
    data: Any, model: MultiTaskModule, monkeypatch: pytest.MonkeyPatch, name: str, step: str
) -> None:
    module, tracer = Step(model.tasks[name], step), BlockTracer()
    with tracer.tracing_factories(monkeypatch):
        graph = tracer.trace(module)
    program = torch.fx.GraphModule(tracer.root, graph)
    calls = [node.target for node in graph.nodes if node.op == "call_module"]
    assert sum(".blocks." in call for call in calls) == 2 * SIZE.layers
    loader = batches(data, name)
    for batch in (next(loader), next(loader), {key: value[:3] for key, value in next(loader).items()}):
        for traced, plain in zip(program(batch), module(batch), strict=True):
            torch.testing.assert_close(traced, plain, rtol=0, atol=0)


# --------------------------------------------------------------------------------------------- training
def test_optimizer_groups_and_schedule(model: MultiTaskModule) -> None:
    configured = model.tasks["image_text"].configure_optimizers()
    decayed, rest = configured["optimizer"].param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert any(p is model.tasks["image_text"].logit_scale for p in rest["params"])
    assert warmup_cosine(0, 10, 100) == pytest.approx(0.1)
    assert warmup_cosine(10, 10, 100) == 1.0
    assert warmup_cosine(55, 10, 100) == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))
    assert warmup_cosine(200, 10, 100) == pytest.approx(0.0)


@pytest.mark.parametrize("name", NAMES)
def test_each_task_trains_alone_in_double_precision(tmp_path: Any, name: str) -> None:
    data = build_data({name: ROWS[name]})
    schedule = AdamWSchedule(lr=1e-3, weight_decay=0.1, warmup=2, total=10)
    task = build_model(data, SIZE, schedule).tasks[name]
    alone = type(task)(task.encoder, task.text, (task.prompts, task.prompt_lengths), schedule)
    trainer = L.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        precision="64-true",
        max_epochs=1,
        limit_train_batches=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(alone, data.datamodules[name])
    assert trainer.callback_metrics["loss"].isfinite()
    assert 0 <= trainer.callback_metrics["accuracy"] <= 1
    assert next(alone.parameters()).dtype == torch.float64
