"""Hooks that look at gradients see those of one process, or are told why they cannot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm

from lightning_spindle import MultiTaskModule, SpindleStrategy
from tests.cases import test_c03_idle_tasks as idle
from tests.cases import test_freezing as freezing
from tests.strategy.ending import assert_all_ended, watch_fit
from tests.support import toys
from tests.support.fitting import (
    assert_same_fit,
    fit_once,
    metagraph_of,
    plain_fit,
    random_plan,
    spindle_fit,
    without_gradients,
)
from tests.support.ranks import run_ranks
from tests.support.small import Given, Part, forced_fit, metagraph, placement, random_samples, together


class Lists(Callback):
    """Which parameters have a gradient at hooks that may look, and which are listed before a step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _look(self, steps_next: bool, trainer: Any, module: Any, *args: Any) -> None:
        names = {id(p): n for n, p in module.named_parameters()}
        there = [n for n, p in module.named_parameters() if p.grad is not None]
        groups = [[names[id(p)] for p in g["params"]] for g in trainer.optimizers[0].param_groups]
        self.seen.append((trainer.global_step, there, groups if steps_next else None))

    on_after_backward = partialmethod(_look, True)
    on_before_optimizer_step = partialmethod(_look, True)
    on_train_batch_end = partialmethod(_look, False)
    on_before_zero_grad = partialmethod(_look, False)


class Saves(Callback):
    """Saves a checkpoint where gradients are there, as some callbacks do every few steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        trainer.save_checkpoint(self.path / f"{trainer.world_size}.ckpt")


def seen_by(
    strategy: Callable[[], Any],
    make: Callable[[], Any],
    more: Callable[[], Any],
    devices: int,
    **options: Any,
) -> Any:
    def body(rank: int, size: int) -> Any:
        lists = Lists()
        fit_once(make, freezing.data, strategy(), devices=size, callbacks=[more(), lists], **options)
        return lists.seen

    return run_ranks(body, devices, init_group=devices > 1)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("kind", "callback"),
    [
        (freezing.AllListed, partial(freezing.Sets, shared={1: False, 2: True}, own={2: False})),
        (freezing.Towers, freezing.Finetunes),
    ],
    ids=["frozen and back", "BaseFinetuning"],
)
def test_which_gradients_there_are(kind: Any, callback: Callable[[], Any], sharded: bool) -> None:
    make, options = partial(freezing.model, kind, "adamw", False), freezing.EPOCHS
    plan = placement(metagraph(make(), freezing.data()), 3, freezing.PLACES[3])
    strategy = partial(
        SpindleStrategy, plan=plan, operators=(Part,), timeline=False, shard_optimizer_state=sharded
    )
    (plain,) = seen_by(lambda: "auto", make, callback, 1, **options)
    ours = seen_by(strategy, make, callback, 3, **options)
    assert ours == [plain] * 3


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_that_a_hook_saves(sharded: bool, tmp_path: Path) -> None:
    make = partial(freezing.model, freezing.AllListed, "adamw", False)
    plan = placement(metagraph(make(), freezing.data()), 3, freezing.PLACES[3])
    options = {"operators": (Part,), "timeline": False, "shard_optimizer_state": sharded}
    strategy, saves = partial(SpindleStrategy, plan=plan, **options), partial(Saves, tmp_path)
    (plain,) = seen_by(lambda: "auto", make, saves, 1, max_steps=4)
    assert seen_by(strategy, make, saves, 3, max_steps=4) == [plain] * 3
    one, ours = (torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in (1, 3))
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(ours[key], one[key], rtol=1e-9, atol=1e-9)


class SetsToZero(MultiTaskModule):
    """Keeps gradients of zeros, of idle tasks too."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("kind", [MultiTaskModule, SetsToZero])
