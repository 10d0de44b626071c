"""Fits under Spindle on forked ranks, and the same fit in one plain process: what parity compares."""

import itertools
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_spindle.capture import batch_layout, capture
from lightning_spindle.capture.pieces import Capture
from lightning_spindle.graph import Layout, MetaGraph
from lightning_spindle.plan import Configuration, ExecutionPlan, Run
from lightning_spindle.planner.contraction import contract
from lightning_spindle.runtime.loaders import example, named_loaders
from lightning_spindle.strategy import SpindleStrategy
from tests.support.ranks import run_ranks

Make = Callable[[], Any]


@dataclass
class Fit:
    """What a fit left behind on one rank."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    metrics: dict[str, float]
    steps: list[dict[str, Any]] = field(default_factory=list)


class Recorder(Callback):
    """Each step's loss, logged values, and this rank's live parameters and gradients."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        live = {n: p for n, p in module.named_parameters() if p.device.type != "meta"}
        self.steps.append(
            {
                "loss": float(outputs["loss"]) if outputs else 0.0,  # a step may be skipped
                "logged": {k: float(v) for k, v in trainer.callback_metrics.items()},
                "parameters": {n: p.detach().clone() for n, p in live.items()},
                "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in live.items()},
            }
        )


def fit_once(
    make_model: Make, make_data: Make, strategy: Any, devices: int = 1, seed: int = 7, **options: Any
) -> Fit:
    """One process's part of a fit."""
    seed_everything(seed, verbose=False)
    model, data, recorder = make_model(), make_data(), Recorder()
    callbacks = [recorder, *options.pop("callbacks", [])]
    ckpt_path = options.pop("ckpt_path", None)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": devices,
        "precision": "64-true",
        "max_steps": 8,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": tempfile.gettempdir(),
    }
    trainer = Trainer(**{**settings, **options}, strategy=strategy, callbacks=callbacks)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return Fit(
        {n: p.detach().clone() for n, p in model.named_parameters()},
        {n: b.detach().clone() for n, b in model.named_buffers()},
        {k: float(v) for k, v in trainer.callback_metrics.items()},
        recorder.steps,
    )


def plain_fit(make_model: Make, make_data: Make, **options: Any) -> Fit:
    """The reference: one process, Lightning's own strategy."""
    return run_ranks(
        lambda rank, size: fit_once(make_model, make_data, "auto", **options), 1, init_group=False
    )[0]


def spindle_fit(
    make_model: Make,
    make_data: Make,
    devices: int,
    timeout_s: float = 120.0,
    strategy: Any = None,
    **options: Any,
) -> list[Fit]:
    """The same fit under Spindle, by rank. ``strategy`` holds SpindleStrategy's arguments.

    Where it says nothing else, one planner plans after a short look at the operators; no timeline is drawn.
    """
    arguments = {"profile_budget_s": 0.2, "planner": "spindle", "timeline": False, **(strategy or {})}
    return run_ranks(
        lambda rank, size: fit_once(
            make_model, make_data, SpindleStrategy(**arguments), devices=size, **options
        ),
        devices,
        timeout_s=timeout_s,
        init_group=devices > 1,
    )


