"""PARITY for parameters of every kind: used several times, partly frozen, unused, made late, and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.fitting import assert_same_fit, plain_fit, spindle_fit
from tests.support.small import (
    Given,
    Layer,
    Part,
    Sample,
    Small,
    forced_fit,
    metagraph,
    multi,
    placement,
    random_samples,
    together,
)


class Kinds(Small):
    """An encoder for both sides of a pair, of which the biases are frozen; a part that nothing uses."""

    def __init__(self, encoder: Layer) -> None:
        super().__init__()
        self.encoder, self.unused = encoder, Layer(2, 2)
        self.bottom, self.top = Layer(4, 4), Layer(4, 4)
        self.scale = nn.ParameterList([nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(2.0))])
        self.register_buffer("offset", torch.linspace(-1, 1, 4))
        self.register_buffer("fixed", torch.tensor(0.1), persistent=False)
        self.encoder.linear.bias.requires_grad_(False)
        self.bottom.requires_grad_(False)
        self.head: Layer | None = None

    def configure_model(self) -> None:
        if self.head is None:
            torch.manual_seed(3)
            self.head = Layer(4, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        assert self.head is not None
        a, b = self.encoder(batch["x"]), self.encoder(batch["z"])
        mixed = self.top(self.bottom(a * self.scale[0] + b * self.scale[1]) + self.offset)
        loss = F.mse_loss(self.head(mixed), batch["y"]) + self.fixed * (a - b).square().mean()
        self.log("loss", loss)
        return loss


class Recurrent(Small):
    """A GRU, which keeps weak references to its weights, and an LSTM with a weight that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(3, 4, num_layers=2, batch_first=True), Layer(4, 1, last=True)
        self.lstm = nn.utils.parametrizations.weight_norm(nn.LSTM(4, 4, batch_first=True), "weight_hh_l0")

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        hidden, _ = self.lstm(self.gru(batch["x"].unsqueeze(1).expand(-1, 3, -1))[0])
        return F.mse_loss(self.head(hidden[:, -1]), batch["y"])


def model(optimizer: str) -> Any:
    torch.manual_seed(0)
    encoder = Layer(3, 4)
    return multi({name: Kinds(encoder) for name in "ab"}, optimizer)


def data() -> Any:
    samples = {name: random_samples(11, seed, x=(3,), z=(3,), y=(1,)) for seed, name in enumerate("ab")}
    return together(a=Given(samples["a"], [4, 5, 2]), b=Given(samples["b"], [3, 3, 1]))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parameters_of_every_kind(optimizer: str) -> None:
    """The encoder's two uses lie on other ranks than what follows; it is shared by two tasks besides."""

    built = model(optimizer)
    built.configure_model()
    groups = {
        "a/": (0, 1),
        "a/encoder": (2, 1),
        "a/top": (1,),
        "b/": (2,),
        "b/encoder": (0,),
        "b/head": (1, 2),
    }
    plan = placement(metagraph(built, data()), 3, groups)
    strategy = {"plan": plan, "operators": (Part,)}
    ours = spindle_fit(lambda: model(optimizer), data, 3, strategy=strategy, max_steps=3)
    reference = plain_fit(lambda: model(optimizer), data, max_steps=3)
    assert_same_fit(ours, reference)
    fresh = {name: p.detach().double() for name, p in model(optimizer).named_parameters()}
    still = {name for name, value in fresh.items() if torch.equal(value, reference.parameters[name])}
    assert {name.split(".")[2] for name in still} == {"encoder", "bottom", "unused"}
    assert len(reference.parameters) == 2 + 2 * 10


@pytest.mark.parametrize("groups", [{"a/": (0,), "b/": (1,)}, {"a/": (0, 1), "b/": (1,)}])
def test_recurrent_modules_are_dropped_and_completed(groups: dict[str, tuple[int, ...]]) -> None:
    def recurrent() -> Any:
        torch.manual_seed(0)
        return multi({name: Recurrent() for name in "ab"})

    assert_same_fit(
        forced_fit(recurrent, data, 2, groups, max_steps=3), plain_fit(recurrent, data, max_steps=3)
    )
