"""Signals that Lightning acts on (SIGTERM, SLURM's requeue), while ranks are at different operators."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_spindle.strategy import SpindleStrategy
from tests.strategy.ending import LIMIT_S, assert_all_ended, watch_fit
from tests.strategy.test_failures import Fails, everywhere, fragile, fragile_data
from tests.support.fitting import fit_once, plain_fit
from tests.support.ranks import RankOutcome, watch_ranks

STEP = 2
STEPS = 8
SEVERAL = {0: "end", 1: "forward", 2: "backward"}
"""Rank 0's comes between two steps, the others' come inside the second."""


class Signalled(Callback):
    """Sends signals to this rank: at the end of a step, or inside an operator of the next."""

    def __init__(self, rank: int, when: Mapping[int, str], signals: tuple[int, ...]) -> None:
        self.moment, self.signals = when.get(rank), signals
        self.inside = False
        self.steps, self.stage = 0, ""

    def on_exception(self, trainer: Any, *_: Any) -> None:
        self.stage = trainer.state.stage.value

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.inside = trainer.global_step == STEP

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps = trainer.global_step
        if trainer.global_step == STEP:
            self.inside = True
            self.maybe("end")

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.inside = True

    def maybe(self, moment: str) -> None:
        if self.inside and moment == self.moment:
            self.moment = None
            for number in self.signals:
                os.kill(os.getpid(), number)


def signalled_fit(
    when: Mapping[int, str],
    folder: Path,
    signals: tuple[int, ...] = (signal.SIGTERM,),
    options: Callable[[int], dict[str, Any]] = lambda rank: {},
) -> tuple[RankOutcome, ...]:
    """A fit on three ranks, which tell how and where they ended, their steps and their parameters."""
    plan = everywhere()

    def body(rank: int, size: int) -> tuple[str, str, int, Any]:
        sender = Signalled(rank, when, signals)
        Fails.when = sender  # type: ignore[assignment]
        saver = OnExceptionCheckpoint(folder, "preempted")
        settings = {
            "devices": size,
            "max_steps": STEPS,
            "callbacks": [sender, saver],
            "enable_checkpointing": True,
            "default_root_dir": str(folder),
            **options(rank),
        }
        try:
            fit = fit_once(fragile, fragile_data, SpindleStrategy(plan=plan), **settings)
        except SIGTERMException:
            return "SIGTERM", sender.stage, sender.steps, None
        return "ended well", "", sender.steps, fit.parameters

    return watch_ranks(body, 3, timeout_s=LIMIT_S + 10, group_timeout_s=20)


def assert_ended_alike(outcomes: tuple[RankOutcome, ...], how: str) -> int:
    """All ranks ended so, at the same place and after the same number of steps, which is returned."""
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        assert outcome.seconds < LIMIT_S, outcome.describe()
    assert {o.value[0] for o in outcomes} == {how}, outcomes
    ((_, steps),) = {o.value[1:3] for o in outcomes}
    assert isinstance(steps, int)
    return steps


def assert_saved(path: Path, steps: int) -> None:
    """The checkpoint is that of a plain fit which ends after so many steps."""
    saved = torch.load(path, weights_only=False)
    assert saved["global_step"] == steps
    Fails.when = Signalled(0, {}, ())  # type: ignore[assignment]
    for name, value in plain_fit(fragile, fragile_data, max_steps=steps).parameters.items():
        torch.testing.assert_close(saved["state_dict"][name], value, msg=lambda m, n=name: f"{n}: {m}")
    assert saved["optimizer_states"][0]["state"]


@pytest.mark.parametrize(
    "when",
    [{0: "forward"}, {1: "backward"}, {0: "backward", 1: "forward", 2: "forward"}, SEVERAL],
    ids=["rank-0", "rank-1", "all", "one-by-one"],
)
def test_ranks_end_at_the_same_step(when: Mapping[int, str], tmp_path: Path) -> None:
    """Wherever the ranks are, all end by SIGTERMException after one step, and can save what they have."""
    steps = assert_ended_alike(signalled_fit(when, tmp_path), "SIGTERM")
    assert STEP <= steps <= STEP + 2
    assert_saved(tmp_path / "preempted.ckpt", steps)


def test_in_the_last_step(tmp_path: Path) -> None:
    """Too late for another step, early enough to be heard."""
    outcomes = signalled_fit(
        {1: "backward"}, tmp_path, options=lambda rank: {"max_steps": STEP + 1, "limit_val_batches": 0}
    )
    assert assert_ended_alike(outcomes, "SIGTERM") == STEP + 1
    assert_saved(tmp_path / "preempted.ckpt", STEP + 1)


def test_in_validation(tmp_path: Path) -> None:
    """It does not wait for all of the validation's batches."""
    outcomes = signalled_fit({2: "forward"}, tmp_path, options=lambda rank: {"val_check_interval": 1})
    assert assert_ended_alike(outcomes, "SIGTERM") == 1
    assert {o.value[1] for o in outcomes} == {"validate"}
    assert_saved(tmp_path / "preempted.ckpt", 1)


def test_requeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's signal: one whole checkpoint, one call of the scheduler, and training goes on undisturbed."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/requeued\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def on_slurm(rank: int) -> dict[str, Any]:
        size = os.environ["WORLD_SIZE"]
        names = {"JOB_ID": "11", "NTASKS": size, "NTASKS_PER_NODE": size, "NODEID": "0"}
        for name, value in {**names, "PROCID": str(rank), "LOCALID": str(rank)}.items():
            os.environ[f"SLURM_{name}"] = value
        return {"plugins": [SLURMEnvironment(auto_requeue=True)]}

    outcomes = signalled_fit(SEVERAL, tmp_path, (signal.SIGUSR1,), options=on_slurm)
    assert assert_ended_alike(outcomes, "ended well") == STEPS
    (path,) = tmp_path.glob("hpc_ckpt_*.ckpt")
    steps = torch.load(path, weights_only=False)["global_step"]
    assert STEP <= steps <= STEP + 1
    assert_saved(path, steps)
    assert (tmp_path / "requeued").read_text().split() == ["requeue", "11"]
    expected = plain_fit(fragile, fragile_data, max_steps=STEPS).parameters
    for outcome in outcomes:
        for name, value in expected.items():
            torch.testing.assert_close(outcome.value[3][name], value)


def test_a_signal_does_not_hide_why_a_wait_failed(tmp_path: Path) -> None:
    """What torchrun does: a rank is killed, and those that wait for it get SIGTERM."""

    class Killed(Callback):
        """Rank 1, which signals the others before."""

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            self.rank = trainer.global_rank
            (tmp_path / str(self.rank)).write_text(str(os.getpid()))

        def maybe(self, moment: str) -> None:
            if getattr(self, "rank", 0) == 1 and moment == "backward":
                time.sleep(0.5)  # until they wait: their handlers run when that fails
                for other in (0, 2):
                    os.kill(int((tmp_path / str(other)).read_text()), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGKILL)

    plan = everywhere()
    Fails.when = killed = Killed()  # type: ignore[assignment]
    outcomes = watch_fit(
        3,
        fragile,
        fragile_data,
        strategy=lambda rank: {"plan": plan},
        options=lambda rank: {"callbacks": [killed]},
    )
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert_all_ended((outcomes[0], outcomes[2]), "lost its connection", "killed")
