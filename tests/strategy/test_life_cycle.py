"""Runs of every kind, one after another: each equal to what one plain process gives, on every rank."""

import csv
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_spindle import MultiTaskModule
from lightning_spindle.strategy import SpindleStrategy
from tests.support import branching, toys
from tests.support.fitting import (
    approx_dict,
    assert_same_fit,
    close,
    metagraph_of,
    placed,
    plain_fit,
    random_plan,
    spindle_fit,
)
from tests.support.ranks import run_ranks

Script = Callable[[int, Callable[..., Trainer]], Any]


def on_ranks(script: Script, size: int, spindle: bool = True, **strategy: Any) -> list[Any]:
    """``script(rank, make_trainer)`` on ranks, its Trainers under Spindle or plain."""

    def body(rank: int, size: int) -> Any:
        def make_trainer(**options: Any) -> Trainer:
            settings: dict[str, Any] = {
                "accelerator": "cpu",
                "devices": size,
                "precision": "64-true",
                "max_steps": 4,
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
            }
            quick = {"profile_budget_s": 0.2, "planner": "spindle", "timeline": False}
            chosen = SpindleStrategy(**{**quick, **strategy}) if spindle else "auto"
            return Trainer(**{"strategy": chosen, **settings, **options})

        seed_everything(7, verbose=False)
        return script(rank, make_trainer)

    return run_ranks(body, size, init_group=size > 1, timeout_s=150, group_timeout_s=60)


def numbers(metrics: Any) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}


def assert_like_one_process(script: Script, *sizes: int, **strategy: Any) -> Any:
    """What the script returns (dicts of numbers, tensors, in lists) is the same everywhere; returns it."""
    reference = on_ranks(script, 1, spindle=False)[0]
    for size in sizes:
        for rank, found in enumerate(on_ranks(script, size, **strategy)):
            assert_equal(found, reference, f"rank {rank} of {size}")
    return reference


