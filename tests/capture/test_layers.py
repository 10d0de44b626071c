"""Operators, their layouts, and parity of the pieces with the steps, on whole batches and on shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_spindle.graph import Layout, Reduction
from tests.capture.models import WIDTH, Block, Contrastive, Task, Tower, labels, multitask, rows
from tests.capture.shards import assert_parity, captured


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def layouts(made: Any) -> dict[str, Layout]:
    return {o.name: o.layout for o in made.graph.operators}


def one(loss: Any, body: nn.Module | None = None, **batch: Tensor) -> tuple[Any, Any]:
    """A model with one task ``t`` and its batch of 7 rows."""
    model = multitask(t=Task(body or Tower(), loss, head=nn.Linear(WIDTH, 3)))
    return model, {"t": {"x": rows(7, 5, 4), **batch}}


def reduction(made: Any, key: str = "loss") -> Reduction:
    return next(r.reduction for r in made.graph.results if r.key == key)


def test_regression_is_split_everywhere() -> None:
    model, batches = one(lambda t, f, b: F.mse_loss(t.head(f), b["y"]), y=rows(7, 3, seed=1))
    made = captured(model, batches)
    assert layouts(made) == dict.fromkeys(
        ["t/body.embed", "t/body.blocks.0", "t/body.blocks.1", "t/body.norm"], Layout.SPLIT
    )
    assert reduction(made) is Reduction.MEAN
    assert_parity(model, batches, made)


def test_equal_layers_have_equal_signatures_and_others_not() -> None:
    model, batches = one(lambda t, f, b: F.mse_loss(t.head(f), b["y"]), Tower(4), y=rows(7, 3, seed=1))
    made = captured(model, batches)
    signatures = [o.signature for o in made.graph.operators]
    assert len(set(signatures[1:5])) == 1
    assert len(set(signatures)) == 3
    narrow = captured(model, {"t": {k: v[:5] for k, v in batches["t"].items()}})
    assert not {o.signature for o in narrow.graph.operators} & set(signatures)


@pytest.mark.parametrize(
    ("loss", "layout", "kind"),
    [
        (lambda t, f, b: F.cross_entropy(t.head(f), b["y"]), Layout.SPLIT, Reduction.MEAN),
        (lambda t, f, b: nn.CrossEntropyLoss()(t.head(f), b["y"]), Layout.SPLIT, Reduction.MEAN),
        (lambda t, f, b: F.cross_entropy(t.head(f), b["y"], reduction="sum"), Layout.SPLIT, Reduction.SUM),
        (lambda t, f, b: F.cross_entropy(t.head(f), b["y"], reduction="none").sum() / len(f), Layout.SPLIT,
         Reduction.MEAN),
        (lambda t, f, b: F.cross_entropy(t.head(f), b["y"], ignore_index=0), Layout.WHOLE, Reduction.WHOLE),
        (lambda t, f, b: F.cross_entropy(t.head(f), b["y"], ignore_index=7), Layout.WHOLE, Reduction.WHOLE),
        (lambda t, f, b: F.cross_entropy(t.head(f), b["y"], torch.tensor([1.0, 2.0, 3.0]).to(f)),
         Layout.WHOLE, Reduction.WHOLE),
        (lambda t, f, b: F.cross_entropy(t.head(f), b["y"], reduction="sum") / (b["y"] != -100).sum(),
         Layout.WHOLE, Reduction.WHOLE),
        (lambda t, f, b: f.mean() * t.head(f).mean(), Layout.WHOLE, Reduction.WHOLE),
        (lambda t, f, b: t.head(f).pow(2).mean().sqrt(), Layout.WHOLE, Reduction.WHOLE),
        (lambda t, f, b: 3 * f.mean() + 1 + t.head(f).abs().mean(), Layout.SPLIT, Reduction.MEAN),
        (lambda t, f, b: t.head(f).sum() + t.head(f).mean(), Layout.WHOLE, Reduction.WHOLE),
        (lambda t, f, b: t.head(f).var(0).sum(), Layout.WHOLE, Reduction.WHOLE),
        (lambda t, f, b: t.head(f).max(), Layout.WHOLE, Reduction.WHOLE),
        (lambda t, f, b: t.head(f).mean() + sum(p.pow(2).sum() for p in t.parameters()), Layout.SPLIT,
         Reduction.MEAN),
    ],
)  # fmt: skip
def test_losses_are_what_they_are(loss: Any, layout: Layout, kind: Reduction) -> None:
    """C02: no mean of means."""
    model, batches = one(loss, y=labels(7))
    made = captured(model, batches)
    assert not made.coarse
    tail = made.graph.operators[-1]
    assert (tail.layout, reduction(made)) == (layout, kind)
    assert_parity(model, batches, made)


def test_token_means_are_whole_even_if_no_label_is_ignored_in_the_example() -> None:
    """C02, the token case."""
    body = nn.Sequential(nn.Linear(4, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model = multitask(
        t=Task(body, lambda t, f, b: F.cross_entropy(t.head(f).flatten(0, 1), b["y"].view(-1)),
               head=nn.Linear(WIDTH, 3))
    )  # fmt: skip
    batches = {"t": {"x": rows(6, 5, 4), "y": labels(6, 5)}}
    made = captured(model, batches)
    assert made.graph.operators[-1].layout is Layout.WHOLE
    batches["t"]["y"][1:, 1:] = -100
    assert_parity(model, batches, made)


@pytest.mark.parametrize("mask", [torch.bool, torch.int64, torch.float64])
@pytest.mark.parametrize("full", [True, False])
def test_masked_means_are_whole_even_if_the_example_is_not_padded(mask: torch.dtype, full: bool) -> None:
    def loss(t: Any, f: Tensor, b: Any) -> Tensor:
        return (t.head(f).pow(2).sum(-1) * b["mask"]).sum() / b["mask"].sum()

    keep = torch.ones(7, 5) if full else torch.arange(5) < torch.tensor([5, 3, 1, 2, 4, 5, 1])[:, None]
    model = multitask(t=Task(nn.Linear(4, WIDTH), loss, head=nn.Linear(WIDTH, 3)))
    batches = {"t": {"x": rows(7, 5, 4), "mask": keep.to(mask)}}
    made = captured(model, batches)
    assert made.graph.operators[-1].layout is Layout.WHOLE
    assert_parity(model, batches, made)


def test_contrastive_encoders_are_split_and_the_loss_is_whole() -> None:
    """C18, C06: towers shared between tasks, temperature in glue."""
    image = Tower()
    model = multitask(it=Contrastive(image, Tower()), ia=Contrastive(image, Tower(1)))
    batches = {
        "it": {"u": rows(6, 5, 4), "v": rows(6, 5, 4, seed=1)},
        "ia": {"u": rows(5, 5, 4, seed=2), "v": rows(5, 5, 4, seed=3)},
    }
    made = captured(model, batches)
    whole = {name for name, layout in layouts(made).items() if layout is Layout.WHOLE}
    assert whole == {"it/loss", "ia/loss"}
    assert "ia/first.blocks.1" in layouts(made)
    block = made.graph.operator("ia/first.blocks.1")
    assert all(p.startswith("tasks.it.first.blocks.1.") for p in block.parameters)
    assert made.graph.operator("it/loss").parameters == ("tasks.it.logit_scale",)
    assert_parity(model, batches, made)


def test_batch_norm_is_whole_pinned_and_in_order() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = (
                nn.Linear(4, WIDTH),
                nn.BatchNorm1d(5),
                nn.Linear(WIDTH, WIDTH),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.norm(self.first(x)).relu())

    body = Body()
    loss = lambda t, f, b: F.mse_loss(t.head(f), b["y"])  # noqa: E731
    model = multitask(
        a=Task(body, loss, head=nn.Linear(WIDTH, 3)), b=Task(body, loss, head=nn.Linear(WIDTH, 3))
    )
    batch = {"x": rows(7, 5, 4), "y": rows(7, 5, 3, seed=1)}
    made = captured(model, {"a": batch, "b": batch})
    first, second = made.graph.operator("a/body.norm"), made.graph.operator("b/body.norm")
    assert first.layout is second.layout is Layout.WHOLE
    assert first.pin == second.pin == "buffers:tasks.a.body.norm"
    assert second.after == (first.name,)
    assert layouts(made)["a/body.first"] is layouts(made)["b/body.second"] is Layout.SPLIT
    assert_parity(model, {"a": batch, "b": batch}, made)


def test_folded_clips_hold_two_entries_a_row() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Tower()

        def forward(self, x: Tensor) -> Tensor:
            clips, frames = x.shape[:2]
            return self.inner(x.view(clips * frames, *x.shape[2:])).view(clips, frames, -1).mean(1)

    model = multitask(
        t=Task(Folded(), lambda t, f, b: F.mse_loss(t.head(f), b["y"]), head=nn.Linear(WIDTH, 3))
    )
    batches = {"t": {"x": rows(7, 2, 5, 4), "y": rows(7, 3)}}
    made = captured(model, batches)
    assert not made.coarse
    blocks = [v for v in made.graph.values if "blocks" in v.name]
    assert {(v.dim, v.per_row) for v in blocks} == {(0, 2)}
    assert_parity(model, batches, made)


class Padded(nn.Module):
    """Masks from lengths over a torch encoder; last token of each row."""

    def __init__(self, batch_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, batch_first=batch_first)
        self.embed = nn.Embedding(11, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 3, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.batch_first = batch_first

    def forward(self, batch: Any) -> Tensor:
        ids, lengths = batch["ids"], batch["lengths"]
        padding = torch.arange(ids.shape[1], device=ids.device)[None, :] >= lengths[:, None]
        x = self.embed(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=padding)
        x = x if self.batch_first else x.transpose(0, 1)
        return x[torch.arange(ids.shape[0]), lengths - 1]


class Texts(LightningModule):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.encoder, self.head = Padded(batch_first), nn.Linear(WIDTH, 3)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        logits = self.head(self.encoder(batch))
        loss = F.cross_entropy(logits, batch["y"])
        self.log("hits", (logits.argmax(-1) == batch["y"]).sum())
        self.log("accuracy", (logits.argmax(-1) == batch["y"]).float().mean().item())
        return {"loss": loss, "twice": loss * 2}


def texts(n: int, length: int) -> dict[str, Tensor]:
    lengths = 1 + labels(n, classes=length, seed=2)
    return {"ids": labels(n, length, classes=11), "lengths": lengths, "y": labels(n, seed=1)}


@pytest.mark.parametrize("batch_first", [True, False])
def test_lengths_change_from_batch_to_batch(batch_first: bool) -> None:
    """C13: shapes and rows of other batches than the example; rows in dimension 1."""
    model = multitask(t=Texts(batch_first))
    made = captured(model, {"t": texts(6, 5)})
    assert not made.coarse
    names = [o.name for o in made.graph.operators]
    assert [n for n in names if "layers" in n] == [f"t/encoder.encoder.layers.{i}" for i in range(3)]
    assert {v.dim for v in made.graph.values if "layers" in v.name} == {0 if batch_first else 1}
    assert all(o.layout is Layout.SPLIT for o in made.graph.operators)
    for n, length in ((6, 5), (4, 9), (3, 3), (1, 9)):
        assert_parity(model, {"t": texts(n, length)}, made)


def test_zero_initialised_layers_do_not_hide_the_rows() -> None:
    model, batches = one(lambda t, f, b: F.mse_loss(t.head(f), b["y"]), y=rows(7, 3, seed=1))
    nn.init.zeros_(model.tasks["t"].head.weight)
    nn.init.zeros_(model.tasks["t"].head.bias)
    made = captured(model, batches)
    assert {o.layout for o in made.graph.operators} == {Layout.SPLIT}
    assert_parity(model, batches, made)


def test_in_place_operations_spare_what_others_read() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layers(x)
            before = y * 1
            y.mul_(2).add_(before)
            return y.masked_fill_(y > 1, 0.5)

    model, batches = one(lambda t, f, b: F.mse_loss(t.head(f), b["y"]), Body(), y=rows(7, 5, 3))
    made = captured(model, batches)
    assert not made.coarse
    assert_parity(model, batches, made)


def test_no_grad_inside_a_step_stays() -> None:
    def loss(t: Any, f: Tensor, b: Any) -> Tensor:
        with torch.no_grad():
            target = t.head(f)
        return (t.head(f).detach() - f.mean(-1, keepdim=True)).pow(2).mean() + (target * f[:, :3]).mean()

    model, batches = one(loss)
    assert_parity(model, batches, captured(model, batches))


@pytest.mark.parametrize("shared", [True, False])
def test_skip_connections_and_tuples(shared: bool) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(x).tanh(), other + x

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(4, WIDTH)
            layer = Layer()
            self.layers = nn.ModuleList([layer if shared else Layer() for _ in range(3)])
            if shared:
                self.layers.append(Layer())

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            skip, other = x, x
            for layer in self.layers:
                x, other = layer(x, other)
            return torch.cat([x + skip, other], -1)[..., :WIDTH]

    model, batches = one(lambda t, f, b: F.mse_loss(t.head(f), b["y"]), Body(), y=rows(7, 5, 3))
    made = captured(model, batches)
    assert not made.coarse
    assert len([o for o in made.graph.operators if "layers" in o.name]) == (4 if shared else 3)
    assert_parity(model, batches, made)


def test_two_embeddings_make_one_stem() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.place = nn.Linear(4, WIDTH), nn.Embedding(5, WIDTH)
            self.kind = nn.Linear(4, WIDTH)
            self.blocks = nn.Sequential(Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(self.token(x) + self.kind(x.flip(1)) + self.place(torch.arange(x.shape[1])))

    model, batches = one(lambda t, f, b: F.mse_loss(t.head(f), b["y"]), Body(), y=rows(7, 5, 3))
    made = captured(model, batches)
    names = [o.name for o in made.graph.operators]
    assert names == ["t/body.token", "t/body.blocks.0", "t/body.blocks.1", "t/head"]
    assert len({o.signature for o in made.graph.operators[1:3]}) == 1
    assert_parity(model, batches, made)


def test_recurrent_modules() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            _, last = self.rnn(x)
            return last[-1]

    model, batches = one(lambda t, f, b: F.mse_loss(t.head(f), b["y"]), Body(), y=rows(7, 3))
    made = captured(model, batches)
    assert {o.layout for o in made.graph.operators} == {Layout.SPLIT}
    assert_parity(model, batches, made)


def test_glue_that_couples_in_mid_network_is_an_operator_of_its_own() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(4, WIDTH)
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](self.embed(x))
            x = x - x.mean(0)
            return self.blocks[1](x / x.abs().max())

    model, batches = one(lambda t, f, b: F.mse_loss(t.head(f), b["y"]), Body(), y=rows(7, 5, 3))
    made = captured(model, batches)
    assert not made.coarse
    whole = [o.name for o in made.graph.operators if o.layout is Layout.WHOLE]
    assert len(whole) == 1
    assert made.graph.operator("t/body.blocks.1").layout is Layout.SPLIT
    assert_parity(model, batches, made)


def test_named_classes_are_operators() -> None:
    model, batches = one(lambda t, f, b: F.mse_loss(t.head(f), b["y"]), y=rows(7, 3))
    made = captured(model, batches, operators=(Tower,))
    assert [o.name for o in made.graph.operators] == ["t/body", "t/head"]
    assert_parity(model, batches, made)


def test_tuples_between_layers_are_handed_over_tensor_by_tensor() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, state: Any) -> Any:
            x, (other, nothing) = state
            return self.inner(x).tanh(), [other + x, nothing]

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(4, WIDTH)
            self.layers = nn.Sequential(Layer(), Layer(), Layer())

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            y, (other, _) = self.layers((x, [x, None]))
            return y + other

    model, batches = one(lambda t, f, b: F.mse_loss(t.head(f), b["y"]), Body(), y=rows(7, 5, 3))
    made = captured(model, batches)
    assert not made.coarse
    assert len(made.graph.operator("t/body.layers.1").inputs) == 2
    assert_parity(model, batches, made)


def test_shapes_that_depend_on_values_are_marked() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(4, WIDTH)
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, batch: Any) -> Tensor:
            x = self.blocks[0](self.embed(batch["x"]))
            return self.blocks[1](x[:, : batch["n"].max()])

    class Cropped(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = Body()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.body(batch).mean(1).pow(2).mean()

    model = multitask(t=Cropped())
    batches = {"t": {"x": rows(7, 5, 4), "n": torch.tensor([1, 2, 4, 3, 1, 2, 3])}}
    made = captured(model, batches)
    assert not made.coarse
    assert {v.name: v.dynamic for v in made.graph.values if "blocks" in v.name} == {
        "t/tasks_t_body_blocks_0": False,
        "t/tasks_t_body_blocks_1": True,
    }
    assert_parity(model, batches, made)
    batches["t"]["n"][2] = 3
    assert_parity(model, batches, made)


def test_masks_and_sizes_come_from_the_batch() -> None:
    """No operator receives another's activations to read their size."""
    model = multitask(t=Texts(True))
    made = captured(model, {"t": texts(6, 5)})
    assert all(len(o.inputs) <= 1 for o in made.graph.operators)
    layers = [o for o in made.graph.operators if "layers" in o.name]
    assert len({o.signature for o in layers}) == 1


