"""Bad input gets one clear error on every rank, before any collective can hang."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from lightning_spindle import MultiTaskDataModule, MultiTaskModule
from lightning_spindle.plan import Configuration, ExecutionPlan
from lightning_spindle.strategy import SpindleStrategy
from tests.strategy.ending import LIMIT_S, assert_refused, watch_fit
from tests.support import toys
from tests.support.fitting import fit_once, metagraph_of, placed
from tests.support.ranks import watch_ranks


def plan_on(devices: int, *groups: tuple[int, ...]) -> ExecutionPlan:
    """A plan of the toy model: MetaOps on the groups in turn."""
    metagraph = metagraph_of(toys.model(), toys.data())
    names = [m.name for m in metagraph.metaops]
    return placed(metagraph, devices, lambda name: groups[names.index(name) % len(groups)])


# ------------------------------------------------------------------------------------------ the arguments


def test_planner_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"no planner is called 'greedy'; there are .*spindle"):
        SpindleStrategy(planner="greedy")


def test_plan_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the plan .*missing\.json cannot be read"):
        SpindleStrategy(plan=tmp_path / "missing.json")
    (tmp_path / "torn.json").write_text('{"format": 1, "runs": [')
    with pytest.raises(
        ValueError, match=r"the plan .*torn\.json cannot be read: invalid plan: the text is no JSON"
    ):
        SpindleStrategy(plan=tmp_path / "torn.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"the plan .*bytes\.json"):
        SpindleStrategy(plan=str(tmp_path / "bytes.json"))


def test_plan_differs_between_ranks() -> None:
    """C23: one rank's plan is corrupted on purpose."""
    plans = [plan_on(3, (0,), (1, 2)), plan_on(3, (0,), (2, 1)), plan_on(3, (0,), (1, 2))]
    outcomes = watch_fit(3, strategy=lambda rank: {"plan": plans[rank]})
    assert_refused(outcomes, "ValueError", "SpindleStrategy's arguments", r"ranks \[1\]", "rank 0", "plan")


def test_plan_on_one_rank_only() -> None:
    plan = plan_on(2, (0,), (1,))
    outcomes = watch_fit(2, strategy=lambda rank: {"plan": plan if rank == 0 else None})
    assert_refused(outcomes, "ValueError", "SpindleStrategy's arguments", r"ranks \[1\]", "plan=None")


def test_plan_for_another_number_of_devices() -> None:
    plan = plan_on(2, (0,), (1,))
    outcomes = watch_fit(3, strategy=lambda rank: {"plan": plan})
    assert_refused(outcomes, "ValueError", "plan", "for 2 devices, there are 3")


def test_plan_with_another_parallelism() -> None:
    """It must not run as another plan than it says."""
    plan = plan_on(2, (0,), (0, 1))
    runs = [replace(run, configuration=Configuration(data=1, tensor=len(run.devices))) for run in plan.runs]
    outcomes = watch_fit(2, strategy=lambda rank: {"plan": replace(plan, runs=tuple(runs))})
    assert_refused(outcomes, "ValueError", "invalid plan", "tp2", "data parallel")


def test_plan_for_another_model() -> None:
    plan = plan_on(2, (0,), (1,))
    outcomes = watch_fit(2, smaller_model, smaller_data, strategy=lambda rank: {"plan": plan})
    assert_refused(outcomes, "ValueError", "invalid plan", "MetaOp that the model does not have")


def smaller_model(rank: int = 0) -> MultiTaskModule:
    torch.manual_seed(0)
    return MultiTaskModule({"image_class": toys.Classify(toys.Encoder(5))})


def smaller_data(rank: int = 0) -> MultiTaskDataModule:
    return MultiTaskDataModule({"image_class": toys.Data(12, 5, 5, seed=30)})


# ---------------------------------------------------------------------------------------------- the model


class Empty(LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None

    def configure_optimizers(self) -> None:
        return None


class Lbfgs(toys.Classify):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class Manual(toys.Classify):
    def __init__(self, encoder: toys.Encoder) -> None:
        super().__init__(encoder)
        self.automatic_optimization = False


class TwoOptimizers(toys.Classify):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.encoder.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)]


class Norms(toys.Classify):
    def __init__(self, encoder: toys.Encoder) -> None:
        super().__init__(encoder)
        self.extra = nn.SyncBatchNorm(3)


