"""PARITY of what hooks see of the steps' outputs: the whole batch's, on every rank, whoever computed it."""

from __future__ import annotations

import dis
import functools
import inspect
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_spindle import SpindleStrategy
from lightning_spindle.capture import flatten
from lightning_spindle.runtime.outputs import listens, require_exact
from tests.strategy.ending import assert_all_ended, watch_fit
from tests.support.ranks import RankError, run_ranks
from tests.support.small import (
    Given,
    Layer,
    Part,
    Sample,
    Samples,
    Small,
    metagraph,
    multi,
    placement,
    random_samples,
    together,
)

Heard = list[tuple[str, int, Any]]


class Pair(NamedTuple):
    first: Any
    second: Any


def frozen(outputs: Any) -> Any:
    """A copy that later steps do not change."""
    leaves, spec = flatten(outputs)
    return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in leaves], spec


class Listener(Callback):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: Heard = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append(("train", batch_idx, frozen(outputs)))

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.heard.append((f"validation {dataloader_idx}", batch_idx, frozen(outputs)))

    def on_test_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.heard.append((f"test {dataloader_idx}", batch_idx, frozen(outputs)))


class Telling(Small):
    """Returns much beside its loss: rows, a row's scalar, sums, numbers, parts of the batch, constants."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Layer(3, 4), Layer(4, 2, last=True)
        self.register_buffer("seen", torch.zeros(2))
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.label = "told"

    def told(self, batch: Sample, batch_idx: int) -> dict[str, Any]:
        z = self.scale * self.head(self.tower(batch["x"]))
        wrong = (z - batch["y"]).abs() > 0.5
        return {
            "loss": F.mse_loss(z, batch["y"]),
            "logits": z,
            "rows": [z[:, 0], {"odd": z.t(), "all pairs": z @ z.t()}],
            "mean": z.mean(),
            "sums": wrong.sum(0),
            "pair": Pair(wrong.sum(), (z.square().sum().item(), len(z), batch_idx)),
            "batch": batch,
            "note": [self.label, None, 3],
            "seen": self.seen,
            "scale": self.scale,
        }

    def training_step(self, batch: Sample, batch_idx: int) -> dict[str, Any]:
        self.log("loss", (out := self.told(batch, batch_idx))["loss"])
        return out

    def validation_step(self, batch: Sample, batch_idx: int) -> dict[str, Any]:
        return self.told(batch, batch_idx)

    def test_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        return self.told(batch, batch_idx)["logits"]


class Silent(Small):
    """Says nothing in validation, a number in tests; hears itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Layer(3, 2, last=True)
        self.heard: Heard = []

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.tower(batch["x"]), batch["y"])

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def test_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        return self.training_step(batch, batch_idx)