_TERMS = [
    lambda t, f, b: t.head(f).pow(2).mean(),
    lambda t, f, b: t.head(f).pow(2).mean(0).sum(),
    lambda t, f, b: t.head(f).sum() / b["x"].shape[0],
    lambda t, f, b: t.head(f).abs().sum(),
    lambda t, f, b: t.head(f).logsumexp((0, 1)),
    lambda t, f, b: (f @ f.T).tanh().mean(),
    lambda t, f, b: (f - f.mean(0)).pow(2).mean(),
    lambda t, f, b: t.head.weight.norm(),
    lambda t, f, b: (f.sum(1) > 0).double().mean(),
    lambda t, f, b: f.sort(0).values.diff(dim=0).mean(),
    lambda t, f, b: f.roll(1, 0).mul(f).mean(),
    lambda t, f, b: f.cumsum(0).mean(),
    lambda t, f, b: f[0].mean(),
    lambda t, f, b: F.softplus(t.head(f)).max(1).values.mean(),
]


@settings(max_examples=25, deadline=None)
@given(
    first=st.sampled_from(_TERMS),
    second=st.sampled_from(_TERMS),
    joined=st.sampled_from([torch.add, torch.mul, torch.maximum, lambda a, b: a.exp() + b]),
    parts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_no_loss_is_silently_different(first: Any, second: Any, joined: Any, parts: list[int]) -> None:
    model, batches = one(
        lambda t, f, b: joined(first(t, f, b), second(t, f, b)) + 0 * f.mean(), nn.Linear(4, WIDTH)
    )
    batches["t"]["x"] = rows(7, 4)
    made = captured(model, batches)
    assert not made.coarse
    assert_parity(model, batches, made, parts)


class Residual(nn.Module):
    """Changes its input in place first, and couples rows where ``normed``."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.relu, self.conv = nn.ReLU(inplace=True), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.relu(x))) + 1


@pytest.mark.parametrize("normed", [True, False])
def test_convolutions_that_work_in_place(normed: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3), nn.ReLU(inplace=True), nn.BatchNorm2d(WIDTH))
            self.layers = nn.Sequential(Residual(normed), Residual(normed), Residual(normed))

        def forward(self, x: Tensor) -> Tensor:
            assert x.dim() == 4
            assert x.shape[1] == 3
            x = self.layers(self.stem(x))
            return F.adaptive_avg_pool2d(x, 1).flatten(1)

    model = multitask(t=Task(Net(), lambda t, f, b: F.mse_loss(t.head(f), b["y"]), head=nn.Linear(WIDTH, 3)))
    batches = {"t": {"x": rows(7, 3, 6, 6), "y": rows(7, 3)}}
    made = captured(model, batches)
    blocks = [o for o in made.graph.operators if "layers" in o.name]
    assert {o.layout for o in blocks} == {Layout.WHOLE if normed else Layout.SPLIT}
    assert len({o.signature for o in blocks}) == 1
    assert_parity(model, batches, made)


def test_a_class_token_a_causal_mask_and_attention_pooling() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
            self.embed, self.encoder = nn.Linear(4, WIDTH), nn.TransformerEncoder(layer, 2)
            self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
            self.pool = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            n, length, _ = x.size()
            x = torch.cat([self.token.expand(n, -1, -1), self.embed(x)], 1)
            mask = nn.Transformer.generate_square_subsequent_mask(length + 1)
            x = self.encoder(x, mask=mask.to(x), is_causal=True)
            pooled, _ = self.pool(self.token.expand(n, -1, -1), x, x, need_weights=False)
            return pooled[:, 0]

    model, batches = one(lambda t, f, b: F.cross_entropy(t.head(f), b["y"]), Pooled(), y=labels(7))
    made = captured(model, batches)
    assert {o.layout for o in made.graph.operators} == {Layout.SPLIT}
    assert all(len(o.inputs) <= 1 for o in made.graph.operators)
    assert_parity(model, batches, made)
    assert_parity(model, {"t": {"x": rows(5, 3, 4), "y": labels(5)}}, made)
