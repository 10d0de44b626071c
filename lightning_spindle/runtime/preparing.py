"""What precedes the first batch of a run: examples are looked at, all ranks agree, and a session is built."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn

from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.runtime import feeding, planning
from lightning_spindle.runtime.objects import broadcast_object, require_agreement
from lightning_spindle.runtime.outputs import agree_on_listeners
from lightning_spindle.runtime.session import Session, StepExample, build_session
from lightning_spindle.runtime.transport import LocalTransport, ProcessGroupTransport, Transport


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user asks of the strategy; see its arguments."""

    planner: str
    plan: ExecutionPlan | None
    operators: tuple[type[nn.Module], ...]
    profile_budget_s: float
    row_loading: bool | None
    shard_optimizer_state: bool

    def require_agreement(self, transport: Transport, device: torch.device) -> None:
        """Checks that all ranks have the same (collective).

        Raises:
            ValueError: they have not.
        """
        settings = (
            f"planner={self.planner}\noperators={self.operators}\nrow_loading={self.row_loading}\n"
            f"shard_optimizer_state={self.shard_optimizer_state}\nplan={self.plan}\n"
            f"{self.plan and self.plan.to_json()}"
        )
        require_agreement("SpindleStrategy's arguments", settings, transport, device)


def seed_alike(transport: Transport, device: torch.device) -> int:
    """Gives every rank rank 0's generators (collective), and the seed of operators' random numbers."""
    own = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**63))
    states, seed = broadcast_object((_collect_rng_states(include_cuda=False), own), transport, device)
    _set_rng_states(states)
    return int(seed)


def prepare(
    strategy: ParallelStrategy,
    settings: Settings,
    transport: ProcessGroupTransport | LocalTransport,
    seed: int,
) -> tuple[dict[str, StepExample], Session]:
    """The examples of each step, and the session that is built on them (collective).

    Raises:
        ValueError: ranks have unlike models, data or plans; the plan does not fit.
    """
    model = strategy.lightning_module
    assert model is not None
    trainer, device = model.trainer, strategy.root_device
    examples = feeding.examples(trainer, strategy, settings.row_loading)
    examples = feeding.agree_on_rows(examples, transport, device)
    examples = agree_on_listeners(trainer, examples, transport, device)
    session = build_session(
        model,
        examples,
        transport,
        device,
        planning.Planner(
            name=settings.planner,
            plan=settings.plan,
            budget_s=settings.profile_budget_s,
            transport=transport,
            device=device,
            processes_per_node=strategy.num_processes,
            show_progress=trainer.progress_bar_callback is not None,
            optimizer=strategy.optimizers[0] if strategy.optimizers else None,
            shard_optimizer_state=settings.shard_optimizer_state,
        ),
        operators=settings.operators,
        seed=seed,
        shard_optimizer_state=settings.shard_optimizer_state,
    )
    return dict(examples), session
