"""C09: one file, independent of the number of ranks and of the plan; resumed at another number of ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_spindle import MultiTaskModule, SpindleStrategy
from tests.support.fitting import Fit, assert_replicas, close, fit_once
from tests.support.ranks import run_ranks
from tests.support.small import (
    Given,
    Layer,
    Part,
    Sample,
    Small,
    metagraph,
    multi,
    placement,
    random_samples,
    together,
)

STEPS, MORE = 3, 3


class Task(Small):
    """An own and a shared tower, BatchNorm between them; AdamW, decay for weights only."""

    def __init__(self, shared: nn.Module, width: int = 3) -> None:
        super().__init__()
        self.tower, self.shared, self.head = Layer(width, 4), shared, Layer(4, 1, last=True)
        self.norm = nn.BatchNorm1d(4)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        prediction = self.head(self.shared(self.norm(self.tower(batch["x"]))))
        loss = ((prediction - batch["y"]) ** 2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS + MORE)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def model() -> MultiTaskModule:
    torch.manual_seed(0)
    shared = Layer(4, 4)
    return multi({"a": Task(shared), "b": Task(shared, 2)})


def double_model() -> MultiTaskModule:
    """In float64 from the start: Lightning restores weights before it converts the module."""
    return model().double()


def data() -> Any:
    """An epoch is three steps, so that a file of the first epoch's end is one of step three."""
    a, b = random_samples(11, 1, x=(3,), y=(1,)), random_samples(8, 2, x=(2,), y=(1,))
    return together(a=Given(a, [4, 4, 3]), b=Given(b, [3, 3, 2]))


GROUPS = {
    1: {"a/": (0,), "b/": (0,)},
    2: {"a/": (0,), "b/": (1,), "b/head": (0, 1)},
    3: {"a/": (2,), "b/": (1, 0), "a/tower": (0, 1, 2)},
    4: {"a/": (3, 1), "b/": (2,), "b/head": (0, 1, 3)},
}


class Saves(Callback):
    """``trainer.save_checkpoint`` on every rank after the given step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(
    devices: int,
    folder: Path,
    steps: int,
    ckpt: Path | None = None,
    plain: bool = False,
    sharded: bool = False,
) -> list[Fit]:
    """A fit of ``devices`` ranks that writes ModelCheckpoint's default files, and ``<folder>/own.ckpt``."""
    plan = None if plain else placement(metagraph(model(), data()), devices, GROUPS[devices])

    def rank(index: int, size: int) -> Fit:
        options = {"operators": (Part,), "timeline": False, "shard_optimizer_state": sharded}
        strategy = "auto" if plain else SpindleStrategy(plan=plan, **options)
        return fit_once(
            double_model,
            data,
            strategy,
            size,
            max_steps=steps,
            enable_checkpointing=True,
            default_root_dir=str(folder),
            callbacks=[Saves(folder / "own.ckpt", STEPS)],
            ckpt_path=ckpt,
        )

    return run_ranks(rank, devices, init_group=devices > 1)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fit, Path]]:
    """Six steps in one plain process, and its file of step three."""
    folder = tmp_path_factory.mktemp("plain")
    (reference,) = fit(1, folder, STEPS + MORE, plain=True)
    return reference, folder / "own.ckpt"


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of three steps on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    fit(2, folder, STEPS)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same on four ranks that share out the optimizer's state."""
    folder = tmp_path_factory.mktemp("sharded")
    fit(4, folder, STEPS, sharded=True)
    return folder