def test_which_gradients_there_are_where_tasks_are_idle(kind: type[MultiTaskModule]) -> None:
    def body(strategy: Callable[[], Any], rank: int, size: int) -> Any:
        lists, make = Lists(), lambda: kind(idle.model("adamw").tasks)
        fit_once(make, idle.data, strategy(), devices=size, callbacks=[lists], **options)
        return lists.seen

    options: dict[str, Any] = {"max_epochs": 1, "max_steps": -1}
    graph = metagraph(idle.model("adamw"), idle.data())
    plan = placement(graph, 3, {"a/": (0,), "b/": (1,)})
    (plain,) = run_ranks(partial(body, lambda: "auto"), 1, init_group=False)
    ours = run_ranks(partial(body, partial(SpindleStrategy, plan=plan, operators=(Part,), timeline=False)), 3)
    assert ours == [plain] * 3


class Metas(Callback):
    """Whether there are gradients that are not here."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.seen.append(any(p.grad is not None and p.grad.is_meta for p in module.parameters()))


def test_inside_of_an_accumulation_window_each_rank_sees_its_own() -> None:
    def body(rank: int, size: int) -> list[bool]:
        metas, strategy = Metas(), SpindleStrategy(plan=plan, operators=(Part,), timeline=False)
        options = {"callbacks": [metas], "accumulate_grad_batches": 2, "max_steps": 2}
        fit_once(make, data, strategy, devices=size, **options)
        return metas.seen

    def data() -> Any:
        samples = random_samples(8, 1, x=(3,), y=(1,))
        return together(a=Given(samples, [2] * 4), b=Given(samples, [2] * 4))

    make = partial(freezing.model, freezing.AllListed, "adamw", False)
    plan = placement(metagraph(make(), data()), 3, freezing.PLACES[3])
    assert run_ranks(body, 3) == [[False, True, False, True]] * 3


class LogsNorms(Callback):
    """Norms of gradients of the whole model, before and after a clipping of its own."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        with whole_model(trainer):
            module.log_dict(grad_norm(module, 2))
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        # Inside of an accumulation window gradients are each rank's own.
        if trainer.accumulate_grad_batches == 1:
            with whole_model(trainer):
                module.log_dict({f"{name} after": norm for name, norm in grad_norm(module, 2).items()})


def whole_model(trainer: Any) -> AbstractContextManager[Any]:
    """What a script says that also runs without Spindle."""
    return getattr(trainer.strategy, "full_model", nullcontext)()


@pytest.mark.parametrize(("accumulated", "sharded"), [(1, False), (1, True), (2, True)])
def test_norms_in_the_full_model(accumulated: int, sharded: bool) -> None:
    make = partial(toys.model, "adamw")
    options = {"max_steps": 4, "callbacks": [LogsNorms()], "accumulate_grad_batches": accumulated}
    plan = random_plan(metagraph_of(toys.model(), toys.data()), 3, seed=3)
    strategy = {"plan": plan, "shard_optimizer_state": sharded}
    ours = spindle_fit(make, toys.data, 3, strategy=strategy, **options)
    reference = plain_fit(make, toys.data, **options)
    if accumulated > 1:
        ours, reference = without_gradients(ours), without_gradients([reference])[0]
    assert_same_fit(ours, reference)
    assert "grad_2.0_norm_total" in reference.metrics


def logs_norms(module: Any, optimizer: Any) -> None:
    module.log_dict(grad_norm(module, 2))


