"""The marks for coupled samples are identities, and capture sees through them."""

import doctest
from typing import Any

import torch
from torch.nn import functional as F

import lightning_spindle
from lightning_spindle import functional
from lightning_spindle.functional import batch_sum, gather_batch
from lightning_spindle.graph import Layout
from tests.support.fitting import assert_same_fit, captured, plain_fit
from tests.support.small import Given, Layer, Part, Small, forced_fit, multi, random_samples, together


class Marked(Small):
    """Every sample against all others, and a mean over entries that have a weight."""

    def __init__(self, marked: bool) -> None:
        super().__init__()
        self.a, self.b, self.marked = Layer(3, 4), Layer(2, 4), marked

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        gather, total = (gather_batch, batch_sum) if self.marked else (lambda x: x, lambda x: x)
        a, b = self.a(batch["x"]), self.b(batch["y"])
        logits = gather(a) @ gather(b).t()
        weight = (batch["x"] > 0).to(a.dtype).mean(-1)
        loss = F.cross_entropy(logits, torch.arange(len(logits)))
        loss = loss + total((a.square().sum(-1) * weight).sum()) / total(weight.sum())
        self.log("loss", loss)
        return loss


def model(marked: bool = True) -> Any:
    torch.manual_seed(0)
    return multi({"pairs": Marked(marked)})


def data() -> Any:
    return together(pairs=Given(random_samples(10, 1, x=(3,), y=(2,)), [5, 3, 2]))


def test_identity() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert gather_batch(x) is x
    assert batch_sum(x) is x
    assert lightning_spindle.functional is functional
    assert doctest.testmod(functional, extraglobs={"torch": torch}).failed == 0


def test_what_follows_a_mark_runs_whole() -> None:
    """As documented: the operators of the marked and of the unmarked step are the same, the loss is WHOLE."""
    with_marks = captured(model(), data(), operators=(Part,))
    without = captured(model(marked=False), data(), operators=(Part,))
    layouts = {o.name: o.layout for o in with_marks.graph.operators}
    assert layouts == {o.name: o.layout for o in without.graph.operators}
    assert not with_marks.coarse
    assert layouts["pairs/a"] is layouts["pairs/b"] is Layout.SPLIT
    loss = next(r for r in with_marks.graph.results if r.is_loss)
    assert layouts[with_marks.graph.producers()[loss.value]] is Layout.WHOLE


def test_parity() -> None:
    ours = forced_fit(model, data, 3, {"pairs/": (0, 1, 2), "pairs/b": (2, 1)}, max_steps=3)
    assert_same_fit(ours, plain_fit(lambda: model(marked=False), data, max_steps=3))