def automatic(folder: Path) -> Path:
    (found,) = folder.glob("checkpoints/*.ckpt")
    return found


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("which", ["ModelCheckpoint", "save_checkpoint"])
@pytest.mark.parametrize("by", ["interrupted", "sharded"])
def test_c09_the_file_is_a_plain_one(
    by: str, which: str, uninterrupted: Any, request: pytest.FixtureRequest
) -> None:
    """Every tensor of the file, parameters, buffers, optimizer and schedule, is a one-process file's."""
    folder = request.getfixturevalue(by)
    path = automatic(folder) if which == "ModelCheckpoint" else folder / "own.ckpt"
    ours, theirs = load(path), load(uninterrupted[1])
    assert (ours["global_step"], ours["epoch"]) == (theirs["global_step"], theirs["epoch"])
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    for name, value in theirs["state_dict"].items():
        close(ours["state_dict"][name], value, 1e-9, name)
    (optimizer,), (expected,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert [g["params"] for g in optimizer["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    assert [g["lr"] for g in optimizer["param_groups"]] == [g["lr"] for g in expected["param_groups"]]
    assert optimizer["state"].keys() == expected["state"].keys(), "state of every parameter, whoever holds it"
    for index, state in expected["state"].items():
        for key, value in state.items():
            close(optimizer["state"][index][key], value, 1e-9, f"{key} of {index}")
    assert ours["lr_schedulers"] == theirs["lr_schedulers"]
    assert ours.keys() - theirs.keys() == {"lightning_spindle"}


@pytest.mark.parametrize("devices", [1, 3, 4])
def test_c09_resumes_at_another_number_of_ranks(
    devices: int, uninterrupted: Any, interrupted: Path, tmp_path: Path
) -> None:
    """Saved by two ranks, resumed by 1, 3 and 4 under other plans: the uninterrupted run's steps."""
    _resumes(fit(devices, tmp_path, STEPS + MORE, interrupted / "own.ckpt"), uninterrupted[0])


def test_c09_a_plain_trainer_resumes_it_and_the_other_way_round(
    uninterrupted: Any, interrupted: Path, tmp_path: Path
) -> None:
    """Without the strategy from the file of two ranks; on three ranks from a plain process's file."""
    _resumes(fit(1, tmp_path, STEPS + MORE, automatic(interrupted), plain=True), uninterrupted[0])
    _resumes(fit(3, tmp_path, STEPS + MORE, uninterrupted[1]), uninterrupted[0])


def test_c09_a_divided_optimizer_resumes_anywhere(
    uninterrupted: Any, interrupted: Path, sharded: Path, tmp_path: Path
) -> None:
    """Its file without the strategy, undivided, and divided among others; and divided from a whole one's."""
    file = sharded / "own.ckpt"
    _resumes(fit(1, tmp_path, STEPS + MORE, file, plain=True), uninterrupted[0])
    _resumes(fit(2, tmp_path, STEPS + MORE, file), uninterrupted[0])
    _resumes(fit(3, tmp_path, STEPS + MORE, file, sharded=True), uninterrupted[0])
    _resumes(fit(3, tmp_path, STEPS + MORE, interrupted / "own.ckpt", sharded=True), uninterrupted[0])


def _resumes(ours: list[Fit], reference: Fit) -> None:
    for fit_of_rank in ours:
        assert len(fit_of_rank.steps) == MORE
        for at, (step, expected) in enumerate(zip(fit_of_rank.steps, reference.steps[STEPS:], strict=True)):
            close(step["loss"], expected["loss"], 1e-9, f"step {at}")
            for name, value in step["parameters"].items():
                close(value, expected["parameters"][name], 1e-9, f"step {at}: {name}")
        for name, value in fit_of_rank.buffers.items():
            close(value, reference.buffers[name], 1e-9, name)
    assert_replicas(ours)


def test_c09_load_from_checkpoint(uninterrupted: Any, interrupted: Path) -> None:
    """The module and a single task read their weights from the file, without strategy and Trainer."""
    path = automatic(interrupted)
    expected = load(uninterrupted[1])["state_dict"]
    tasks = dict(model().tasks.items())
    for p in tasks["a"].parameters():
        nn.init.zeros_(p)
    loaded = MultiTaskModule.load_from_checkpoint(path, tasks=tasks)
    for name, value in loaded.state_dict().items():
        close(value, expected[name].to(value.dtype), 1e-6, name)
    alone = Task(Layer(4, 4))
    prefix = "tasks.a."
    own = {k.removeprefix(prefix): v for k, v in load(path)["state_dict"].items() if k.startswith(prefix)}
    assert alone.load_state_dict(own, strict=True)


def test_c09_saving_after_the_fit(uninterrupted: Any, tmp_path: Path) -> None:
    """``trainer.save_checkpoint`` when fit has returned: the same file, moments included."""
    plan = placement(metagraph(model(), data()), 2, GROUPS[2])

    def rank(index: int, size: int) -> None:
        saved: list[Any] = []

        class Keep(Callback):
            def on_fit_start(self, trainer: Any, module: Any) -> None:
                saved.append(trainer)

        strategy = SpindleStrategy(plan=plan, operators=(Part,), timeline=False)
        fit_once(double_model, data, strategy, size, max_steps=STEPS, callbacks=[Keep()])
        saved[0].save_checkpoint(tmp_path / "after.ckpt")

    run_ranks(rank, 2)
    ours, theirs = load(tmp_path / "after.ckpt"), load(uninterrupted[1])
    for name, value in theirs["state_dict"].items():
        close(ours["state_dict"][name], value, 1e-9, name)
    for index, state in theirs["optimizer_states"][0]["state"].items():
        close(
            ours["optimizer_states"][0]["state"][index]["exp_avg"], state["exp_avg"], 1e-9, f"exp_avg {index}"
        )


def test_c09_hooks_that_edit_a_checkpoint_run_on_every_rank(tmp_path: Path) -> None:
    """They find the keys that rank 0 has; what is saved is as in one process."""
    plan = placement(metagraph(model(), data()), 2, GROUPS[2])

    class Edits(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            removed = checkpoint["state_dict"].pop(sorted(checkpoint["state_dict"])[0])
            checkpoint["removed"] = tuple(removed.shape)
            for name, value in checkpoint["state_dict"].items():
                checkpoint["state_dict"][name] = value.float()
            checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.5

    def rank(index: int, size: int) -> None:
        saved: list[Any] = []

        class Keep(Edits):
            def on_fit_start(self, trainer: Any, module: Any) -> None:
                saved.append(trainer)

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == 1:
                    trainer.save_checkpoint(tmp_path / f"within_{size}.ckpt")

        own = SpindleStrategy(plan=plan, operators=(Part,), timeline=False)
        fit_once(double_model, data, own if size > 1 else "auto", size, max_steps=2, callbacks=[Keep()])
        saved[0].save_checkpoint(tmp_path / f"after_{size}.ckpt")

    run_ranks(rank, 1, init_group=False)
    run_ranks(rank, 2)
    for when in ("within", "after"):
        theirs, ours = (load(tmp_path / f"{when}_{size}.ckpt") for size in (1, 2))
        assert ours["removed"] == theirs["removed"]
        assert ours["optimizer_states"][0]["param_groups"] == theirs["optimizer_states"][0]["param_groups"]
        assert ours["state_dict"].keys() == theirs["state_dict"].keys()
        for name, value in theirs["state_dict"].items():
            assert ours["state_dict"][name].dtype == torch.float32
            close(ours["state_dict"][name], value, 1e-6, name)
