"""C20: models of real libraries are taken apart layer by layer, and their pieces give what they give."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_spindle.capture import Capture, CaptureWarning
from lightning_spindle.capture.blocks import find_blocks
from lightning_spindle.graph import Layout
from lightning_spindle.module import MultiTaskModule
from tests.capture.models import multitask
from tests.capture.shards import assert_parity, captured, expected, run
from tests.support import library
from tests.support.library import LAYERS, MODELS, WHOLE, WIDTH, Classify

OTHER_BATCHES = ((2, 4), (9, 9), (5, 6))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def made(task: Classify, batch: Any) -> tuple[MultiTaskModule, Capture]:
    """The task's capture, without a warning."""
    model = multitask(t=task)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        return model, captured(model, {"t": batch})


@pytest.mark.parametrize("name", MODELS)
def test_repeated_blocks_are_operators(name: str) -> None:
    """No fallback; as many operators as blocks, over rows; batches of other rows and lengths give parity."""
    of = MODELS[name]
    model, capture = made(of.task(), of.batch(7, 6))
    layers = find_blocks(model)
    named = {
        o.name.removeprefix("t/"): o for o in capture.graph.operators if o.name not in ("t/loss", "t/logs")
    }
    blocks = [o for path, o in named.items() if model.tasks["t"].get_submodule(path) in layers]
    assert len(blocks) == of.blocks, list(named)
    assert {o.layout for o in blocks} == {Layout.WHOLE if name in WHOLE else Layout.SPLIT}
    assert_parity(model, {"t": of.batch(7, 6)}, capture)
    for rows, length in OTHER_BATCHES:
        assert_parity(model, {"t": of.batch(rows, length if of.lengths else 6)}, capture, (1, 3, 9))


def test_c20_a_mask_without_padding_in_the_example() -> None:
    """Transformers skips a mask of ones: not for all batches, though the example's are ones."""
    of = MODELS["BertModel"]
    batch = of.batch(7, 6)
    model, capture = made(of.task(), batch | {"mask": torch.ones_like(batch["mask"])})
    assert_parity(model, {"t": batch}, capture)


def test_c35_train_flags_are_live() -> None:
    """Dropout in the glue and in the layers follows the modules' flags when pieces run."""
    of = MODELS["WhisperEncoder"]
    task = of.task()
    task.encoder.dropout = 0.5
    model, capture = made(task, of.batch(7, 6))
    batches = {"t": of.batch(7, 6)}

    def loss() -> Tensor:
        return run(capture, batches, (99,))["t", "loss"]

    model.eval()
    assert torch.equal(loss(), expected(model, batches)["t", "loss"])
    model.train()
    assert not torch.equal(loss(), loss())
    task.encoder.training = False  # the flag of the module that is traced through; its layers keep theirs
    assert torch.equal(loss(), loss())


def test_the_model_is_as_before() -> None:
    """Hooks and flags that transformers installs at the first call are not left half installed."""
    of = MODELS["BertModel, output_hidden_states"]
    task = of.task()
    made(task, of.batch(7, 6))
    assert not any(m._forward_hooks for m in task.modules())
    output = task.encoder(of.batch(7, 6)["ids"], output_hidden_states=True)
    assert len(output.hidden_states) == LAYERS + 1


# ------------------------------------------------------------------------------------------ branches
class Branching(nn.Module):
    """``choose(x)`` decides between two layers."""

    def __init__(self, choose: Any) -> None:
        super().__init__()
        self.choose = choose
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.left(x) if self.choose(x) else self.right(x)).mean(1)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.stem, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.stem(x))


def branching(choose: Any) -> Classify:
    return Classify(Wrapped(Branching(choose)), lambda m, b: m(b["x"]))


@pytest.mark.parametrize(
    ("choose", "reason"),
    [
        (lambda x: x.sum() > 0, "control flow"),
        (lambda x: x.shape[1] > 5, "branches on sizes"),
        (lambda x: len(x) == 7, "branches on sizes"),
        (lambda x: x.size(0) * x.size(1) > 40, "branches on sizes"),
        (lambda x: x[x > 0].shape[0] > 330, "branches on sizes"),
    ],
    ids=["values", "length", "rows", "entries", "values' count"],
)
def test_c20_a_branch_that_batches_take_differently(choose: Any, reason: str) -> None:
    """The module that branches is one operator, with one warning that names it; the rest is as it was."""
    model = multitask(t=branching(choose))
    with pytest.warns(CaptureWarning) as caught:
        capture = captured(model, {"t": library.sequences(7, 6)})
    (message,) = [str(w.message) for w in caught if w.category is CaptureWarning]
    assert "tasks.t.encoder.inner " in message
    assert reason in message
    assert "t/encoder.inner" in [o.name for o in capture.graph.operators]
    for rows, length in ((7, 6), *OTHER_BATCHES):
        assert_parity(model, {"t": library.sequences(rows, length)}, capture, (99,))


