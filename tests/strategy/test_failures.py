"""C29: a rank that raises or is killed ends all others within seconds, and its error is the one shown."""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from torchmetrics import Metric

from lightning_spindle import MultiTaskModule
from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.strategy import SpindleStrategy
from tests.strategy.ending import LIMIT_S, assert_all_ended, watch_fit
from tests.support import toys
from tests.support.fitting import fit_once, metagraph_of, placed
from tests.support.ranks import watch_ranks


class Fails(torch.autograd.Function):
    """Identity; at a rank and step of choice it fails, in forward or in backward."""

    when: "When | None" = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert Fails.when is not None
        Fails.when.maybe("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert Fails.when is not None
        Fails.when.maybe("backward")
        return gradient


class When(Callback):
    """Fails on one rank in its second training step or its first validation."""

    def __init__(self, rank: int, moment: str, how: str) -> None:
        self.rank, self.moment, self.how = rank, moment, how
        self.now: str | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.now = "train" if trainer.global_rank == self.rank and trainer.global_step == 1 else None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.now = "validation" if trainer.global_rank == self.rank else None

    def maybe(self, passage: str) -> None:
        moment = self.now if self.now == "validation" else passage
        if self.now is None or moment != self.moment:
            return
        print(f"failing at {time.monotonic()}", flush=True)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the encoder is cold")


class Fragile(torch.nn.Linear):
    """A leaf, so that it is an operator of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Fails.apply(super().forward(x))


class WithValidation(toys.Contrast):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.encoder(batch["x"], batch["length"]).mean())


def fragile(rank: int = 0) -> MultiTaskModule:
    torch.manual_seed(0)
    text, audio = toys.Encoder(4), toys.Encoder(3)
    audio.stem = Fragile(3, toys.WIDTH)
    return MultiTaskModule(
        {"audio_text": WithValidation(audio, text), "image_class": toys.Classify(toys.Encoder(5))}
    )


def fragile_data(rank: int = 0) -> Any:
    data = toys.data()
    del data.datamodules["image_text"]
    return data


def everywhere(devices: int = 3) -> ExecutionPlan:
    """The fragile operator on all ranks; around it values move and gradients are summed."""
    last = devices - 1
    groups = {
        "audio_text/encoder.stem": tuple(range(devices)),
        "audio_text/encoder": (0, last),
        "audio_text/text": tuple(sorted({1, last})),
    }

    def where(name: str) -> tuple[int, ...]:
        return groups.get(name, (last,) if name.startswith("audio_text") else (1, 0))

    Fails.when = When(99, "", "")
    return placed(metagraph_of(fragile(), fragile_data()), devices, where)


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        ("forward", "raise"),
        ("backward", "raise"),
        ("backward", "kill"),
        ("validation", "raise"),
        ("validation", "kill"),
    ],
)
def test_one_rank_fails(moment: str, how: str) -> None:
    plan = everywhere()
    when = When(1, moment, how)
    Fails.when = when
    outcomes = watch_fit(
        3,
        fragile,
        fragile_data,
        strategy=lambda rank: {"plan": plan},
        options=lambda rank: {"callbacks": [when], "val_check_interval": 1.0},
    )
    culprit, others = outcomes[1], (outcomes[0], outcomes[2])
    if how == "raise":
        assert_all_ended(outcomes, "ValueError: the encoder is cold", "audio_text")
        assert_all_ended(others, "rank 1 failed")
    else:
        assert culprit.exitcode == -signal.SIGKILL
        assert_all_ended(others, "lost its connection", "killed")


def test_failing_rank_that_goes_on_running() -> None:
    """The user's except block takes its time: the others do not wait for it."""
    plan = everywhere()
    when = When(1, "backward", "raise")
    Fails.when = when

    def body(rank: int, size: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            fit_once(
                fragile, fragile_data, SpindleStrategy(plan=plan), devices=size, callbacks=[when], max_steps=4
            )
        time.sleep(6 if rank == 1 else 0)
        return str(caught.value)

    outcomes = watch_ranks(body, 3, timeout_s=LIMIT_S)
    assert all("the encoder is cold" in o.value for o in outcomes), outcomes
    assert max(outcomes[0].seconds, outcomes[2].seconds) < outcomes[1].seconds - 2


def test_after_an_exception(tmp_path: Any) -> None:
    """No collective on the way out, metrics as before, an except block that can look at the model."""
    plan = everywhere()
    when = When(1, "backward", "raise")
    Fails.when = when

    def body(rank: int, size: int) -> str:
        model = fragile()
        saver = OnExceptionCheckpoint(tmp_path / "checkpoint.ckpt")
        with pytest.raises(RuntimeError, match="the encoder is cold"):
            fit_once(
                lambda: model,
                fragile_data,
                SpindleStrategy(plan=plan),
                devices=size,
                callbacks=[when, saver],
                max_steps=4,
                enable_checkpointing=True,
            )
        metrics = [m for m in model.modules() if isinstance(m, Metric)]
        assert metrics
        assert all(m.distributed_available_fn() for m in metrics)  # they would synchronise again
        str(model)
        live = [p for p in model.parameters() if p.device.type != "meta"]
        assert all(p.norm().isfinite() for p in live)
        return "looked at"

    for outcome in watch_ranks(body, 3, timeout_s=LIMIT_S):
        assert outcome.value == "looked at", outcome.describe()
    assert not (tmp_path / "checkpoint.ckpt").exists()


def test_error_of_a_value_that_is_elsewhere_names_full_model() -> None:
    class Reads(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    float(parameter.norm())

    plan = everywhere()
    Fails.when = When(99, "", "")
    outcomes = watch_fit(
        3,
        fragile,
        fragile_data,
        strategy=lambda rank: {"plan": plan},
        options=lambda rank: {"callbacks": [Reads()]},
    )
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.seconds < LIMIT_S
    assert any("strategy.full_model()" in str(o.traceback) for o in outcomes), outcomes


@pytest.mark.parametrize("guarded", [True, False])
def test_saving_on_rank_0_alone(guarded: bool, tmp_path: Any) -> None:
    """C33: a save that other ranks take no part in ends with a clear error; one of all writes the model."""

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2 and (trainer.is_global_zero or not guarded):
                trainer.save_checkpoint(tmp_path / "whole.ckpt")

    plan = everywhere()
    Fails.when = When(99, "", "")

    def body(rank: int, size: int) -> str:
        strategy = SpindleStrategy(plan=plan, timeout=timedelta(seconds=6))
        fit_once(fragile, fragile_data, strategy, devices=size, callbacks=[Saves()], max_steps=4)
        return "ended well"

    outcomes = watch_ranks(body, 3, timeout_s=LIMIT_S + 10, group_timeout_s=6)
    if guarded:
        assert_all_ended(
            outcomes, "Rank 0 is at saving a checkpoint, without the others", "must be made by every rank"
        )
        return
    assert [o.value for o in outcomes] == ["ended well"] * 3, outcomes
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    assert saved["state_dict"].keys() == fragile().state_dict().keys()
    assert all(t.device.type == "cpu" for t in saved["state_dict"].values())