class Hearing(Telling):
    """Hears its own outputs in its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: Heard = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append(("train", batch_idx, frozen(outputs)))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append(("validation", batch_idx, frozen(outputs)))

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append(("test", batch_idx, frozen(outputs)))


class Data(Given):
    """Training batches of 4, 4 and 3 rows; validation and test batches of 4 and 1."""

    def __init__(self, seed: int) -> None:
        super().__init__(random_samples(11, seed, x=(3,), y=(2,)), [4, 4, 3])

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(self.samples[:5]), 4)

    test_dataloader = val_dataloader


def tasks(kind: Callable[[], LightningModule] = Telling) -> Any:
    torch.manual_seed(0)
    return multi({"a": kind(), "b": Silent()})


def data() -> Any:
    return together(a=Data(1), b=Data(2))


def heard(
    model: Any, data: Any, strategy: Any, devices: int, callbacks: list[Callback], hearing: list[Any]
) -> list[Heard]:
    """What those in ``hearing`` hear of a fit and a test."""
    seed_everything(7, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        precision="64-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        default_root_dir=tempfile.gettempdir(),
        strategy=strategy,
        callbacks=callbacks,
    )
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    return [one.heard for one in hearing]


def of_listener(make: Callable[[], Any], data: Callable[[], Any], strategy: Any, size: int) -> list[Heard]:
    listener = Listener()
    return heard(make(), data(), strategy(), size, [listener], [listener])


def of_task(make: Callable[[], Any], data: Callable[[], Any], strategy: Any, size: int) -> list[Heard]:
    model = make()
    return heard(model, data(), strategy(), size, [], [model.tasks["a"]])


def assert_heard(
    listening: Callable[..., list[Heard]],
    make: Callable[[], Any],
    data: Callable[[], Any],
    devices: int,
    **strategy: Any,
) -> Heard:
    """Every rank hears what one process hears, which is returned."""
    arguments = {"profile_budget_s": 0.5, "timeline": False, **strategy}
    (plain,) = run_ranks(lambda r, n: listening(make, data, lambda: "auto", n), 1, init_group=False)[0]
    ours = run_ranks(
        lambda r, n: listening(make, data, lambda: SpindleStrategy(**arguments), n),
        devices,
        timeout_s=120,
        init_group=devices > 1,
    )
    for rank, (own,) in enumerate(ours):
        assert len(own) == len(plain) > 0
        for (hook, idx, (leaves, spec)), (hook_, idx_, (leaves_, spec_)) in zip(own, plain, strict=True):
            where = f"rank {rank}, {hook} {idx}"
            assert (hook, idx, spec) == (hook_, idx_, spec_), where
            for leaf, other in zip(leaves, leaves_, strict=True):
                assert type(leaf) is type(other), where
                torch.testing.assert_close(
                    leaf, other, rtol=1e-9, atol=1e-9, msg=lambda m, at=where: f"{at}: {m}"
                ) if isinstance(leaf, (torch.Tensor, float)) else None
                assert isinstance(leaf, (torch.Tensor, float)) or leaf == other, where
    return plain


def plan(groups: dict[str, tuple[int, ...]], devices: int) -> dict[str, Any]:
    return {"plan": placement(metagraph(tasks(), data()), devices, groups), "operators": (Part,)}


@pytest.mark.parametrize(
    ("devices", "groups"),
    [
        (1, {"": (0,)}),
        (2, {"a/": (1,), "b/": (0,)}),
        (3, {"a/tower": (0, 1, 2), "a/head": (2, 1), "a/": (1,), "b/": (0, 2)}),
    ],
)
def test_outputs_of_tasks(devices: int, groups: dict[str, tuple[int, ...]]) -> None:
    plain = assert_heard(of_listener, tasks, data, devices, **plan(groups, devices))
    assert [hook for hook, _, _ in plain] == ["validation 0"] + ["train"] * 3 + ["validation 0"] * 2 + [
        "test 0"
    ] * 2


def test_outputs_in_a_tasks_own_hooks() -> None:
    groups = {"a/": (1,), "b/": (0,)}
    make = functools.partial(tasks, Hearing)
    assert_heard(of_task, make, data, 2, **plan(groups, 2))


class Joined(LightningModule):
    """Of a dict of batches: outputs of one task, of both, of the loss's weights, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.one, self.two = Layer(3, 4), Layer(4, 2, last=True), Layer(4, 2, last=True)
        self.weights = torch.nn.Parameter(torch.ones(2))

    def told(self, batch: dict[str, Sample | None]) -> dict[str, Any]:
        out: dict[str, Any] = {"label": "joined", "weights": self.weights}
        loss: Any = 0
        for at, (key, head) in enumerate((("a", self.one), ("b", self.two))):
            if (own := batch[key]) is not None:
                z = head(self.tower(own["x"]))
                part = F.mse_loss(z, own["y"])
                loss = loss + self.weights[at] * part
                out[key] = {"z": z, "count": len(z), "wrong": (z > own["y"]).sum(), "first": z.detach()[:, 0]}
                out[key]["part"] = part.detach()
        if {"a", "b"} <= out.keys():
            out["parts"] = torch.stack([out["a"]["part"], out["b"]["part"]])
        return {**out, "loss": loss, "twice": [loss.detach(), 2 * loss.detach()]}

    def training_step(self, batch: dict[str, Sample | None], batch_idx: int) -> dict[str, Any]:
        return self.told(batch)

    def validation_step(self, batch: Sample, batch_idx: int, dataloader_idx: int = 0) -> Any:
        out = self.told({"a": None, "b": None, "ab"[dataloader_idx]: batch})
        return [out["loss"], out["loss"].item()] if dataloader_idx else out

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Keyed(LightningDataModule):
    """Loaders ``a`` and ``b`` side by side, in training; one after the other, in evaluation."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode, self.parts = mode, {"a": Data(1), "b": Data(2)}

    def train_dataloader(self) -> CombinedLoader:
        self.parts["b"].batches = self.parts["b"].batches[:2]
        return CombinedLoader({k: part.train_dataloader() for k, part in self.parts.items()}, self.mode)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [part.val_dataloader() for part in self.parts.values()]

    test_dataloader = val_dataloader


def joined() -> Any:
    torch.manual_seed(0)
    return Joined()


@pytest.mark.parametrize(("devices", "mode"), [(1, "max_size"), (2, "max_size_cycle"), (3, "max_size")])
def test_outputs_of_a_module_of_its_own(devices: int, mode: str) -> None:
    planner = {"planner": "seq", "operators": (Part,)}
    assert_heard(of_listener, joined, lambda: Keyed(mode), devices, **planner)


class Mixed(Joined):
    """A step of one operator, which returns objects too."""

    def told(self, batch: dict[str, Sample | None]) -> dict[str, Any]:
        z = self.tower(torch.cat([own["x"] for own in batch.values() if own is not None]))
        if float(z.detach().sum()) > 1e9:
            z = -z
        return {"loss": z.square().mean(), "sums": z.sum(0), "set": {1, 2}, "z": z, "n": float(z[0, 0])}


@pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")
def test_outputs_of_a_step_that_runs_as_one_operator() -> None:
    def mixed() -> Any:
        torch.manual_seed(0)
        return Mixed()

    assert_heard(of_listener, mixed, lambda: Keyed("max_size_cycle"), 2)


class Sealed(Telling):
    def training_step(self, batch: Sample, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.told(batch, batch_idx)["loss"], "text": lambda: "cannot be sent"}


@pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")
def test_outputs_that_cannot_be_sent_are_refused() -> None:
    outcomes = watch_fit(
        2,
        lambda rank: tasks(Sealed),
        lambda rank: data(),
        options=lambda rank: {"callbacks": [Listener()]},
    )
    assert_all_ended(outcomes, "task a: its step returns or logs what cannot be sent", "use tensors, numbers")


class Late(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.callbacks.append(Listener())


class Capturing(Callback):
    """Notes what is given to other ranks, for hooks."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        captured = trainer.strategy._session.steps["training_step"].capture
        self.heard.append((sorted(captured.giving), [r.key for r in captured.graph.results]))


