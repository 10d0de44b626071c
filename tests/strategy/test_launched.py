"""As a user launches it: plain ``python script.py`` (Lightning's launcher) and torchrun."""

import re
import time
from pathlib import Path

import pytest
import torch

from tests.support.scripts import ScriptResult, run_script

pytestmark = pytest.mark.scripts

SCRIPT = '''
import os, signal, sys, time
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import OnExceptionCheckpoint

import lightning_spindle
from lightning_spindle import SpindleStrategy
from tests.strategy.test_failures import Fails, When, everywhere, fragile, fragile_data


class Signals(Callback):
    """To the process that was launched alone, as a scheduler would send it."""

    def __init__(self, number: int, launched: int) -> None:
        self.number, self.launched = number, launched

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 1:
            print(f"failing at {time.monotonic()}", flush=True)
            os.kill(self.launched, self.number)


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it otherwise
how = sys.argv[1]
plan = everywhere(2)
Fails.when = When(1, "backward", how)
signals = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM}
launched = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
callback = Signals(signals[how], launched) if how in signals else Fails.when
seed_everything(7)
trainer = Trainer(
    strategy=SpindleStrategy(plan=plan),
    accelerator="cpu",
    devices=2,
    max_steps=100_000 if how == "terminate" else 4,
    logger=False,
    enable_progress_bar=False,
    callbacks=[callback, OnExceptionCheckpoint(sys.argv[2])],
    default_root_dir=sys.argv[2],
)
trainer.fit(fragile(), fragile_data())
print("ended well")
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def launch(script: Path, how: str, nproc: int | None = None) -> ScriptResult:
    """Run it, and see that all of it has ended within 30 s of the failure, none of it well."""
    result = run_script(script, [how, str(script.parent)], nproc=nproc)
    now = time.monotonic()
    output = f"{result}"
    assert not result.timed_out, output
    ends_well = how == "terminate" and nproc is None  # SIGTERMException is a SystemExit without a code
    assert (result.returncode == 0) == ends_well, output
    assert not result.leftovers, output
    assert "ended well" not in result.stdout, output
    failed = re.findall(r"failing at ([\d.]+)", result.stdout)
    assert failed, output
    assert now - float(failed[0]) < 30, output
    return result


@pytest.mark.parametrize("nproc", [None, 2])
def test_a_rank_raises(script: Path, nproc: int | None) -> None:
    result = launch(script, "raise", nproc)
    assert "ValueError: the encoder is cold" in result.stderr
    assert "audio_text/encoder.stem" in result.stderr


@pytest.mark.parametrize("nproc", [None, 2])
def test_a_rank_is_killed(script: Path, nproc: int | None) -> None:
    result = launch(script, "kill", nproc)
    # Whoever is first: a rank that waits for the dead one, or Lightning, which watches those it launched.
    watched = nproc is None and re.search(
        r"\[rank: \d\] Child process .* terminated with code -9", result.stderr
    )
    told = "lost its connection" in result.stderr and "killed" in result.stderr
    assert watched or told, result.stderr


def test_interrupt(script: Path) -> None:
    result = launch(script, "interrupt")
    assert "KeyboardInterrupt" in result.stderr


@pytest.mark.parametrize("nproc", [None, 2])
def test_terminated(script: Path, nproc: int | None) -> None:
    """As a scheduler ends a job: every rank ends by it, and what was trained is saved."""
    result = launch(script, "terminate", nproc)
    assert all(f"[rank: {rank}] Received SIGTERM" in result.stderr for rank in range(2)), result.stderr
    saved = torch.load(script.parent / "on_exception.ckpt", weights_only=False)
    assert saved["global_step"] > 1