class OwnStep(MultiTaskModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


def learned_weights(rank: int) -> MultiTaskModule:
    made = smaller_model()
    made.weights["image_class"] = nn.Parameter(torch.ones(()))
    return made


def hooked(rank: int) -> MultiTaskModule:
    made = smaller_model()
    made.tasks["image_class"].head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return made


def of_task(kind: type, *args: Any) -> Any:
    return lambda rank: MultiTaskModule({"image_class": kind(toys.Encoder(5), *args)})


REFUSED_MODELS = {
    "no parameters": (
        lambda rank: MultiTaskModule({"image_class": Empty()}),
        r"ValueError.*MultiTaskModule has no parameters",
    ),
    "manual optimization, not multi-task": (
        lambda rank: Manual(toys.Encoder(5)),
        r"ValueError.*does not support manual optimization: leave",
    ),
    "mixing optimizer": (
        of_task(Lbfgs),
        r"ValueError.*cannot use the optimizer LBFGS.*such as SGD or AdamW",
    ),
    "mixing optimizers of two tasks": (
        lambda rank: MultiTaskModule(
            {"image_class": Lbfgs(toys.Encoder(5)), "image_text": Lbfgs(toys.Encoder(5))}
        ),
        r"ValueError.*optimizers of class LBFGS cannot merge.*such as SGD or AdamW",
    ),
    "several optimizers": (of_task(TwoOptimizers), r"ValueError.*task 'image_class'.*2 optimizers"),
    "manual optimization": (of_task(Manual), r"ValueError.*image_class.*automatic"),
    "a step of MultiTaskModule's": (
        lambda rank: OwnStep({"image_class": toys.Classify(toys.Encoder(5))}),
        r"ValueError.*OwnStep overrides training_step of MultiTaskModule.*put it into a task, or write",
    ),
    "learned weights": (learned_weights, r"ValueError.*weights of \['image_class'\] are no plain numbers"),
    "gradient hooks": (hooked, r"ValueError.*gradient hooks.*\(tasks\.image_class\.head\.weight\)"),
    "SyncBatchNorm": (of_task(Norms), r"ValueError.*sync_batchnorm"),
}


@pytest.mark.parametrize("what", REFUSED_MODELS)
def test_model_that_is_refused(what: str) -> None:
    make, message = REFUSED_MODELS[what]
    assert_refused(watch_fit(2, make, smaller_data), "", message)


def test_models_that_differ_between_ranks() -> None:
    """C19: another structure on one rank is named; other values are overwritten by rank 0's."""

    def model(rank: int) -> MultiTaskModule:
        made = smaller_model()
        if rank == 1:
            made.tasks["image_class"].head = nn.Linear(toys.WIDTH, 5)
        return made

    assert_refused(
        watch_fit(3, model, smaller_data),
        "ValueError",
        "the model",
        r"ranks \[1\]",
        r"tasks\.image_class\.head\.weight \(5, 8\)",
        r"tasks\.image_class\.head\.weight \(3, 8\)",
    )


# -------------------------------------------------------------------------------------------- the Trainer


class Hooking(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)


REFUSED_OPTIONS = {
    "GradScaler": (
        {"precision": None, "plugins": MixedPrecision("16-mixed", "cpu")},
        r"16-mixed.*GradScaler.*bf16-mixed",
    ),
    "learning rate finder": ({"callbacks": [LearningRateFinder()]}, "LearningRateFinder is not supported"),
    "averaged weights": (
        {"callbacks": [StochasticWeightAveraging(0.1)]},
        "StochasticWeightAveraging is not supported by SpindleStrategy on several ranks",
    ),
    "moving average": ({"callbacks": [EMAWeightAveraging()]}, "EMAWeightAveraging is not supported"),
    "gradient hooks that come later": ({"callbacks": [Hooking()]}, "gradient hooks.*encoder.stem.weight"),
}


@pytest.mark.parametrize("what", REFUSED_OPTIONS)
def test_option_that_is_refused(what: str) -> None:
    options, message = REFUSED_OPTIONS[what]
    outcomes = watch_fit(2, smaller_model, smaller_data, options=lambda rank: dict(options))
    assert_refused(outcomes, "ValueError", message)


class Abacus(Accelerator):
    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cpu")]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "abacus"


def test_accelerator_that_is_refused() -> None:
    outcomes = watch_fit(
        1, smaller_model, smaller_data, options=lambda rank: {"accelerator": Abacus(), "devices": 1}
    )
    assert_refused(outcomes, "ValueError", "CPU and CUDA devices, not on Abacus", "accelerator='cpu'")


def test_devices_that_are_not_the_launched_processes() -> None:
    """C59: two processes were launched, the Trainer asks for three."""
    outcomes = watch_fit(2, smaller_model, smaller_data, options=lambda rank: {"devices": 3})
    assert_refused(outcomes, "ValueError", "devices=3", r"not match the world size \(2\)")


def test_devices_that_are_not_the_live_ranks() -> None:
    """C21, C59: each of two processes is still in a process group of its own, from an earlier run."""

    def body(rank: int, size: int) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        fit_once(smaller_model, smaller_data, SpindleStrategy(), devices=size, max_steps=1)

    outcomes = watch_ranks(body, 2, timeout_s=LIMIT_S + 10, init_group=False)
    assert_refused(outcomes, "RuntimeError", "1 processes are live", "configured for 2", "earlier run")


def test_predict() -> None:
    def body(rank: int, size: int) -> None:
        trainer = Trainer(
            strategy=SpindleStrategy(),
            accelerator="cpu",
            devices=size,
            logger=False,
            enable_checkpointing=False,
        )
        data = smaller_data()
        data.predict_dataloader = lambda: DataLoader(toys.Sequences(4, 5, 0), 2, collate_fn=toys.collate)
        trainer.predict(smaller_model(), data)

    assert_refused(watch_ranks(body, 2), "NotImplementedError", "does not predict yet", "another strategy")


# ----------------------------------------------------------------------------------------------- the data


def test_loader_of_no_task() -> None:
    def data(rank: int) -> MultiTaskDataModule:
        own = toys.Data(12, 5, 5, seed=30)
        return MultiTaskDataModule({"image_class": own, "image_clas": own})

    outcomes = watch_fit(2, smaller_model, data)
    assert_refused(outcomes, "ValueError", r"batches come with keys \['image_clas'\]", r"\['image_class'\]")


class AddsKey(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            batch["late"] = batch["image_class"]


def test_key_of_no_task_at_a_later_step() -> None:
    outcomes = watch_fit(2, smaller_model, smaller_data, options=lambda rank: {"callbacks": [AddsKey()]})
    assert_refused(outcomes, "ValueError", r"\['late'\]", "no task has", r"\['image_class'\]")


def test_loaders_without_names() -> None:
    def data(rank: int) -> Any:
        return toys.Data(12, 5, 5, seed=30)

    outcomes = watch_fit(2, smaller_model, data)
    assert_refused(outcomes, "ValueError", r"dict \{task: loader\}", "MultiTaskDataModule")


def odd_collate(samples: Any) -> Any:
    batch = toys.collate(samples)
    return {**batch, "more": torch.ones(2)} if any(s["index"] == 6 for s in samples) else batch


def test_batch_of_another_structure() -> None:
    """Only ranks that read the batch see that it has a leaf without rows; the others raise the same error."""

    class Odd(toys.Data):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.train_set, 5, collate_fn=odd_collate)

    def data(rank: int) -> MultiTaskDataModule:
        made = toys.data()
        made.datamodules["image_class"] = Odd(12, 5, 5, seed=30)
        return made

    plan = placed(
        metagraph_of(toys.model(), toys.data()), 2, lambda n: (1,) if n.startswith("image_class") else (0,)
    )
    outcomes = watch_fit(2, make_data=data, strategy=lambda rank: {"plan": plan})
    assert_refused(outcomes, "ValueError", "task image_class", r"\['more'\] has 2 entries .* 5 rows")


def test_ranks_that_draw_different_batches() -> None:
    """The same data set, shuffled by a generator that is seeded by the rank."""

    class Shuffled(toys.Data):
        def __init__(self, rank: int) -> None:
            super().__init__(12, 5, 5, seed=30)
            self.rank = rank

        def train_dataloader(self) -> DataLoader[Any]:
            own = torch.Generator().manual_seed(self.rank)
            return DataLoader(self.train_set, 5, shuffle=True, generator=own, collate_fn=toys.collate)

    plan = placed(metagraph_of(smaller_model(), smaller_data()), 2, lambda name: (0, 1))
    outcomes = watch_fit(
        2,
        smaller_model,
        lambda rank: MultiTaskDataModule({"image_class": Shuffled(rank)}),
        strategy=lambda rank: {"plan": plan},
    )
    assert_refused(outcomes, "ValueError", "task image_class: ranks drew different batches", "seed")


def test_ranks_with_different_numbers_of_batches() -> None:
    def data(rank: int) -> MultiTaskDataModule:
        return MultiTaskDataModule({"image_class": Longer(rank)})

    class Longer(toys.Data):
        def __init__(self, rank: int) -> None:
            super().__init__(12, 5, 5, seed=30)
            self.rank = rank

        def train_dataloader(self) -> DataLoader[Any]:
            sampler = [*range(10), *([0, 1, 2] * self.rank)]
            return DataLoader(self.train_set, 5, sampler=sampler, collate_fn=toys.collate)

    outcomes = watch_fit(2, smaller_model, data)
    assert_refused(outcomes, "ValueError", r"different numbers of batches.*\[2\.0, 3\.0\]", "seed")


def test_nothing_is_wrong_with_the_plain_toy() -> None:
    """What the tests above change is what is refused."""
    for outcome in watch_fit(2, smaller_model, smaller_data):
        assert outcome.value == "ended well", outcome.describe()
