"""What Spindle cannot do raises here: early, on every rank, saying what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from lightning_spindle.module import MultiTaskModule
from lightning_spindle.runtime.engine import TaskBatch
from lightning_spindle.runtime.optimizers import fresh, plain
from lightning_spindle.runtime.transport import Transport


def require_world(live: int, expected: int) -> None:
    """Raises RuntimeError unless as many ranks are live as the Trainer was asked for."""
    if live != expected:
        raise RuntimeError(
            f"{live} processes are live, but the Trainer was configured for {expected}. A process group of "
            f"an earlier run may still be open, or the launcher started another number of processes than "
            f"devices x num_nodes"
        )


def require_supported(trainer: Any, model: LightningModule, world_size: int) -> None:
    """Raises ValueError, naming the feature, for what would be silently different."""
    if not isinstance(model, MultiTaskModule):
        raise ValueError(
            f"SpindleStrategy trains a MultiTaskModule, not a {type(model).__name__}: wrap the tasks, "
            f"MultiTaskModule({{'name': task, ...}})"
        )
    if next(model.parameters(), None) is None:
        raise ValueError(f"{type(model).__name__} has no parameters; there is nothing to train or place")
    if not model.automatic_optimization:
        raise ValueError("SpindleStrategy needs automatic optimization; manual optimization is not supported")
    if trainer.state.fn == TrainerFn.FITTING and world_size > 1:
        if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm").endswith("norm"):
            raise ValueError(
                "gradient clipping by norm is not supported by SpindleStrategy on several ranks yet: each "
                "rank holds a part of the gradients; use gradient_clip_algorithm='value' or one device"
            )
        if any(type(m).__name__ == "SyncBatchNorm" for m in model.modules()):
            raise ValueError(
                "sync_batchnorm is not supported by SpindleStrategy: BatchNorm already sees the whole batch"
            )


def require_separable(optimizer: Any) -> None:
    """Raises ValueError where an optimizer's step mixes parameters.

    Each rank steps only the parameters that it holds. That is the same as one joint step for
    optimizers that treat parameters one by one (SGD, Adam, ...), and wrong for others (LBFGS).
    Checked by a joint against two single steps of a fresh optimizer of the class.
    """
    joint = [torch.nn.Parameter(torch.tensor([1.0, -2.0])), torch.nn.Parameter(torch.tensor([[3.0, 0.5]]))]
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


def require_same_data(batches: Mapping[str, TaskBatch], transport: Transport, device: torch.device) -> None:
    """Raises ValueError, on every rank, where ranks that loaded a task's batch have unlike ones.

    Compares row counts and a checksum; called once an epoch. Ranks that draw other batches
    (a sampler or generator seeded by the rank) would otherwise train on a mixture.
    """
    if transport.size == 1:
        return
    names = sorted(batches)
    table = torch.zeros(transport.size, len(names), 2, dtype=torch.float64, device=device)
    for at, name in enumerate(names):
        batch = batches[name]
        table[transport.rank, at, 0] = batch.rows
        if batch.leaves is not None:
            table[transport.rank, at, 1] = 1.0 + _checksum(batch.leaves)
    transport.all_reduce(table, tuple(range(transport.size))).wait()
    for at, name in enumerate(names):
        rows = table[:, at, 0].tolist()
        sums = {s for s in table[:, at, 1].tolist() if s}
        if len(set(rows)) > 1 or len(sums) > 1:
            raise ValueError(
                f"task {name}: ranks drew different batches (rows by rank: {[int(r) for r in rows]}). Every "
                f"rank must draw the same global batch: do not seed samplers or generators by the rank"
            )


def _checksum(leaves: list[Any]) -> float:
    total = 0.0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not leaf.is_complex() and leaf.numel():
            flat = leaf.detach().double().reshape(-1)
            weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
            total += float((torch.nan_to_num(flat) * weights.rsqrt()).sum())
    return abs(total)
