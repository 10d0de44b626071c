"""In one process the marks are identities; what is computed from gathered rows alone runs whole."""

import doctest
from typing import Any

import torch
from torch.nn import functional as F

import lightning_spindle
from lightning_spindle import functional
from lightning_spindle.functional import batch_rows, batch_sum, gather_batch
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
    assert torch.equal(batch_rows(x), torch.arange(3))
    assert doctest.testmod(functional, optionflags=doctest.ELLIPSIS).failed == 0


def test_a_loss_of_gathered_rows_alone_runs_whole() -> None:
    """It would be the same on every device. A step without marks has the same layouts."""
    for marked in (True, False):
        capture = captured(model(marked), data(), operators=(Part,))
        layouts = {o.name: o.layout for o in capture.graph.operators}
        assert not capture.coarse
        assert layouts["pairs/a"] is layouts["pairs/b"] is Layout.SPLIT
        loss = next(r for r in capture.graph.results if r.is_loss)
        assert layouts[capture.graph.producers()[loss.value]] is Layout.WHOLE


def test_parity() -> None:
    ours = forced_fit(model, data, 3, {"pairs/": (0, 1, 2), "pairs/b": (2, 1)}, max_steps=3)
    assert_same_fit(ours, plain_fit(lambda: model(marked=False), data, max_steps=3))
