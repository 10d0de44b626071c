"""From a captured training step to the plan that all ranks share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_spindle.capture.pieces import Capture
from lightning_spindle.graph import MetaGraph
from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.runtime.session import Session
from lightning_spindle.runtime.transport import ProcessGroupTransport, Transport

log = logging.getLogger(__name__)


def load_plan(plan: ExecutionPlan | str | Path | None) -> ExecutionPlan | None:
    """A plan as given, or read from its JSON file.

    Raises:
        ValueError: the file cannot be read or holds no plan.
    """
    if plan is None or isinstance(plan, ExecutionPlan):
        return plan
    try:
        return ExecutionPlan.from_json(Path(plan).read_text())
    except OSError as e:
        raise ValueError(f"the plan {plan} cannot be read: {e}") from e


@dataclass(slots=True)
class Planning:
    """Measures operators and links, and plans; the plan is rank 0's."""

    planner: str
    plan: ExecutionPlan | None
    budget_s: float
    transport: ProcessGroupTransport | Transport
    device: torch.device
    num_nodes: int

    def __call__(self, captured: Capture, metagraph: MetaGraph, batches: Mapping[str, Any]) -> ExecutionPlan:
        if self.plan is not None:
            return self.plan
        raise NotImplementedError


def announce(session: Session) -> None:
    """Prints the plan (rank 0)."""
    log.info("%s", session.plan)
