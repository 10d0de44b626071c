"""C25, C35 and C51: ranks with nothing to train, modules' modes, parameters of the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F

from tests.support.fitting import Fit, assert_same_fit, plain_fit
from tests.support.ranks import run_ranks
from tests.support.small import (
    Given,
    Layer,
    Part,
    Sample,
    Small,
    Validated,
    forced_fit,
    multi,
    random_samples,
    together,
)

WIDTH = 4


# ------------------------------------------------------------------------------------------ C25
class Aligned(Small):
    """A frozen encoder, a projector that trains, a loss without parameters that couples rows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Layer(3, WIDTH).requires_grad_(False)
        self.project = Layer(WIDTH, WIDTH)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        features = self.project(self.encoder(batch["x"]))
        logits = features @ batch["z"].T
        loss = F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class RatesAndSteps(Callback):
    """The learning rate and the global step are those of one process, on every rank."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        steps = batch_idx + 1
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        assert trainer.global_step == steps
        assert rates == [pytest.approx(0.05 * 0.5**steps)] * len(rates)


def aligned_model() -> Any:
    torch.manual_seed(0)
    return multi({"t": Aligned()}, "adamw")


def aligned_data() -> Any:
    return together(t=Given(random_samples(13, 1, x=(3,), z=(WIDTH,)), [5, 5, 3]))


@pytest.mark.parametrize("devices", [3, 4])
def test_c25_ranks_with_nothing_to_train(devices: int) -> None:
    """A frozen encoder, the projector and the loss on a rank each; at N=4 one rank has no operator at all."""
    groups = {"t/encoder": (1,), "t/project": (0,), "t/loss": (2,)}
    options = {"max_steps": 3, "callbacks": [RatesAndSteps()]}
    ours = forced_fit(aligned_model, aligned_data, devices, groups, **options)
    assert_same_fit(ours, plain_fit(aligned_model, aligned_data, **options))
    held = [sorted(n.split(".")[2] for n in fit.steps[0]["parameters"]) for fit in ours]
    assert held == [["project"] * 2, ["encoder"] * 2, [], []][:devices]


# ------------------------------------------------------------------------------------------ C35
class Modes(Small):
    """A norm that its author keeps in evaluation mode, beside an encoder that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Layer(3, WIDTH), nn.Dropout(0.0))
        self.norm, self.late = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
        self.norm.requires_grad_(False).eval()
        self.head = Layer(WIDTH, 1, last=True)

    def on_train_epoch_start(self) -> None:
        self.late.eval()

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.head(self.late(self.norm(self.encoder(batch["x"])))), batch["y"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        loss = F.mse_loss(self.head(self.late(self.norm(self.encoder(batch["x"])))), batch["y"])
        self.log("val_loss", loss)


class SeenModes(Callback):
    """Lightning's rule: modes are kept in training, and restored after a validation in the middle."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        own = {n: m.training for n, m in module.named_modules() if n.startswith("tasks.t.")}
        assert own == {n: n not in ("tasks.t.norm", "tasks.t.late") for n in own}, (batch_idx, own)

    def on_validation_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        assert not any(m.training for m in module.modules())


def modes_model() -> Any:
    torch.manual_seed(0)
    return multi({"t": Modes()}, "sgd")


def modes_data() -> Any:
    samples = random_samples(13, 1, x=(3,), y=(1,))
    return together(t=Validated(samples, [4, 4, 3, 2], validation=random_samples(3, 2, x=(3,), y=(1,))))


def test_c35_modes_are_kept_and_restored_on_every_rank() -> None:
    groups = {"t/": (1,), "t/encoder": (0, 1), "t/head": (1, 0)}
    options = {"max_steps": 4, "val_check_interval": 2, "callbacks": [SeenModes()]}
    reference = plain_fit(modes_model, modes_data, **options)
    ours = forced_fit(modes_model, modes_data, 2, groups, **options)
    assert_same_fit(ours, reference)
    fresh = dict(modes_model().named_buffers())
    for fit in ours:
        for name, buffer in fit.buffers.items():
            assert torch.equal(buffer, fresh[name].to(buffer)), f"{name} moved"


class Evaluated(Modes):
    """A pretrained encoder as it comes from a library: in evaluation mode, though meant to train."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.eval()


def warned(make_model: Any, make_data: Any) -> list[str]:
    """What a fit on one rank warns about."""
    import warnings

    from tests.support.fitting import fit_once

    def fit(rank: int, size: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit_once(make_model, make_data, "spindle", max_steps=1)
        return [str(w.message) for w in caught]

    return run_ranks(fit, 1, init_group=False)[0]


def test_c35_a_trainable_module_in_eval_mode_is_named() -> None:
    def model() -> Any:
        torch.manual_seed(0)
        return multi({"t": Evaluated()}, "sgd")

    (message,) = [m for m in warned(model, modes_data) if "in evaluation mode, but trainable" in m]
    assert "trainable: tasks.t.encoder." in message
    assert "norm" not in message
    assert not any("in evaluation mode" in m for m in warned(modes_model, modes_data))


# ------------------------------------------------------------------------------------------ C51
class Uncertainty(Part):
    """A learnable weight of each task's loss, in one object that all tasks share."""

    def __init__(self, tasks: str) -> None:
        super().__init__()
        self.log_variance = nn.ParameterDict({t: nn.Parameter(torch.tensor(0.3)) for t in tasks})

    def forward(self, task: str, loss: torch.Tensor) -> torch.Tensor:
        return loss * torch.exp(-self.log_variance[task]) + self.log_variance[task]


class Weighted(Small):
    def __init__(self, name: str, weights: Any) -> None:
        super().__init__()
        self.name, self.weights, self.head = name, weights, Layer(3, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        loss = self.weights(self.name, F.mse_loss(self.head(batch["x"]), batch["y"]))
        self.log("loss", loss)
        return loss


class Forgetful(Weighted):
    """Forgets the weights in its optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def weighted_model(kind: type[Weighted] = Weighted) -> Any:
    torch.manual_seed(0)
    weights = Uncertainty("ab")
    return multi({name: kind(name, weights) for name in "ab"}, "adamw")


def weighted_data() -> Any:
    return together(**{t: Given(random_samples(20, k, x=(3,), y=(1,)), [4] * 5) for k, t in enumerate("ab")})


class WeightsSaved(Callback):
    """A checkpoint has the weights as they are."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        if trainer.global_rank == 0:
            saved = {k: float(v) for k, v in state.items() if "log_variance" in k}
            assert len(saved) == 4, "both tasks list the shared object"
            assert 0.3 not in saved.values()


def same_weights(ours: list[Fit], reference: Fit) -> None:
    assert_same_fit(ours, reference)
    moved = [n for n in reference.parameters if "log_variance" in n]
    assert len(moved) == 2
    assert all(reference.parameters[n] != 0.3 for n in moved)


def test_c51_learnable_loss_weights() -> None:
    """Losses on different ranks; five AdamW steps."""
    groups = {"a/": (0,), "b/": (1,), "a/head": (1, 0), "b/head": (0, 1)}
    options = {"max_steps": 5, "callbacks": [WeightsSaved()]}
    ours = forced_fit(weighted_model, weighted_data, 2, groups, **options)
    same_weights(ours, plain_fit(weighted_model, weighted_data, **options))


def test_c51_a_parameter_in_no_optimizer_is_named() -> None:
    found = warned(lambda: weighted_model(Forgetful), weighted_data)
    (message,) = [m for m in found if "in no optimizer" in m]
    assert "log_variance.a" in message
    assert "log_variance.b" in message
    assert "head" not in message
    assert not any("in no optimizer" in m for m in warned(weighted_model, weighted_data))
