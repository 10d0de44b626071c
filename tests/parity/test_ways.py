"""PARITY of fits of one LightningModule under Spindle with the same fit in one plain process."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_spindle.strategy import SpindleStrategy
from tests.support import ways
from tests.support.fitting import Fit, assert_same_fit, fit_once, plain_fit, spindle_fit
from tests.support.ranks import run_ranks


def made(kind: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(0)
        return kind(*args)

    return make


@functools.cache
def reference(kind: Callable[..., Any], data: Callable[..., Any], *args: Any) -> Fit:
    return plain_fit(made(kind), lambda: data(*args))


def check(devices: int, kind: Callable[..., Any], data: Callable[..., Any], *args: Any) -> None:
    ours = spindle_fit(made(kind), lambda: data(*args), devices)
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


class Hooked(ways.Weighted):
    """Notes its hooks, with what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.events.append(f"start {batch_idx} {sorted(batch)}")

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.events.append(f"before backward {float(loss):.9f}")

    def on_after_backward(self) -> None:
        self.events.append(f"after backward {float(self.log_variances.grad.sum()):.9f}")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.events.append(type(optimizer).__name__)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        values = {name: round(float(value), 9) for name, value in outputs.items()}
        self.events.append(f"end {batch_idx} {values} {batch['a']['x'].shape}")


def events(strategy: Any, rank: int, size: int) -> list[str]:
    model = made(Hooked)()
    fit_once(lambda: model, ways.SharedData, strategy(), devices=size, max_steps=6, accumulate_grad_batches=2)
    return model.events


def test_hooks_of_the_module() -> None:
    """The same hooks in the same order with the same losses, gradients, outputs and batches on every rank."""
    (plain,) = run_ranks(functools.partial(events, lambda: "auto"), 1, init_group=False)
    ours = run_ranks(functools.partial(events, SpindleStrategy), 2, timeout_s=120)
    assert ours == [plain, plain]
