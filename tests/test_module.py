"""``MultiTaskModule``: tasks behave as if each were the fitted module, and their optimizers merge."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_spindle import MultiTaskModule, tasklog
from tests.support.ranks import run_ranks

HOOKS_WITHOUT_BATCH = (
    *("prepare_data", "setup", "configure_model", "teardown", "on_fit_start", "on_fit_end"),
    *("on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_model_train"),
    *("on_test_model_eval", "on_test_model_train"),
    *(f"on_{kind}_{edge}" for kind in ("validation", "test") for edge in ("start", "end")),
    *(f"on_{kind}_epoch_{edge}" for kind in ("validation", "test") for edge in ("start", "end")),
)
HOOKS_WITH_BATCH = (
    *(f"on_{kind}_batch_{edge}" for kind in ("train", "validation", "test") for edge in ("start", "end")),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)


class Linear(L.LightningModule):
    """A task over rows of 3 numbers."""

    def __init__(self, shared: nn.Module | None = None, lr: float = 0.1) -> None:
        super().__init__()
        self.shared = shared or nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.head(self.shared(batch[0])).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=self.lr)


def recording(hook: str, batch_position: int | None) -> Callable[..., Any]:
    def method(self: "Recording", *args: Any, **kwargs: Any) -> Any:
        seen = (hook,) if batch_position is None else (hook, args[batch_position][0].shape[0])
        self.trace.append((*seen, self.global_step, self.current_epoch))
        return getattr(L.LightningModule, hook)(self, *args, **kwargs)

    return method


class Recording(Linear):
    """Records every hook with the rows of its batch and what it knows of the run."""

    def __init__(self, shared: nn.Module | None = None) -> None:
        super().__init__(shared)
        self.trace: list[tuple[Any, ...]] = []
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trace.append(("training_step", batch[0].shape[0], batch_idx, self.trainer.global_step))
        assert isinstance(self.optimizers().optimizer, SGD)
        self.log_dict({"rows": float(len(batch[0])), "one": 1.0}, on_epoch=True)
        return {"loss": super().training_step(batch, batch_idx), "extra": batch_idx}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.append(("on_train_batch_end", len(batch[0]), batch_idx, outputs["extra"], sorted(outputs)))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.trace.append(("validation_step", batch[0].shape[0], batch_idx, self.training))
        self.mean.update(batch[0].sum())
        self.log("mean", self.mean)
        return batch[0].sum()

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.append(("on_validation_batch_end", batch[0].shape[0], outputs.shape))

    def test_step(self, batch: Any) -> None:
        self.trace.append(("test_step", batch[0].shape[0]))


for _hook in HOOKS_WITHOUT_BATCH:
    setattr(Recording, _hook, recording(_hook, None))
for _hook in HOOKS_WITH_BATCH:
    if _hook not in Recording.__dict__:
        setattr(Recording, _hook, recording(_hook, 1 if _hook == "on_test_batch_end" else 0))


def loader(rows: int, batch_size: int) -> DataLoader[Any]:
    torch.manual_seed(rows)
    return DataLoader(TensorDataset(torch.randn(rows, 3)), batch_size=batch_size)


def trainer(**options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(
        **{"accelerator": "cpu", "max_epochs": 2, "enable_model_summary": False, **quiet, **options}
    )


def fit_and_test(model: L.LightningModule, combine: Callable[[str], Any], **options: Any) -> dict[str, float]:
    run = trainer(num_sanity_val_steps=1, use_distributed_sampler=False, **options)
    run.fit(model, combine("max_size_cycle"), combine("max_size"))
    metrics = {key: value.item() for key, value in run.callback_metrics.items()}
    run.test(model, combine("max_size"), verbose=False)
    return metrics


# ------------------------------------------------------------------------------------------------ C05, M12
def _traces(rank: int = 0, world_size: int = 1, **options: Any) -> tuple[Any, Any]:
    """(trace and metrics of a task fitted alone, the same of two tasks fitted together)."""
    torch.manual_seed(0)
    options = {"strategy": "ddp", "devices": world_size, **options} if world_size > 1 else options
    alone, tasks = Recording(), {"a": Recording(), "b": Recording()}
    metrics = fit_and_test(alone, lambda mode: loader(10, 4), **options)
    together = fit_and_test(
        MultiTaskModule(tasks),
        lambda mode: CombinedLoader({"a": loader(10, 4), "b": loader(9, 3)}, mode),
        **options,
    )
    return (alone.trace, metrics), ({name: task.trace for name, task in tasks.items()}, together)


def _check_traces(alone: Any, together: Any, rank: int = 0) -> None:
    trace, metrics = alone
    expected = {*HOOKS_WITHOUT_BATCH, *HOOKS_WITH_BATCH} - ({"prepare_data"} if rank else set())
    assert {entry[0] for entry in trace} >= expected
    assert together[0]["a"] == trace
    assert [entry[0] for entry in together[0]["b"]] == [entry[0] for entry in trace]
    assert {key.removeprefix("a/") for key in together[1] if key.startswith("a/")} == set(metrics)
    assert together[1]["a/rows_epoch"] == pytest.approx(metrics["rows_epoch"])
    assert together[1]["a/mean"] == pytest.approx(metrics["mean"])


def test_c05_tasks_see_what_a_task_fitted_alone_sees() -> None:
    _check_traces(*_traces())


def test_c05_with_accumulation() -> None:
    _check_traces(*_traces(accumulate_grad_batches=2))


def test_c05_on_two_ranks() -> None:
    for rank, (alone, together) in enumerate(run_ranks(_traces, 2, timeout_s=60)):
        _check_traces(alone, together, rank)


def test_c41_epoch_means_weigh_a_task_by_its_own_rows() -> None:
    tasks = {"a": Recording(), "b": Recording()}
    batches = CombinedLoader({"a": loader(18, 8), "b": loader(9, 3)}, "max_size_cycle")
    run = trainer(max_epochs=1)
    run.fit(MultiTaskModule(tasks), batches)
    assert run.callback_metrics["a/rows_epoch"].item() == pytest.approx((64 + 64 + 4) / 18)
    assert run.callback_metrics["b/rows_epoch"].item() == pytest.approx(3)


def test_c41_a_batch_without_tensors_needs_no_rows_until_an_epoch_mean_is_logged() -> None:
    class Strings(Linear):
        on_epoch = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("length", float(len(batch[0])), on_epoch=self.on_epoch)
            return self.head(self.shared(torch.ones(1, 3))).sum()

    strings = DataLoader(["a", "bc"], batch_size=1)
    task = Strings()
    run = trainer(max_epochs=1)
    run.fit(MultiTaskModule({"a": task}), CombinedLoader({"a": strings}))
    assert run.callback_metrics["a/length"] == 2
    task.on_epoch = True
    with pytest.raises(ValueError, match=r"task 'a': the number of rows behind the epoch mean of 'length'"):
        trainer(max_epochs=1).fit(MultiTaskModule({"a": task}), CombinedLoader({"a": strings}))


# --------------------------------------------------------------------------------------------- the steps
def test_the_loss_is_the_weighted_sum_over_the_tasks_that_have_a_batch() -> None:
    a, b = Linear(), Linear()
    model = MultiTaskModule({"a": a, "b": b}, weights={"b": 0.25})
    x, y = [torch.randn(4, 3)], [torch.randn(2, 3)]
    with tasklog.sink(lambda *_: None):
        la, lb = a.training_step(x, 0), b.training_step(y, 0)
        out = model.training_step({"b": y, "a": x}, 0)
        torch.testing.assert_close(out["loss"], la + 0.25 * lb)
        assert list(out["tasks"]) == ["a", "b"]
        assert not out["tasks"]["a"]["loss"].requires_grad
        torch.testing.assert_close(model.training_step({"b": y, "a": None}, 0)["loss"], 0.25 * lb)
        assert model.training_step({}, 0) is None


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": 1, "c": 2}, r"keys that no task has: \['c'\]; the tasks are \['a', 'b'\]"),
        ([1, 2], r"form \{task: batch\}, not list"),
    ],
)
def test_a_batch_of_another_form_is_refused(batch: Any, message: str) -> None:
    model = MultiTaskModule({"a": Linear(), "b": Linear()})
    for step in (model.training_step, model.validation_step, model.test_step, model.on_train_batch_start):
        with pytest.raises(ValueError, match=message):
            step(batch, 0)


def test_a_step_without_a_loss_is_refused_by_name() -> None:
    class NoLoss(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"los": batch}

    with pytest.raises(ValueError, match=r"task 'a': training_step returns a loss tensor"):
        MultiTaskModule({"a": NoLoss()}).training_step({"a": 1}, 0)


def test_evaluation_calls_only_tasks_that_define_the_step() -> None:
    model = MultiTaskModule({"a": Linear(), "b": Recording()})
    with tasklog.sink(lambda *_: None):
        assert list(model.validation_step({"a": [torch.ones(2, 3)], "b": [torch.ones(2, 3)]}, 0)) == ["b"]


def test_a_task_that_returns_minus_one_is_idle_for_the_rest_of_the_epoch() -> None:
    class Leaves(Recording):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    def steps(task: Recording) -> list[tuple[Any, ...]]:
        return [entry for entry in task.trace if entry[0] == "training_step"]

    leaves, stays = Leaves(), Recording()
    run = trainer()
    run.fit(
        MultiTaskModule({"a": leaves, "b": stays}), CombinedLoader({"a": loader(9, 3), "b": loader(9, 3)})
    )
    assert [entry[2] for entry in steps(leaves)] == [0, 0]
    assert [entry[2] for entry in steps(stays)] == [0, 1, 2] * 2
    assert sum(entry[0] == "on_before_optimizer_step" for entry in leaves.trace) == 2
    both = trainer()
    both.fit(MultiTaskModule({"a": Leaves()}), CombinedLoader({"a": loader(9, 3)}))
    assert both.global_step == 2


def test_an_idle_task_hears_nothing_of_the_iteration() -> None:
    tasks = {"a": Recording(), "b": Recording()}
    trainer(max_epochs=1).fit(
        MultiTaskModule(tasks), CombinedLoader({"a": loader(9, 3), "b": loader(3, 3)}, "max_size")
    )
    for hook in ("training_step", "on_before_zero_grad", "on_after_backward", "on_before_optimizer_step"):
        counts = [sum(entry[0] == hook for entry in task.trace) for task in tasks.values()]
        assert counts == [3, 1], hook


# -------------------------------------------------------------------------------------------- the tasks
def test_names_and_modules_are_checked() -> None:
    task = Linear()
    cases = {
        r"at least one task": {},
        r"task name 'a\.b'": {"a.b": task},
        r"task name ''": {"": task},
        r"task name 'items'": {"items": task},
        r"task 'a' is a Linear, not a lightning": {"a": nn.Linear(1, 1)},
        r"tasks 'a' and 'b' are the same object": {"a": task, "b": task},
    }
    for message, tasks in cases.items():
        with pytest.raises(ValueError, match=message):
            MultiTaskModule(tasks)
    with pytest.raises(ValueError, match=r"weights for tasks that do not exist: \['c'\]"):
        MultiTaskModule({"a": task}, weights={"c": 1})


def test_tasks_with_a_loop_of_their_own_are_refused() -> None:
    class Steps(Linear):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...

    class Logs(Linear):
        def log(self, *args: Any, **kwargs: Any) -> None: ...

    manual = Linear()
    manual.automatic_optimization = False
    for message, task in {
        "task 'a' overrides optimizer_step": Steps(),
        "task 'a': Logs overrides `log`": Logs(),
        "task 'a' optimises manually": manual,
    }.items():
        with pytest.raises(ValueError, match=message):
            MultiTaskModule({"a": task})


def test_state_dict_has_the_tasks_and_nothing_else() -> None:
    task = Linear()
    before = list(task.state_dict())
    assert list(MultiTaskModule({"a": task}).state_dict()) == [f"tasks.a.{key}" for key in before]


def test_copies_and_pickles_log_to_themselves() -> None:
    model = MultiTaskModule({"a": Recording(), "b": Recording()})
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.tasks["a"].log.parent is twin
        assert twin.tasks["a"].log.task is twin.tasks["a"]
        assert twin.transfer_batch_to_device.__self__ is twin


def test_a_task_fitted_alone_afterwards_logs_for_itself() -> None:
    task = Linear()
    trainer(max_epochs=1).fit(MultiTaskModule({"a": task}), CombinedLoader({"a": loader(3, 3)}))
    run = trainer(max_epochs=1)
    run.fit(task, loader(3, 3))
    assert list(run.callback_metrics) == ["loss"]


def test_sink_receives_what_the_task_gave() -> None:
    task, seen = Recording(), []
    MultiTaskModule({"a": task})
    with tasklog.sink(lambda *call: seen.append(call)):
        task.log("x", 1, prog_bar=True)
        task.log_dict({"y": 2}, batch_size=3)
    assert seen[0] == ("a", "x", 1, {"prog_bar": True})
    assert seen[1][:3] == ("a", "y", 2)
    assert seen[1][3]["batch_size"] == 3


def test_callbacks_of_tasks_are_used() -> None:
    class Counts(Callback):
        steps = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.steps += 1

    class Brings(Linear):
        def configure_callbacks(self) -> Any:
            self.counts = Counts()
            return self.counts

    task = Brings()
    trainer(max_epochs=1).fit(MultiTaskModule({"a": task}), CombinedLoader({"a": loader(9, 3)}))
    assert task.counts.steps == 3


def test_modules_that_were_in_eval_mode_are_so_again_after_validation() -> None:
    class Measures(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.mean.update(batch[0].sum())
            self.log("mean", self.mean)

    task = Recording()
    task.shared.eval()
    run = trainer(max_epochs=1)
    run.fit(
        MultiTaskModule({"a": task}),
        CombinedLoader({"a": loader(3, 3)}),
        CombinedLoader({"a": loader(3, 3)}, "max_size"),
    )
    # Recording's own on_validation_model_train calls super(), which sets train mode, as in a fit alone.
    assert task.training
    quiet = Measures()
    quiet.shared.eval()
    trainer(max_epochs=1).fit(
        MultiTaskModule({"a": quiet}),
        CombinedLoader({"a": loader(3, 3)}),
        CombinedLoader({"a": loader(3, 3)}, "max_size"),
    )
    assert [name for name, module in quiet.named_modules() if not module.training] == ["shared"]


def test_checkpoint_hooks_see_a_checkpoint_of_their_own(tmp_path: Any) -> None:
    class Keeps(Linear):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = self.lr
            del checkpoint["state_dict"]["head.bias"]

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.loaded = checkpoint["mine"], checkpoint["epoch"]
            checkpoint["state_dict"]["head.bias"] = torch.full((1,), 7.0)

    def build() -> MultiTaskModule:
        return MultiTaskModule({"a": Keeps(lr=0.1), "b": Keeps(lr=0.2)})

    first, second = build(), build()
    run = trainer(max_epochs=1)
    run.fit(first, CombinedLoader({"a": loader(3, 3), "b": loader(3, 3)}))
    run.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert saved["tasks"] == {"a": {"mine": 0.1}, "b": {"mine": 0.2}}
    assert "tasks.a.head.bias" not in saved["state_dict"]
    assert "tasks.a.head.weight" in saved["state_dict"]
    trainer(max_epochs=1).fit(
        second, CombinedLoader({"a": loader(3, 3), "b": loader(3, 3)}), ckpt_path=tmp_path / "x.ckpt"
    )
    assert [second.tasks[name].loaded for name in "ab"] == [(0.1, 1), (0.2, 1)]
    assert second.tasks["a"].head.bias.item() == 7.0


# ----------------------------------------------------------------------------------------- the optimizers
class Configured(Linear):
    """A task with an optimizer given by the test."""

    def __init__(self, shared: nn.Module | None, make: Callable[["Configured"], Any]) -> None:
        super().__init__(shared)
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


def merged(make_a: Callable[..., Any], make_b: Callable[..., Any]) -> tuple[MultiTaskModule, Any]:
    shared = nn.Linear(3, 3)
    model = MultiTaskModule({"a": Configured(shared, make_a), "b": Configured(shared, make_b)})
    return model, model.configure_optimizers()


def split(task: Linear, lr: float = 0.1) -> Optimizer:
    groups = [{"params": [task.head.bias, task.shared.bias], "weight_decay": 0.0}]
    return AdamW([{"params": [task.head.weight, task.shared.weight]}, *groups], lr=lr, weight_decay=0.5)


def test_c50_shared_parameters_are_in_the_first_tasks_group_and_no_decay_groups_stay() -> None:
    model, optimizer = merged(split, split)
    a, b = model.tasks["a"], model.tasks["b"]
    expected = [
        [a.head.weight, a.shared.weight],
        [a.head.bias, a.shared.bias],
        [b.head.weight],
        [b.head.bias],
    ]
    assert [[id(p) for p in g["params"]] for g in optimizer.param_groups] == [
        [id(p) for p in group] for group in expected
    ]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0.0, 0.5, 0.0]


def test_c50_a_shared_parameter_moves_once_per_step_and_as_in_one_optimizer() -> None:
    model, optimizer = merged(split, split)
    twin = copy.deepcopy(model)
    parameters = dict(twin.named_parameters())
    weights = [p for name, p in parameters.items() if name.endswith("weight")]
    biases = [p for name, p in parameters.items() if name.endswith("bias")]
    reference = AdamW(
        [{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.1, weight_decay=0.5
    )
    batch = {"a": [torch.randn(4, 3)], "b": [torch.randn(2, 3)]}
    with tasklog.sink(lambda *_: None):
        for one, opt in ((model, optimizer), (twin, reference)):
            one.training_step(batch, 0)["loss"].backward()
            opt.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("make_b", "message"),
    [
        (
            lambda t: split(t, lr=0.01),
            r"'tasks.a.shared.weight' is shared by tasks 'a' and 'b'.*lr 0.1 and 0.01",
        ),
        (
            lambda t: AdamW(t.parameters(), lr=0.1, weight_decay=0.5),
            r"shared.bias'.*weight_decay 0.0 and 0.5",
        ),
        (
            lambda t: SGD(t.parameters(), lr=0.1),
            r"'a' and 'b' configure optimizers of different classes, AdamW",
        ),
        (
            lambda t: {"optimizer": (o := split(t)), "lr_scheduler": StepLR(o, 1)},
            r"shared by tasks 'a' and 'b', of which 'b' has a learning rate scheduler for it and 'a' none",
        ),
        (lambda t: [split(t), split(t)], r"task 'b': configure_optimizers gave 2 optimizers"),
        (
            lambda t: {
                "optimizer": (o := split(t)),
                "lr_scheduler": {"scheduler": ReduceLROnPlateau(o), "monitor": "x"},
            },
            r"task 'b': ReduceLROnPlateau waits for a metric",
        ),
    ],
)
def test_c50_conflicts_are_refused_by_name(make_b: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merged(split, make_b)


def test_a_task_without_an_optimizer_is_left_alone() -> None:
    _, optimizer = merged(split, lambda t: None)
    assert len(optimizer.param_groups) == 2
    assert MultiTaskModule({"a": Configured(None, lambda t: None)}).configure_optimizers() is None


def scheduled(make: Callable[[Optimizer], Any], **timing: Any) -> Callable[[Linear], Any]:
    def configure(task: Linear) -> Any:
        optimizer = SGD(task.head.parameters(), lr=1.0, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **timing}}

    return configure


STEP = {"interval": "step"}


def test_each_scheduler_drives_its_own_groups() -> None:
    halves = scheduled(lambda o: StepLR(o, 1, gamma=0.5), **STEP)
    cycle = scheduled(lambda o: OneCycleLR(o, max_lr=1.0, total_steps=10), **STEP)
    _, result = merged(halves, cycle)
    optimizer, scheduler = result["optimizer"], result["lr_scheduler"]["scheduler"]
    alone = cycle(Linear())
    assert result["lr_scheduler"]["interval"] == "step"
    for step in range(1, 5):
        optimizer.step()
        scheduler.step()
        alone["optimizer"].step()
        alone["lr_scheduler"]["scheduler"].step()
        a, b = optimizer.param_groups
        assert a["lr"] == 0.5**step
        for key in ("lr", "momentum"):
            assert b[key] == alone["optimizer"].param_groups[0][key]
    assert scheduler.get_last_lr() == [a["lr"], b["lr"]]


def test_schedulers_go_on_after_a_load_and_without_parameters() -> None:
    halves = scheduled(lambda o: StepLR(o, 1, gamma=0.5), **STEP)
    _, first = merged(halves, halves)
    first["optimizer"].step()
    first["lr_scheduler"]["scheduler"].step()
    states = copy.deepcopy((first["optimizer"].state_dict(), first["lr_scheduler"]["scheduler"].state_dict()))
    _, second = merged(halves, halves)
    second["optimizer"].load_state_dict(states[0])
    second["lr_scheduler"]["scheduler"].load_state_dict(states[1])
    for group in second["optimizer"].param_groups:
        group["params"].clear()
    second["lr_scheduler"]["scheduler"].step()
    assert [g["lr"] for g in second["optimizer"].param_groups] == [0.25, 0.25]
    with pytest.raises(ValueError, match=r"0 schedulers for task 'b', the module has 1"):
        second["lr_scheduler"]["scheduler"].load_state_dict({"tasks": {"a": [{}]}, "last_epoch": 0})


def test_schedulers_that_step_at_different_times_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'a' and 'b' step at different times: every 1 step.* every 1 epoch"
    ):
        merged(scheduled(lambda o: StepLR(o, 1), **STEP), scheduled(lambda o: StepLR(o, 1), interval="epoch"))


def test_a_group_that_other_tasks_own_is_left_out_and_schedules_go_on() -> None:
    """Shared parameters in a group of their own: a strategy may refuse or drop groups without parameters."""

    def configure(task: Linear) -> Any:
        groups = [{"params": task.shared.parameters(), "lr": 4.0}, {"params": task.head.parameters()}]
        optimizer = SGD(groups, lr=1.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": StepLR(optimizer, 1, gamma=0.5), **STEP},
        }

    model, result = merged(configure, configure)
    optimizer = result["optimizer"]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2, 2]
    assert optimizer.param_groups[2]["params"] == list(model.tasks["b"].head.parameters())
    optimizer.step()
    result["lr_scheduler"]["scheduler"].step()
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 0.5, 0.5]


def test_a_schedule_that_parts_from_the_owners_is_warned_of() -> None:
    def decays(by: float) -> Callable[[Linear], Any]:
        def configure(task: Linear) -> Any:
            optimizer = SGD(task.parameters(), lr=1.0)
            scheduler = LambdaLR(optimizer, lambda step: by**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **STEP}}

        return configure

    _, result = merged(decays(0.5), decays(0.25))
    with pytest.warns(UserWarning, match=r"task 'b' schedules a learning rate of 0.25 .* with task 'a'"):
        result["lr_scheduler"]["scheduler"].step()
    assert [g["lr"] for g in result["optimizer"].param_groups] == [0.5, 0.25]


def test_a_fit_with_schedulers_equals_the_tasks_fitted_alone() -> None:
    """Two tasks that share nothing: merging must change nothing."""

    def build() -> dict[str, Configured]:
        torch.manual_seed(0)
        halves = scheduled(lambda o: StepLR(o, 2, gamma=0.5), **STEP)
        cycle = scheduled(lambda o: OneCycleLR(o, max_lr=0.1, total_steps=10), **STEP)
        return {"a": Configured(None, halves), "b": Configured(None, cycle)}

    together, alone = build(), build()
    loaders = {"a": loader(9, 3), "b": loader(6, 2)}
    trainer().fit(MultiTaskModule(together), CombinedLoader(loaders))
    for name, task in alone.items():
        trainer().fit(task, loaders[name])
        for mine, theirs in zip(together[name].parameters(), task.parameters(), strict=True):
            assert torch.equal(mine, theirs)