def test_a_branch_in_the_step_itself_makes_it_coarse() -> None:
    def encode(m: Any, b: Any) -> Tensor:
        return m(b["x"])[:, 0] if len(b["x"]) > 5 else m(b["x"])[:, 1]

    with pytest.warns(CaptureWarning, match=r"branches on sizes \(.*test_library_models.py"):
        capture = captured(
            multitask(t=Classify(nn.Linear(WIDTH, WIDTH), encode)), {"t": library.sequences(7, 6)}
        )
    assert list(capture.coarse) == ["t/step"]


def test_a_limit_that_the_user_checks_is_checked() -> None:
    """All legal variants of the example are below it; a batch beyond it raises instead of going on."""

    def limited(x: Tensor) -> bool:
        if x.shape[1] > 20:
            raise ValueError("too long")
        return True

    model, capture = made(branching(limited), library.sequences(7, 6))
    assert_parity(model, {"t": library.sequences(5, 9)}, capture)
    with pytest.raises(RuntimeError, match=r"test_library_models.py:\d+ was False .* and is True now"):
        run(capture, {"t": library.sequences(5, 21)}, (99,))


def test_a_branch_on_the_train_flag_is_checked() -> None:
    task = branching(lambda x: True)
    task.encoder.inner.choose = lambda x: task.encoder.inner.training
    model, capture = made(task, library.sequences(7, 6))
    assert_parity(model, {"t": library.sequences(7, 6)}, capture)
    model.eval()
    with pytest.raises(RuntimeError, match="train and eval modes"):
        run(capture, {"t": library.sequences(7, 6)}, (99,))


# ------------------------------------------------------------------------------------------ hooks
def test_what_a_hook_collects_belongs_to_the_trace() -> None:
    """Features kept by a forward hook carry gradients, on every batch."""
    kept: list[Tensor] = []
    body = Wrapped(nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))))
    body.stem.register_forward_hook(lambda m, args, output: kept.append(output))

    def encode(m: Any, b: Any) -> Tensor:
        kept.clear()
        return (m(b["x"]) + kept[0]).mean(1)

    model, capture = made(Classify(body, encode), library.sequences(7, 6))
    for rows, length in ((7, 6), *OTHER_BATCHES):
        assert_parity(model, {"t": library.sequences(rows, length)}, capture)


def test_a_hook_that_changes_what_an_operator_gives() -> None:
    body = Wrapped(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    body.stem.register_forward_hook(lambda m, args, output: 2 * output)
    model, capture = made(Classify(body, lambda m, b: m(b["x"]).mean(1)), library.sequences(7, 6))
    assert_parity(model, {"t": library.sequences(5, 9)}, capture)


def test_what_a_hook_collects_inside_of_an_operator_is_not_frozen() -> None:
    kept: list[Tensor] = []
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
    layer.linear1.register_forward_hook(lambda m, args, output: kept.append(output))

    def encode(m: Any, b: Any) -> Tensor:
        kept.clear()
        return m[0](b["x"]).mean(1) + kept[0][:, :, :WIDTH].mean((0, 1))

    model = multitask(t=Classify(nn.ModuleList([layer]), encode))
    with pytest.warns(CaptureWarning, match="hook"):
        capture = captured(model, {"t": library.sequences(7, 6)})
    assert_parity(model, {"t": library.sequences(5, 9)}, capture)


def test_assigned_entries() -> None:
    def encode(m: Any, b: Any) -> Tensor:
        x = m(b["x"])
        shifted = x.new_zeros(x.shape)
        shifted[:, 1:] = x[:, :-1].clone()
        shifted[:, 0] = 1.0
        return (shifted * x).mean(1)

    model, capture = made(Classify(nn.Linear(WIDTH, WIDTH), encode), library.sequences(7, 6))
    for rows, length in ((7, 6), *OTHER_BATCHES):
        assert_parity(model, {"t": library.sequences(rows, length)}, capture)
