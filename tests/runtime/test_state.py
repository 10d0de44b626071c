"""Localised parameters: identity, completeness, and checkpoints as one process writes them."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from lightning_spindle.runtime.state import LocalisedModel, LocalisedOptimizer
from lightning_spindle.runtime.transport import world_transport
from tests.support.ranks import run_ranks

HELD = {"0.weight": (0,), "0.bias": (0, 1), "1.weight": (1,), "1.bias": (1, 2)}
CPU = torch.device("cpu")


def build(kind: str = "adamw") -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.BatchNorm1d(2))
    groups = [
        {"params": [model[0].weight, model[1].weight]},
        {"params": [model[0].bias, model[1].bias, model[2].weight, model[2].bias], "weight_decay": 0.0},
    ]
    make = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
    return model, make(groups, lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, p in model.named_parameters():
        if p.device.type != "meta":
            p.grad = torch.full_like(p, len(name) / 10)
    optimizer.step()


def localised(rank: int, kind: str = "adamw") -> Any:
    model, optimizer = build(kind)
    transport = world_transport(timedelta(seconds=10))
    names = {id(p): n for n, p in model.named_parameters()}
    parts = LocalisedModel(model, HELD, {"2.running_mean": 1}, transport, CPU)
    steps = LocalisedOptimizer(optimizer, parts, names)
    steps.localise()
    parts.localise()
    return model, optimizer, parts, steps, transport


def test_parameters_keep_their_identity_and_come_back() -> None:
    def rank(index: int, size: int) -> Any:
        model, optimizer, parts, _, _ = localised(index)
        ids = {n: id(p) for n, p in model.named_parameters()}
        meta = {n for n, p in model.named_parameters() if p.device.type == "meta"}
        step(model, optimizer)
        parts.consolidate()
        return meta, ids == {n: id(p) for n, p in model.named_parameters()}, dict(model.named_parameters())

    whole, optimizer = build()
    step(whole, optimizer)
    for index, (meta, same, parameters) in enumerate(run_ranks(rank, 3)):
        assert meta == {n for n, ranks in HELD.items() if index not in ranks}
        assert same
        for name, value in whole.named_parameters():
            assert torch.equal(parameters[name], value)


def test_reading_what_is_elsewhere_raises() -> None:
    def rank(index: int, size: int) -> bool:
        model, *_ = localised(index)
        with pytest.raises((NotImplementedError, RuntimeError)):
            float((model[0] if index else model[1]).weight.norm())
        return True

    assert all(run_ranks(rank, 3))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_checkpoint_is_one_process_s(kind: str) -> None:
    """C09: one file's worth of state on rank 0, keyed and ordered as without Spindle."""

    def rank(index: int, size: int) -> Any:
        model, optimizer, parts, steps, transport = localised(index, kind)
        step(model, optimizer)
        model[2].running_mean.fill_(index)
        state = {k: v.clone() for k, v in parts.state_dict().items()}
        again = [p.device.type for p in model.parameters()].count("meta")
        if index > 0:  # meta tensors cannot be sent
            state = {k: (v.device.type, v.shape, v.dtype) for k, v in state.items()}
        return state, steps.state_dict(transport, CPU), again

    whole, optimizer = build(kind)
    step(whole, optimizer)
    whole[2].running_mean.fill_(1)
    (state, steps, meta), *others = run_ranks(rank, 3)
    assert list(state) == list(whole.state_dict())
    for key, value in whole.state_dict().items():
        assert torch.equal(state[key], value), key
    expected = optimizer.state_dict()
    assert steps["param_groups"] == expected["param_groups"]
    assert steps["state"].keys() == expected["state"].keys()
    for index, entry in expected["state"].items():
        for key, value in entry.items():
            theirs = steps["state"][index][key]
            assert value == theirs if value is None else torch.equal(theirs, value)
    assert meta == 2, "the model is localised again after saving"
    for elsewhere, own, _ in others:
        assert elsewhere == {k: ("meta", v.shape, v.dtype) for k, v in whole.state_dict().items()}
        assert own["param_groups"] == expected["param_groups"]
        assert own["state"].keys() <= expected["state"].keys()
