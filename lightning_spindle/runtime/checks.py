"""What Spindle cannot do raises here: early, on every rank, saying what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isclose
from typing import Any
from zlib import crc32

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_spindle.capture.pieces import BatchLayout
from lightning_spindle.module import MultiTaskModule
from lightning_spindle.runtime.iteration import TaskBatch
from lightning_spindle.runtime.optimizers import fresh, plain
from lightning_spindle.runtime.transport import Transport, everyone

_OWN_MODULE = (
    "write a LightningModule of your own whose batches are a dict of several loaders' (see the README)"
)


def require_world(live: int, expected: int) -> None:
    """Raises RuntimeError unless as many ranks are live as the Trainer was asked for."""
    if live != expected:
        raise RuntimeError(
            f"{live} processes are live, but the Trainer was configured for {expected}. A process group of "
            f"an earlier run may still be open, or the launcher started another number of processes than "
            f"devices x num_nodes"
        )


def require_devices(accelerator: Any) -> None:
    """Raises ValueError for what is neither a CPU nor a CUDA device."""
    if not isinstance(accelerator, CPUAccelerator | CUDAAccelerator):
        raise ValueError(
            f"SpindleStrategy runs on CPU and CUDA devices, not on {type(accelerator).__name__}: choose "
            f"Trainer(accelerator='cpu') or Trainer(accelerator='cuda')"
        )


def require_supported(trainer: Any, model: LightningModule, world_size: int) -> None:
    """Raises ValueError, naming the feature, for what would be silently different."""
    if next(model.parameters(), None) is None:
        raise ValueError(f"{type(model).__name__} has no parameters; there is nothing to train or place")
    if trainer.state.fn == TrainerFn.PREDICTING:
        raise NotImplementedError(
            "SpindleStrategy does not predict yet: load the checkpoint under another strategy to predict"
        )
    tasks = model.tasks.items() if isinstance(model, MultiTaskModule) else ()
    manual = [name for name, task in tasks if not task.automatic_optimization]
    if manual or not model.automatic_optimization:
        raise ValueError(
            f"SpindleStrategy needs automatic optimization, and does not support manual optimization"
            f"{f' (tasks {manual})' if manual else ''}: leave automatic_optimization=True"
        )
    if isinstance(model, MultiTaskModule):
        _require_own_steps(model)
    _require_callbacks(trainer, world_size)
    if trainer.state.fn == TrainerFn.FITTING and world_size > 1:
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "precision='16-mixed' is not supported by SpindleStrategy on several ranks yet: each rank's "
                "GradScaler would find infinities among its own gradients only, and the loss scales would "
                "drift apart; use precision='bf16-mixed' or one device"
            )
        if any(type(m).__name__ == "SyncBatchNorm" for m in model.modules()):
            raise ValueError(
                "sync_batchnorm is not supported by SpindleStrategy: BatchNorm already sees the whole batch"
            )


def _require_own_steps(model: MultiTaskModule) -> None:
    """The tasks' steps are what runs, and their weighted sum is formed again from what they give."""
    steps = ("training_step", "validation_step", "test_step", "active_batches")
    if own := [step for step in steps if is_overridden(step, model, MultiTaskModule)]:
        raise ValueError(
            f"{type(model).__name__} overrides {', '.join(own)} of MultiTaskModule, which SpindleStrategy "
            f"would not call: put it into a task, or {_OWN_MODULE}"
        )
    if unlike := [name for name, weight in model.weights.items() if not isinstance(weight, int | float)]:
        raise ValueError(
            f"the weights of {unlike} are no plain numbers, and SpindleStrategy would not train them: to "
            f"learn weights, {_OWN_MODULE}"
        )


def _require_callbacks(trainer: Any, world_size: int) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, LearningRateFinder | BatchSizeFinder):
            raise ValueError(
                f"{type(callback).__name__} is not supported by SpindleStrategy, which plans for one fit and "
                "not for the trials before it: find the value under another strategy"
            )
        if world_size > 1 and isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} is not supported by SpindleStrategy on several ranks, which each "
                "hold a part of the parameters: average checkpoints after the fit"
            )


