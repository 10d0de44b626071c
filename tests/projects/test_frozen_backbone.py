"""The project of ``frozen_backbone.py`` under Spindle: only ``strategy=`` differs."""

from __future__ import annotations

import functools

import pytest

from lightning_spindle import inspect
from lightning_spindle.graph import Layout
from tests.projects import frozen_backbone
from tests.support.fitting import Fit, assert_same_fit, plain_fit, spindle_fit

OPTIONS = {"max_epochs": 2, "max_steps": -1}


@functools.cache
def reference() -> Fit:
    return plain_fit(frozen_backbone.model, frozen_backbone.data, **OPTIONS)


@pytest.mark.parametrize("devices", [2, 4])
def test_equal_to_one_process(devices: int) -> None:
    """Two epochs with validation: every parameter, loss, metric and buffer."""
    ours = spindle_fit(frozen_backbone.model, frozen_backbone.data, devices, **OPTIONS)
    assert_same_fit(ours, reference())


def test_it_learns_and_measures() -> None:
    """What is compared is there: metrics of training and validation for each task; a backbone that stays."""
    fit = reference()
    tasks = {"kind": ["acc", "f1", "auroc"], "tags": ["acc", "map"], "size": ["mae", "r2"]}
    expected = {f"{s}/{t}_{m}" for s in ("train", "val") for t, ms in tasks.items() for m in [*ms, "loss"]}
    assert fit.metrics.keys() >= expected
    assert fit.steps[-1]["loss"] < fit.steps[0]["loss"]
    fresh = frozen_backbone.model().double()
    for name, value in [*fresh.backbone.named_parameters(), *fresh.backbone.named_buffers()]:
        everything = fit.parameters | fit.buffers
        assert (everything[f"backbone.{name}"] == value).all(), name


def test_it_is_taken_apart() -> None:
    """Without a warning: the backbone's frozen stages and the heads of each task."""
    found = inspect(frozen_backbone.model(), frozen_backbone.data())
    assert not found.reasons
    operators = [o for o in found.capture.graph.operators if o.layout is Layout.SPLIT]
    assert len([o for o in operators if "backbone.stages" in o.name]) == 3 * 3
    assert {o.name.split("/")[1] for o in operators} >= {"heads.kind", "heads.tags", "heads.size"}
