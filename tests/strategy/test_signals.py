"""Signals that Lightning acts on (SIGTERM, SLURM's requeue), while ranks are at different operators."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_spindle import MultiTaskModule
from lightning_spindle.runtime import signals
from lightning_spindle.strategy import SpindleStrategy
from tests.strategy.ending import LIMIT_S, assert_all_ended, watch_fit
from tests.strategy.test_failures import Fails, everywhere, fragile, fragile_data
from tests.support.fitting import fit_once, plain_fit
from tests.support.ranks import RankOutcome, watch_ranks

EPOCH = 3
"""Steps."""
STEP = 2
STEPS = 8
ONE_BY_ONE = {0: "end", 1: "forward", 2: "backward"}
"""Rank 0's comes between two steps, the others' come inside the second."""


class Signalled(Callback):
    """Sends a signal to this rank: in making loaders, at the end of a step, or in an operator of the next."""

    def __init__(self, moment: str | None, number: int = signal.SIGTERM, steps: tuple[int, ...] = (STEP,)):
        self.moment, self.number, self.steps = moment, number, steps
        self.inside = moment == "loaders"
        self.events: list[str] = []

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        self.events.append("epoch")
        self.inside = False

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.inside = trainer.global_step in self.steps

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.events.append("step")
        self.inside = trainer.global_step in self.steps
        self.maybe("end")
        self.inside = False

    def on_validation_batch_start(self, *_: Any) -> None:
        self.events.append("validation batch")

    def maybe(self, moment: str) -> None:
        if self.inside and moment == self.moment:
            self.inside = False
            os.kill(os.getpid(), self.number)


def signalled_fit(
    when: Mapping[int, str],
    folder: Path,
    senders: Callable[[str | None], Signalled] = Signalled,
    options: Callable[[int], dict[str, Any]] = lambda rank: {},
) -> tuple[RankOutcome, ...]:
    """A fit on three ranks, which tell how they ended, their events, and their parameters then."""
    plan = everywhere()

    def body(rank: int, size: int) -> tuple[str, list[str], Any]:
        Fails.when = sender = senders(when.get(rank))  # type: ignore[assignment]
        models = []

        def make_model() -> MultiTaskModule:
            models.append(fragile())
            return models[0]

        def make_data() -> Any:
            data = fragile_data()
            make = data.train_dataloader
            data.train_dataloader = lambda: (sender.maybe("loaders"), make())[1]
            return data

        settings = {
            "devices": size,
            "max_steps": STEPS,
            "callbacks": [sender, OnExceptionCheckpoint(folder, "preempted")],
            "enable_checkpointing": True,
            "default_root_dir": str(folder),
            **options(rank),
        }
        how = "ended well"
        try:
            fit_once(make_model, make_data, SpindleStrategy(plan=plan), **settings)
        except SystemExit as e:
            how = type(e).__name__
        return how, sender.events, {name: p.detach() for name, p in models[0].named_parameters()}

    return watch_ranks(body, 3, timeout_s=LIMIT_S + 10, group_timeout_s=20)


def plain_parameters(steps: int) -> dict[str, torch.Tensor]:
    """Of a plain fit that ends after so many steps."""
    Fails.when = Signalled(None)  # type: ignore[assignment]
    return plain_fit(fragile, fragile_data, max_steps=steps).parameters


def assert_ended_alike(outcomes: tuple[RankOutcome, ...], how: str) -> list[str]:
    """All ranks ended so, with the same events, and have the parameters of a plain fit of as many steps."""
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        assert outcome.seconds < LIMIT_S, outcome.describe()
    events: list[str] = outcomes[0].value[1]
    for outcome in outcomes:
        assert outcome.value[:2] == (how, events)
    if "step" in events:
        expected = plain_parameters(events.count("step"))
        for outcome in outcomes:
            torch.testing.assert_close(outcome.value[2], expected)
    return events


def assert_saved(path: Path, steps: int) -> dict[str, Any]:
    """The checkpoint, which is that of a plain fit of so many steps."""
    saved: dict[str, Any] = torch.load(path, weights_only=False)
    assert saved["global_step"] == steps
    expected = plain_parameters(steps)
    torch.testing.assert_close({name: saved["state_dict"][name] for name in expected}, expected)
    assert saved["optimizer_states"][0]["state"]
    return saved


@pytest.mark.parametrize(
    "when",
    [{0: "forward"}, {1: "backward"}, {0: "backward", 1: "forward", 2: "forward"}, ONE_BY_ONE],
    ids=["rank-0", "rank-1", "all", "one-by-one"],
)
def test_ranks_end_at_the_same_step(when: Mapping[int, str], tmp_path: Path) -> None:
    """Wherever the ranks are, all end by SIGTERM after one step, and can save what they have."""
    steps = assert_ended_alike(signalled_fit(when, tmp_path), "SIGTERMException").count("step")
    assert STEP <= steps <= STEP + 1
    assert_saved(tmp_path / "preempted.ckpt", steps)


def test_in_the_last_step_of_an_epoch(tmp_path: Path) -> None:
    """The epoch ends, and no other begins: a run that resumes from there begins it."""
    outcomes = signalled_fit({1: "backward"}, tmp_path, options=lambda rank: {"limit_val_batches": 0})
    assert assert_ended_alike(outcomes, "SIGTERMException") == ["epoch", *["step"] * EPOCH]
    assert_saved(tmp_path / "preempted.ckpt", EPOCH)


class InValidation(Signalled):
    def on_validation_batch_start(self, *_: Any) -> None:
        super().on_validation_batch_start()
        self.inside = True


def test_in_validation(tmp_path: Path) -> None:
    """It does not wait for all batches; the progress counts no batch that was not evaluated."""
    each_step = {"val_check_interval": 1}
    outcomes = signalled_fit({2: "forward"}, tmp_path, InValidation, lambda rank: each_step)
    assert assert_ended_alike(outcomes, "SIGTERMException") == ["epoch", "step", "validation batch"]
    loops = assert_saved(tmp_path / "preempted.ckpt", 1)["loops"]["fit_loop"]
    assert set(loops["epoch_loop.val_loop.batch_progress"]["current"].values()) == {1}


def test_before_training(tmp_path: Path) -> None:
    """While this rank makes its loaders and others wait for it."""
    outcomes = signalled_fit({1: "loaders"}, tmp_path)
    assert assert_ended_alike(outcomes, "SIGTERMException") == []
    assert (tmp_path / "preempted.ckpt").exists()


def test_a_handler_that_exits(tmp_path: Path) -> None:
    """The user's own, set before the fit, as Lightning calls it; what was trained is saved all the same."""

    def exits(moment: str | None) -> Signalled:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        return Signalled(moment)

    steps = assert_ended_alike(signalled_fit({1: "forward"}, tmp_path, exits), "SystemExit").count("step")
    assert_saved(tmp_path / "preempted.ckpt", steps)


