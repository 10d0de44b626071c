"""PARITY of fits of one LightningModule under Spindle with the same fit in one plain process."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import ways
from tests.support.fitting import Fit, assert_same_fit, plain_fit, spindle_fit


def made(kind: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    def make() -> Any:
        import torch

        torch.manual_seed(0)
        return kind(*args)

    return make


@functools.cache
def reference(kind: Callable[..., Any], data: Callable[..., Any], *args: Any) -> Fit:
    return plain_fit(made(kind), lambda: data(*args), max_steps=10)


def check(devices: int, kind: Callable[..., Any], data: Callable[..., Any], *args: Any) -> None:
    ours = spindle_fit(made(kind), lambda: data(*args), devices, max_steps=10)
    assert_same_fit(ours, reference(kind, data, *args))


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("kind", [ways.Shared, ways.Weighted])
def test_dict_of_batches(devices: int, kind: Callable[..., Any]) -> None:
    """A sum with fixed and with learned weights (C51); logs guess batch sizes as Lightning does (C41)."""
    check(devices, kind, ways.SharedData)


def test_loss_weight_that_a_task_uses_too() -> None:
    check(2, ways.Tempered, ways.SharedData)


@pytest.mark.parametrize("devices", [1, 3])
def test_loader_that_ends(devices: int) -> None:
    check(devices, ways.Ended, ways.SharedData, "max_size")


@pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")
def test_rows_of_two_tasks_that_meet() -> None:
    check(2, ways.Mixed, ways.SharedData)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_one_task(devices: int) -> None:
    """Batches are tuples from one loader; two loaders are validated one after the other."""
    check(devices, ways.Alone, ways.AloneData)


def test_one_task_with_one_validation_loader() -> None:
    check(2, ways.Alone, ways.AloneData, 1)