def assert_same_fit(ours: list[Fit], reference: Fit, tolerance: float = 1e-9) -> None:
    """PARITY and REPLICA: each rank's live parameters, losses, logs and final state are the reference's."""
    for rank, fit in enumerate(ours):
        assert len(fit.steps) == len(reference.steps)
        for at, (step, expected) in enumerate(zip(fit.steps, reference.steps, strict=True)):
            where = f"rank {rank}, step {at}"
            close(step["loss"], expected["loss"], tolerance, f"{where}: loss")
            assert step["logged"].keys() == expected["logged"].keys(), where
            for key, value in expected["logged"].items():
                close(step["logged"][key], value, tolerance, f"{where}: {key}")
            for name, value in step["parameters"].items():
                close(value, expected["parameters"][name], tolerance, f"{where}: {name}")
                gradient, other = step["gradients"][name], expected["gradients"][name]
                assert (gradient is None) == (other is None), f"{where}: gradient of {name}"
                if gradient is not None:
                    close(gradient, other, tolerance, f"{where}: gradient of {name}")
        assert fit.parameters.keys() == reference.parameters.keys()
        for name, value in fit.parameters.items():
            close(value, reference.parameters[name], tolerance, f"rank {rank}: {name} after fit")
        for name, value in fit.buffers.items():
            close(value, reference.buffers[name], tolerance, f"rank {rank}: buffer {name} after fit")
        assert fit.metrics == approx_dict(reference.metrics, tolerance)
    assert_replicas(ours)


def without_gradients(fits: list[Fit]) -> list[Fit]:
    """The same fits without their gradients, which inside of an accumulation window are each rank's own."""
    for fit in fits:
        for step in fit.steps:
            step["gradients"] = dict.fromkeys(step["gradients"])
    return fits


def assert_replicas(ours: list[Fit]) -> None:
    """REPLICA: all holders of a parameter are bitwise equal after every step."""
    for steps in zip(*(fit.steps for fit in ours), strict=True):
        seen: dict[str, torch.Tensor] = {}
        for step in steps:
            for name, value in step["parameters"].items():
                assert torch.equal(seen.setdefault(name, value), value), f"holders of {name} differ"


def close(ours: Any, theirs: Any, tolerance: float, what: str) -> None:
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")


def approx_dict(values: dict[str, float], tolerance: float) -> Any:
    import pytest

    return pytest.approx(values, rel=tolerance, abs=tolerance)


def captured(model: Any, data: Any, **options: Any) -> Capture:
    """The model's training step taken apart, as a fit would."""
    with isolate_rng():
        data.setup("fit")
        examples = {t: example(loader) for t, loader in named_loaders(data.train_dataloader()).items()}
        layouts = {t: batch_layout(e.batch, e.collate, e.samples) for t, e in examples.items()}
        return capture(model, "training_step", {t: e.batch for t, e in examples.items()}, layouts, **options)


def metagraph_of(model: Any, data: Any) -> MetaGraph:
    """The MetaGraph that Spindle finds for the model's training step."""
    return contract(captured(model, data).graph)


def placed(metagraph: MetaGraph, devices: int, where: Callable[[str], tuple[int, ...]]) -> ExecutionPlan:
    """A forced plan: each MetaOp on the devices that ``where`` gives, one after another."""
    runs = []
    for at, m in enumerate(metagraph.metaops):
        group = where(m.name)
        group = group[:1] if m.layout is Layout.WHOLE or m.pin is not None else group
        runs.append(Run(m.name, 0, len(m.layers), group, at, at + 1, Configuration(len(group))))
    return ExecutionPlan("forced", devices, tuple(runs), float(len(runs)))


def random_plan(metagraph: MetaGraph, devices: int, seed: int) -> ExecutionPlan:
    """A forced plan with random groups, in any order of devices; MetaOps are cut into up to two runs."""
    draw = random.Random(seed)
    runs: list[Run] = []
    pinned: dict[str, int] = {}
    for m in metagraph.metaops:
        layers = len(m.layers)
        cuts = [0, layers] if layers == 1 or draw.random() < 0.5 else [0, draw.randrange(1, layers), layers]
        for first, last in itertools.pairwise(cuts):
            group = tuple(draw.sample(range(devices), draw.randint(1, devices)))
            if m.pin is not None:
                group = (pinned.setdefault(m.pin, group[0]),)
            elif m.layout is Layout.WHOLE:
                group = group[:1]
            at = len(runs)
            runs.append(Run(m.name, first, last, group, at, at + 1, Configuration(len(group))))
    return ExecutionPlan("forced", devices, tuple(runs), float(len(runs)))