def clips_parameters(module: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def clips_groups(module: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)


def looks_for_infinities(module: Any, optimizer: Any) -> None:
    if any(not p.grad.isfinite().all() for p in module.parameters() if p.grad is not None):
        optimizer.zero_grad()


def looks_after_the_full_model(module: Any, optimizer: Any) -> None:
    with module.trainer.strategy.full_model():
        looks_for_infinities(module, optimizer)
    looks_for_infinities(module, optimizer)


class Calls(Callback):
    """Calls a function that looks at gradients in one hook."""

    def __init__(self, hook: str, look: Callable[[Any, Any], None]) -> None:
        setattr(self, hook, lambda trainer, module, *args: look(module, trainer.optimizers[0]))


@pytest.mark.parametrize(
    ("hook", "look"),
    [
        ("on_before_optimizer_step", logs_norms),
        ("on_before_optimizer_step", clips_parameters),
        ("on_before_optimizer_step", clips_groups),
        ("on_before_optimizer_step", looks_after_the_full_model),
        ("on_after_backward", looks_for_infinities),
        ("on_train_batch_end", looks_for_infinities),
        ("on_before_zero_grad", looks_for_infinities),
    ],
)
def test_looking_at_a_part_is_refused(hook: str, look: Callable[[Any, Any], None]) -> None:
    outcomes = watch_fit(
        2,
        lambda rank: freezing.model(freezing.AllListed, "adamw", False),
        lambda rank: freezing.data(),
        options=lambda rank: {"callbacks": [Calls(hook, look)]},
    )
    assert_all_ended(outcomes, "meta")
    assert any("self.clip_gradients" in str(o.traceback) for o in outcomes), outcomes


class AddsInHook(freezing.Adds):
    """Unfreezes the tower, and gives it a group of its own, where the groups list all parameters."""

    def on_train_batch_start(self, *args: Any) -> None: ...

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        super().on_train_batch_start(trainer, module, None, 0)


def test_a_group_that_is_added_in_a_hook() -> None:
    make = partial(freezing.model, freezing.Towers, "adamw", True)
    options = {"callbacks": [AddsInHook()], **freezing.EPOCHS}
    ours = forced_fit(make, freezing.data, 3, freezing.PLACES[3], **options)
    assert_same_fit(ours, plain_fit(make, freezing.data, **options))


class AddsOnOneRank(AddsInHook):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == 1 and trainer.global_rank == 0:
            optimizer.add_param_group({"params": list(module.tasks["a"].shared.parameters())})


class Rewrites(Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["params"].pop()


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (AddsOnOneRank, "ranks do not train the same parameters any more"),
        (Rewrites, "put into a group of the optimizer, or taken out of it"),
    ],
)
def test_what_hooks_do_to_groups_is_refused_as_elsewhere(callback: Callable[[], Any], message: str) -> None:
    outcomes = watch_fit(
        2,
        lambda rank: freezing.model(freezing.Towers, "adamw", True),
        lambda rank: freezing.data(),
        options=lambda rank: {"callbacks": [callback()]},
    )
    assert_all_ended(outcomes, message)


class Skips(MultiTaskModule):
    """Steps in every second batch only, after the gradients are there."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
        else:
            closure()


def test_batches_without_a_step() -> None:
    def make() -> MultiTaskModule:
        return Skips(toys.model("adamw").tasks)

    plan = random_plan(metagraph_of(make(), toys.data()), 3, seed=2)
    ours = spindle_fit(make, toys.data, 3, strategy={"plan": plan}, max_epochs=2, max_steps=-1)
    assert_same_fit(ours, plain_fit(make, toys.data, max_epochs=2, max_steps=-1))


class Keeps(MultiTaskModule):
    """Keeps gradients for more steps, as some do to accumulate them on their own."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 4 == 0:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_gradients_that_are_kept(accumulated: int) -> None:
    """What was summed before is not summed again."""
    make, data = partial(toys.model, "adamw"), toys.data
    options = {"max_steps": 5, "accumulate_grad_batches": accumulated}
    plan = random_plan(metagraph_of(make(), data()), 3, seed=4)

    def keeps() -> Any:
        return Keeps(make().tasks)

    ours = spindle_fit(keeps, data, 3, strategy={"plan": plan}, **options)
    plain = plain_fit(keeps, data, **options)
    if accumulated > 1:
        without_gradients([*ours, plain])
    assert_same_fit(ours, plain)