def of_capture(callbacks: Callable[[int], list[Callback]], rank: int, size: int) -> Any:
    capturing = Capturing()
    own = [*callbacks(rank), capturing]
    return heard(tasks(), data(), SpindleStrategy(profile_budget_s=0.5), size, own, [capturing])[0][0]


def test_without_listeners_nothing_is_given_to_other_ranks() -> None:
    silent = run_ranks(functools.partial(of_capture, lambda rank: []), 2, timeout_s=120)
    assert silent == [([], ["loss", "log:loss", "loss"])] * 2


def test_a_listener_on_one_rank_hears_and_one_that_comes_late_is_refused() -> None:
    on_one = run_ranks(functools.partial(of_capture, lambda rank: [Listener()] * rank), 2, timeout_s=120)
    assert [given for given, _ in on_one] == [["a/given"]] * 2
    with pytest.raises(RankError, match="on_train_batch_end was added after training_step was taken apart"):
        run_ranks(functools.partial(of_capture, lambda rank: [Late()]), 1, init_group=False)


class Derived(ModelCheckpoint):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, module, outputs, *rest)


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (TQDMProgressBar(), False),
        (ModelCheckpoint(), False),
        (LambdaCallback(on_train_start=print), False),
        (LambdaCallback(on_train_batch_end=lambda *given: None), True),
        (Derived(), True),
        (Listener(), True),
    ],
)
def test_which_callbacks_listen(callback: Callback, expected: bool) -> None:
    trainer = Trainer(callbacks=[callback], logger=False, enable_model_summary=False, barebones=False)
    trainer.strategy._lightning_module = tasks()
    assert listens(trainer, "training_step") is expected


def test_lightnings_own_callbacks_do_not_look_at_outputs() -> None:
    """Which the rule relies on."""
    for _, kind in inspect.getmembers(lightning_callbacks, inspect.isclass):
        for hook in ("on_train_batch_end", "on_validation_batch_end", "on_test_batch_end"):
            read = [i for i in dis.get_instructions(getattr(kind, hook)) if i.opname.startswith("LOAD")]
            assert not [i for i in read if i.argval == "outputs"], f"{kind.__name__}.{hook} reads outputs"


def test_integers_that_the_exchange_would_round_are_refused() -> None:
    require_exact("a", torch.tensor(2**53 - 1), None)
    with pytest.raises(ValueError, match="task 'a': a step gives the integer 9007199254740992"):
        require_exact("a", 2.0**53, int)
