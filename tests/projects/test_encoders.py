"""The project of ``encoders.py`` under Spindle: only ``strategy=`` differs."""

from __future__ import annotations

import functools
import warnings

import pytest

from lightning_spindle.capture import CaptureWarning
from lightning_spindle.planner.contraction import contract
from tests.projects import encoders
from tests.support.fitting import Fit, assert_same_fit, captured, plain_fit, spindle_fit
from tests.support.library import require

OPTIONS = {"max_epochs": 2, "max_steps": -1}


@pytest.fixture(autouse=True)
def _transformers() -> None:
    require("transformers")


@functools.cache
def reference() -> Fit:
    return plain_fit(encoders.model, encoders.data, **OPTIONS)


@pytest.mark.parametrize("devices", [2, 4])
def test_equal_to_one_process(devices: int) -> None:
    """Two epochs with validation, batches of unlike lengths and ragged last ones."""
    assert_same_fit(spindle_fit(encoders.model, encoders.data, devices, **OPTIONS), reference())


def test_layers_are_operators() -> None:
    """Without a warning: three layers of Bert in two tasks, two of ViT in two."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        capture = captured(encoders.model(), encoders.data())
    layers = sum(len(m.layers) for m in contract(capture.graph).metaops if len(m.layers) > 1)
    assert layers >= 2 * 3 + 2 * 2