def assert_equal(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_equal(ours[key], theirs[key], f"{where}, {key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(a, b, f"{where}[{at}]")
    elif isinstance(theirs, float | torch.Tensor):
        close(ours, theirs, 1e-9, where)
    else:
        assert ours == theirs, where


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_validate_and_test_without_fit(size: int) -> None:
    def script(rank: int, make: Callable[..., Trainer]) -> Any:
        model, data = toys.model(), toys.data()
        trainer = make()
        validated = trainer.validate(model, data, verbose=False)
        tested = trainer.test(model, data, verbose=False)
        return [*validated, *tested, numbers(trainer.callback_metrics)]

    validated, tested, _ = assert_like_one_process(script, size)
    assert {"image_class/val_loss", "image_class/accuracy"} <= validated.keys()
    assert validated == tested


@pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")
def test_a_model_is_whole_after_evaluation_too() -> None:
    def script(rank: int, make: Callable[..., Trainer]) -> Any:
        model, data = branching.model(branching.Branching), branching.data()
        trainer = make()
        found: list[Any] = []
        for run in (trainer.validate, trainer.fit, trainer.validate, make().validate):
            found += [run(model, data) or [], weights(model)]
        return found

    assert_like_one_process(script, 1, 2)


def test_fit_test_fit() -> None:
    """C58: sanity check, validation in fit, test, a second fit of the same model, a second Trainer."""

    def script(rank: int, make: Callable[..., Trainer]) -> Any:
        model, data = toys.model(), toys.data()
        found: list[Any] = []
        trainer = make(num_sanity_val_steps=2, val_check_interval=2)
        trainer.fit(model, data)
        found += [weights(model), numbers(trainer.callback_metrics)]
        found += trainer.test(model, data, verbose=False)
        trainer.fit_loop.epoch_loop.max_steps = 7
        trainer.fit(model, data)
        found += [weights(model), numbers(trainer.callback_metrics), trainer.global_step]
        second = make(max_steps=2)
        second.fit(model, data)
        found += [weights(model), *second.validate(model, data, verbose=False)]
        other = toys.model(seed=3)
        make(max_steps=2).fit(other, toys.data())
        return [*found, weights(other)]

    assert_like_one_process(script, 1, 3)


def test_by_name(tmp_path: Path) -> None:
    """With all defaults: any planner may win, and the iteration is drawn as predicted and as measured."""

    def script(rank: int, make: Callable[..., Trainer]) -> Any:
        model = toys.model()
        trainer = make(strategy="spindle", default_root_dir=tmp_path)
        assert isinstance(trainer.strategy, SpindleStrategy)
        trainer.fit(model, toys.data())
        return weights(model)

    first, second = on_ranks(script, 2)
    assert_equal(second, first, "rank 1")
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.json", "timeline.png"}


def test_plan_from_a_path(tmp_path: Path) -> None:
    plan = random_plan(metagraph_of(toys.model(), toys.data()), 2, seed=5)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())

    def script(rank: int, make: Callable[..., Trainer]) -> Any:
        model = toys.model()
        trainer = make(max_steps=1)
        trainer.fit(model, toys.data())
        saved: dict[str, Any] = {}
        if isinstance(trainer.strategy, SpindleStrategy):
            assert trainer.strategy._settings.plan == plan
        return [weights(model), saved]

    assert_like_one_process(script, 2, plan=path)


def test_the_plan_of_a_fit_can_be_pinned(tmp_path: Path) -> None:
    """It is there on every rank after the fit, and another fit runs by it."""

    def script(rank: int, make: Callable[..., Trainer]) -> Any:
        first, path = make(max_steps=1), tmp_path / f"{rank}.json"
        assert first.strategy.plan is None
        first.fit(toys.model(), toys.data())
        path.write_text(first.strategy.plan.to_json())
        second = make(max_steps=1, strategy=SpindleStrategy(plan=path, timeline=False))
        second.fit(toys.model(), toys.data())
        return first.strategy.plan, second.strategy.plan

    plans = [plan for found in on_ranks(script, 2, planner="uniform") for plan in found]
    assert plans == [plans[0]] * 4
    assert plans[0].planner == "uniform"


# --------------------------------------------------------------------------------- what others see of a fit


class Watches(Callback):
    """What a callback can read after each step and each validation."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seen.append([numbers(trainer.callback_metrics), numbers(trainer.progress_bar_metrics)])

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.seen.append([numbers(trainer.callback_metrics), numbers(trainer.progress_bar_metrics)])


class Shown(toys.Classify):
    """Logs to the progress bar."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("shown", 2 * loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss


def shown_model() -> MultiTaskModule:
    made = toys.model()
    image = made.tasks["image_class"].encoder
    torch.manual_seed(1)
    tasks = {**made.tasks, "image_class": Shown(image)}
    return MultiTaskModule(tasks, weights=made.weights)


def apart(devices: int) -> Any:
    """A plan that gives each task a rank of its own, the classification (which is monitored) the last."""
    where = {"image_text": 0, "audio_text": 1 % devices, "image_class": devices - 1}
    return placed(
        metagraph_of(shown_model(), toys.data()), devices, lambda name: (where[name.partition("/")[0]],)
    )


def test_loggers_bar_and_callbacks_see_every_task(tmp_path: Path) -> None:
    """C31: metrics.csv is a one-process run's; callbacks read the same on all ranks."""

    def script(folder: str) -> Script:
        def run(rank: int, make: Callable[..., Trainer]) -> Any:
            watches = Watches()
            trainer = make(
                max_steps=6,
                val_check_interval=2,
                log_every_n_steps=1,
                logger=CSVLogger(tmp_path / folder, name="", version=""),
                callbacks=[watches],
                enable_progress_bar=True,
                default_root_dir=tmp_path / folder,
            )
            trainer.fit(shown_model(), toys.data())
            return watches.seen

        return run

    reference = on_ranks(script("one"), 1, spindle=False)[0]
    for rank, seen in enumerate(on_ranks(script("three"), 3, plan=apart(3))):
        assert_equal(seen, reference, f"rank {rank}")
    ours, theirs = (list(csv.DictReader((tmp_path / f / "metrics.csv").open())) for f in ("three", "one"))
    assert len(ours) == len(theirs)
    for row, expected in zip(ours, theirs, strict=True):
        assert row.keys() == expected.keys()
        filled = {k: float(v) for k, v in expected.items() if v}
        assert {k: float(v) for k, v in row.items() if v} == approx_dict(filled, 1e-9)


def test_checkpoints_and_early_stopping_decide_alike(tmp_path: Path) -> None:
    """The monitored task lives on another rank than 0."""

    def script(folder: str) -> Script:
        def run(rank: int, make: Callable[..., Trainer]) -> Any:
            best = ModelCheckpoint(
                tmp_path / folder, monitor="image_class/val_loss", save_top_k=2, filename="{step}"
            )
            stop = EarlyStopping("image_class/accuracy", mode="max", patience=1)
            trainer = make(
                max_steps=20,
                max_epochs=8,
                val_check_interval=2,
                enable_checkpointing=True,
                callbacks=[best, stop],
                default_root_dir=tmp_path / folder,
            )
            model, data = shown_model(), toys.data()
            trainer.fit(model, data)
            names = sorted(Path(p).name for p in best.best_k_models)
            tested = trainer.test(model, data, ckpt_path="best", verbose=False)
            chosen = Path(best.best_model_path).name
            return [
                names,
                chosen,
                float(best.best_model_score),
                stop.stopped_epoch,
                trainer.global_step,
                *tested,
            ]

        return run

    reference = on_ranks(script("one"), 1, spindle=False)[0]
    assert reference[4] < 20, "it must stop early"
    for rank, found in enumerate(on_ranks(script("two"), 2, plan=apart(2))):
        assert_equal(found, reference, f"rank {rank}")
    ours, theirs = (
        torch.load(tmp_path / f / reference[1], weights_only=False)["state_dict"] for f in ("two", "one")
    )
    assert_equal(ours, theirs, "the best checkpoint")


@pytest.mark.parametrize("devices", [1, 2])
def test_gradient_accumulation(devices: int) -> None:
    options = {"accumulate_grad_batches": 2, "max_steps": 4, "gradient_clip_val": 0.1}
    options["gradient_clip_algorithm"] = "value"
    reference = plain_fit(toys.model, toys.data, **options)
    plan = random_plan(metagraph_of(toys.model(), toys.data()), devices, seed=3)
    fits = spindle_fit(toys.model, toys.data, devices, strategy={"plan": plan}, **options)
    for fit in fits:
        # Inside a window a rank has the gradients of its own rows only.
        for step in [*fit.steps, *reference.steps]:
            step["gradients"] = dict.fromkeys(step["gradients"])
    assert_same_fit(fits, reference)


class UsesFullModel(Callback):
    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            strategy = trainer.strategy
            if not isinstance(strategy, SpindleStrategy):
                self.values.append(weights(pl_module))
                self.change(pl_module)
                return
            before = {n for n, p in pl_module.named_parameters() if p.device.type == "meta"}
            with strategy.full_model() as model:
                self.values.append(weights(model))
                self.change(model)
            assert before == {n for n, p in pl_module.named_parameters() if p.device.type == "meta"}

    def change(self, model: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)


def test_full_model() -> None:
    """Inside, every rank reads all values; what it changes stays with the holders."""

    def script(rank: int, make: Callable[..., Trainer]) -> Any:
        reads = UsesFullModel()
        model = toys.model()
        make(callbacks=[reads]).fit(model, toys.data())
        return [*reads.values, weights(model)]

    assert_like_one_process(script, 3, plan=apart(3))


class UsesFullModelLate(Callback):
    """Nested, and when the fit has ended."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.enter(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.enter(trainer)

    def enter(self, trainer: Trainer) -> None:
        if isinstance(trainer.strategy, SpindleStrategy):
            with trainer.strategy.full_model() as model:
                with trainer.strategy.full_model():
                    pass
                weights(model)
                assert not any(p.device.type == "meta" for p in model.parameters())


def test_full_model_leaves_a_complete_model_complete() -> None:
    def script(rank: int, make: Callable[..., Trainer]) -> Any:
        model = toys.model()
        make(callbacks=[UsesFullModelLate()]).fit(model, toys.data())
        return weights(model)

    assert_like_one_process(script, 3, plan=apart(3))


def test_a_trainer_makes_its_groups_once() -> None:
    def script(rank: int, make: Callable[..., Trainer]) -> int:
        trainer, model = make(), toys.model()
        counts = []
        for steps in (1, 2):
            trainer.fit_loop.epoch_loop.max_steps = steps
            trainer.fit(model, toys.data())
            counts.append(len(torch.distributed.distributed_c10d._world.pg_map))
        return counts[1] - counts[0]

    plan = placed(
        metagraph_of(toys.model(), toys.data()), 3, lambda name: (0, 1) if "text" in name else (2, 1)
    )
    assert on_ranks(script, 3, plan=plan) == [0, 0, 0]


def test_reduce() -> None:
    def script(rank: int, make: Callable[..., Trainer]) -> Any:
        strategy, found = make().strategy, []
        strategy.setup_environment()
        for op in (
            "mean",
            "AVG",
            "sum",
            "max",
            torch.distributed.ReduceOp.AVG,
            torch.distributed.ReduceOp.MIN,
        ):
            found.append(float(strategy.reduce(torch.tensor(1 + rank), reduce_op=op)))
        return [*found, bool(strategy.reduce_boolean_decision(rank == 0, all=True))]

    assert on_ranks(script, 2) == [[1.5, 1.5, 3.0, 2.0, 1.5, 1.0, False]] * 2


class Hooked(toys.Classify):
    """Counts the hooks of a task."""

    def __init__(self, encoder: toys.Encoder) -> None:
        super().__init__(encoder)
        self.calls: dict[str, int] = {}

    def count(self, hook: str) -> None:
        self.calls[hook] = self.calls.get(hook, 0) + 1


def _counting(hook: str) -> Any:
    def count(self: Hooked, *_: Any) -> None:
        self.count(hook)

    count.__name__ = hook
    return count


HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)
for _hook in HOOKS:
    setattr(Hooked, _hook, _counting(_hook))


def test_hooks_of_tasks_run_on_every_rank() -> None:
    """Also where nothing of the task runs."""

    def model() -> MultiTaskModule:
        torch.manual_seed(0)
        first, second = toys.Encoder(5), toys.Encoder(5)
        return MultiTaskModule({"image_class": Hooked(first), "image_text": Hooked(second)})

    def data() -> Any:
        made = toys.data()
        del made.datamodules["audio_text"]
        return made

    def script(rank: int, make: Callable[..., Trainer]) -> Any:
        made = model()
        make(max_steps=5, num_sanity_val_steps=1).fit(made, data())
        return {name: task.calls for name, task in made.tasks.items()}

    plan = placed(metagraph_of(model(), data()), 2, lambda name: (int(name.startswith("image_class")),))
    calls = assert_like_one_process(script, 2, plan=plan)
    assert set(calls["image_class"]) == set(HOOKS)


def test_workers_start_only_where_they_are_needed() -> None:
    class Counts(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            self.workers = len(multiprocessing.active_children())

    def script(rank: int, make: Callable[..., Trainer]) -> Any:
        counts = Counts()
        # The harness's ranks may have children of their own only if they are not daemons.
        make(max_steps=1, num_sanity_val_steps=0, limit_val_batches=0, callbacks=[counts]).fit(
            toys.model(), toys.data(workers=1)
        )
        return counts.workers

    where = {"image_text": 0, "audio_text": 1, "image_class": 0}
    plan = placed(metagraph_of(toys.model(), toys.data()), 3, lambda name: (where[name.partition("/")[0]],))
    assert on_ranks(script, 3, plan=plan) == [2, 1, 0]