class EndsChild(Signalled):
    """As loaders and users do with processes that they have forked in the run."""

    def maybe(self, moment: str) -> None:
        if self.inside and moment == self.moment:
            self.inside = False
            fork = multiprocessing.get_context("fork")
            ours, theirs = fork.Pipe()
            child = fork.Process(target=lambda: (theirs.send("here"), time.sleep(60)), daemon=True)
            child.start()
            assert child.pid is not None
            assert ours.poll(10)
            for number in (signal.SIGUSR1, signal.SIGTERM):
                os.kill(child.pid, number)
            child.join(10)
            self.events.append(f"child ended by {child.exitcode}")


def test_a_child_that_is_ended_ends_nothing_else(tmp_path: Path) -> None:
    when = dict.fromkeys(range(3), "backward")
    events = assert_ended_alike(signalled_fit(when, tmp_path, EndsChild, on_slurm(tmp_path)), "ended well")
    assert events.count("child ended by -15") == 1
    assert not list(tmp_path.glob("*.ckpt"))


def on_slurm(folder: Path) -> Callable[[int], dict[str, Any]]:
    """Options of a rank in a job that asks its scheduler, a script in ``folder``, for requeues."""
    scontrol = folder / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $@ >> {folder}/requeued\n")
    scontrol.chmod(0o755)

    def options(rank: int) -> dict[str, Any]:
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
        size = os.environ["WORLD_SIZE"]
        names = {"JOB_ID": "11", "NTASKS": size, "NTASKS_PER_NODE": size, "NODEID": "0"}
        for name, value in {**names, "PROCID": str(rank), "LOCALID": str(rank)}.items():
            os.environ[f"SLURM_{name}"] = value
        return {"plugins": [SLURMEnvironment(auto_requeue=True)]}

    return options


@pytest.mark.parametrize("again", [False, True])
def test_requeue(again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's signal, to all ranks: one whole checkpoint and one requeue, each time; training goes on."""
    monkeypatch.setattr(signals, "_ONE_EVENT_S", 0.0 if again else 60.0)
    when = {1: "forward"} if again else ONE_BY_ONE

    def sender(moment: str | None) -> Signalled:
        return Signalled(moment, signal.SIGUSR1, (STEP, STEP + 3) if again else (STEP,))

    outcomes = signalled_fit(when, tmp_path, sender, on_slurm(tmp_path))
    assert assert_ended_alike(outcomes, "ended well").count("step") == STEPS
    paths = sorted(tmp_path.glob("hpc_ckpt_*.ckpt"))
    steps = [torch.load(path, weights_only=False)["global_step"] for path in paths]
    assert steps == ([STEP + 1, STEP + 4] if again else [STEP])
    for path, step in zip(paths, steps, strict=True):
        assert_saved(path, step)
    assert (tmp_path / "requeued").read_text().splitlines() == ["requeue 11"] * len(steps)


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