def require_no_gradient_hooks(model: LightningModule) -> None:
    """Raises ValueError, naming them, where parameters have hooks on their gradients.

    They would see the gradient of each run of each shard, before these are summed.
    """
    hooked = [n for n, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        raise ValueError(
            f"gradient hooks of parameters are not supported by SpindleStrategy ({', '.join(hooked[:3])}"
            f"{', …' if hooked[3:] else ''}): they would see parts of gradients, before these are summed; "
            "change gradients in on_before_optimizer_step, or clip them by the Trainer's gradient_clip_val"
        )


def require_separable(optimizer: Any) -> None:
    """Raises ValueError where an optimizer's step mixes parameters.

    Each rank steps only the parameters that it holds. That is the same as one joint step for
    optimizers that treat parameters one by one (SGD, Adam, ...), and wrong for others (LBFGS).
    Checked by a joint against two single steps of a fresh optimizer of the class, on the device of
    its parameters (some options, such as ``capturable``, work on some devices only).
    """
    device = next((p.device for group in plain(optimizer).param_groups for p in group["params"]), None)
    values = torch.tensor([1.0, -2.0], device=device), torch.tensor([[3.0, 0.5]], device=device)
    joint = [torch.nn.Parameter(value) for value in values]
    single = [torch.nn.Parameter(p.detach().clone()) for p in joint]
    try:
        steppers = [fresh(optimizer, joint)] + [fresh(optimizer, [p]) for p in single]
        for _ in range(3):
            for k, p in enumerate([*joint, *single]):
                p.grad = torch.full_like(p, 0.1 * (1 + k % 2)) * p.detach().sign()
            for stepper in steppers:
                stepper.step()
        mixes = any(not torch.equal(a, b) for a, b in zip(joint, single, strict=True))
        reason = "a step on two parameters differs from two steps on one each"
    except Exception as e:
        mixes, reason = True, f"it could not be stepped on its own ({type(e).__name__}: {e})"
    if mixes:
        raise ValueError(
            f"SpindleStrategy cannot use the optimizer {type(plain(optimizer)).__name__}, because ranks step "
            f"their own parameters separately: {reason}. Use one that treats each parameter alone, such as "
            f"SGD or AdamW"
        )


def require_same_data(
    batches: Mapping[str, TaskBatch],
    tasks: Sequence[str],
    length: float,
    transport: Transport,
    device: torch.device,
) -> None:
    """Raises ValueError, on every rank, where ranks have unlike batches, or unlike numbers of them.

    Compares row counts, checksums of what samplers drew and of each of ``tasks`` (a rank that does not
    read all of a task's rows has none), and ``length``; called once an epoch. Ranks that draw other
    batches (a sampler or generator seeded by the rank) would otherwise train on a mixture.
    """
    if transport.size == 1:
        return
    # Of all tasks, absent ones too: the ranks may not agree on which are there.
    table = torch.zeros(transport.size, len(tasks) + 1, 3, dtype=torch.float64, device=device)
    table[transport.rank, -1, 0] = length
    for at, name in enumerate(tasks):
        batch = batches.get(name)
        table[transport.rank, at, 0] = -1 if batch is None else batch.rows
        table[transport.rank, at, 2] = 0 if batch is None else batch.drawn
        if batch is not None and batch.leaves is not None and batch.held is None:
            table[transport.rank, at, 1] = 1.0 + checksum(batch.leaves)
    transport.all_reduce(table, everyone(transport)).wait()
    why = "Every rank must draw the same global batches: do not seed samplers or generators by the rank"
    for at, name in enumerate(tasks):
        rows = table[:, at, 0].tolist()
        sums, drawn = ([s for s in table[:, at, k].tolist() if s] for k in (1, 2))
        # Ranks may add in another order: as many digits as that leaves.
        if len({*rows}) > 1 or len({*drawn}) > 1 or not all(isclose(s, sums[0], rel_tol=1e-10) for s in sums):
            counts = ["none" if r < 0 else int(r) for r in rows]
            raise ValueError(f"task {name}: ranks drew different batches (rows by rank: {counts}). {why}")
    lengths = table[:, -1, 0].tolist()
    if len(set(lengths)) > 1:
        raise ValueError(f"ranks have different numbers of batches in an epoch: {lengths}. {why}")


def require_same_shapes(
    batches: Mapping[str, TaskBatch],
    layouts: Mapping[str, BatchLayout],
    tasks: Sequence[str],
    transport: Transport,
    device: torch.device,
) -> None:
    """Raises ValueError, on every rank, where ranks collated their rows of a batch to other shapes."""
    table = torch.zeros(transport.size, len(tasks), dtype=torch.int64, device=device)
    for at, name in enumerate(tasks):
        batch = batches.get(name)
        if batch is not None and batch.leaves is not None:
            table[transport.rank, at] = 1 + crc32(repr(batch.signature(layouts[name])).encode())
    transport.all_reduce(table, everyone(transport)).wait()
    for at, name in enumerate(tasks):
        if len({found for found in table[:, at].tolist() if found}) > 1:
            raise ValueError(
                f"task {name}: its collate function gives other shapes for other rows of one batch (it may "
                "pad to the longest), so that ranks cannot read rows alone: leave row_loading=True away"
            )


def checksum(leaves: list[Any]) -> float:
    """A number that tells batches apart, up to rounding."""
    total = 0.0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not leaf.is_complex() and leaf.numel():
            flat = leaf.detach().double().reshape(-1)
            weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
            finite = torch.nan_to_num(flat, nan=0.5, posinf=1.5, neginf=-1.5)  # masks are often infinite
            total += float((finite * weights.rsqrt()).sum())
    return abs(total)


def add_hints(error: BaseException, apart: bool) -> None:
    """Notes for an error that a user may not expect, because the model is spread over ranks."""
    if apart and "meta" in str(error).lower() and "tensor" in str(error).lower():
        error.add_note(
            "Parameters that other ranks hold are meta tensors on this rank, and so are their gradients. To "
            "read or change values of the whole model, let every rank enter `with "
            "trainer.strategy.full_model():`. To clip gradients by their norm, use the Trainer's "
            "gradient_clip_val or self.clip_gradients(...)."
        )
