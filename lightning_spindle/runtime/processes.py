"""The processes of a run, as Lightning asks a strategy for them: launching, meeting, collectives, failing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_spindle.runtime import checks
from lightning_spindle.runtime.failures import Failures, default_failures
from lightning_spindle.runtime.objects import broadcast_object, meet
from lightning_spindle.runtime.signals import Signals
from lightning_spindle.runtime.transport import (
    LocalTransport,
    ProcessGroupTransport,
    everyone,
    world_transport,
)


class ProcessStrategy(ParallelStrategy):
    """One process a device, each of which draws whole global batches; what a rank raises reaches all.

    Args:
        timeout: limit of every wait for another rank.
        process_group_backend: "gloo" on CPU and "nccl" on CUDA where None.
        plugins: Lightning's, as for ``ParallelStrategy``.
    """

    def __init__(self, timeout: timedelta, process_group_backend: str | None, **plugins: Any) -> None:
        super().__init__(**plugins)
        self._timeout = timeout
        self._backend = process_group_backend
        self._num_nodes = 1
        self._transport: ProcessGroupTransport | LocalTransport = LocalTransport()
        self._failures: Failures | None = None
        self._signals: Signals | None = None

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """False for Lightning: it must neither shard samplers nor reduce logged values.

        Every rank draws whole global batches, and values are global when they are logged.
        """
        return False

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    def _configure_launcher(self) -> None:
        # Also where processes are there already: it limits the threads of each to its share of the cores.
        assert self.cluster_environment is not None
        self._launcher = _SubprocessScriptLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes
        )

    def setup_environment(self) -> None:
        assert self.accelerator is not None
        checks.require_devices(self.accelerator)
        self._signals = None
        super().setup_environment()
        self.set_world_ranks()
        checks.require_world(self.world_size, self.num_nodes * self.num_processes)
        if self.world_size == 1:
            return
        assert self.cluster_environment is not None
        backend = self._backend or _get_default_process_group_backend_for_device(self.root_device)
        device_id = self.root_device if self.root_device.type != "cpu" else None
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, device_id=device_id)
        checks.require_world(dist.get_world_size(), self.world_size)
        before = self._transport
        # Kept for the next run: its groups are there, and a new one would make them again.
        if not isinstance(before, ProcessGroupTransport) or before.world is not dist.group.WORLD:
            self._failures = default_failures()
            self._transport = world_transport(self._timeout, failures=self._failures)

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    def barrier(self, name: str | None = None) -> None:
        if isinstance(self._transport, ProcessGroupTransport) and not self._interrupted:
            with self._transport.explained(everyone(self._transport)):
                dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return broadcast_object(obj, self._transport, self.root_device, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor) or not isinstance(self._transport, ProcessGroupTransport):
            return tensor
        named = isinstance(reduce_op, str)
        mean = reduce_op.lower() in ("mean", "avg") if named else reduce_op == dist.ReduceOp.AVG
        result = tensor.detach().to(self.root_device, copy=True).contiguous()
        # Integers must not be averaged in integers.
        if mean and not (result.is_floating_point() or result.is_complex()):
            result = result.to(torch.get_default_dtype())
        op = getattr(dist.ReduceOp, reduce_op.upper()) if named and not mean else reduce_op
        op = dist.ReduceOp.SUM if mean else op  # gloo has no average
        with self._transport.explained(everyone(self._transport)):
            dist.all_reduce(result, op=op, group=group)
        return result / dist.get_world_size(group) if mean else result

    def _meet(self, what: str) -> None:
        """Waits for all ranks, at the same call; errors of those that wait in vain say ``what`` it was."""
        with nullcontext() if self._failures is None else self._failures.calling(what):
            meet(what, self._transport, self.root_device)

    @contextmanager
    def _signals_put_off(self, trainer: Any) -> Iterator[None]:
        """Inside, signals that the Trainer acts on are acted on by all ranks, between steps."""
        if self.world_size == 1:
            yield
            return
        self._signals = Signals(self._transport, self.root_device)
        with self._signals.put_off(trainer):
            yield

    def _look_for_signals(self) -> None:
        if self._signals is not None:
            self._signals.look()

    @property
    def _interrupted(self) -> bool:
        """Whether this rank has failed alone: others may be gone, and nothing collective can work."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        ended = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        return self.world_size > 1 and ended and not self._ending_together

    @property
    def _ending_together(self) -> bool:
        return self._signals is not None and self._signals.ending

    def on_exception(self, exception: BaseException) -> None:
        """Lets the other ranks know, and keeps none of them waiting; not where a signal ends all of them."""
        if not self._ending_together:
            self._leave_word(exception)
        super().on_exception(exception)

    def _leave_word(self, exception: BaseException) -> None:
        if self._failures is not None and isinstance(self._transport, ProcessGroupTransport):
            self._failures.report(exception)
            self._transport.break_off()
            self._failures.leave()
