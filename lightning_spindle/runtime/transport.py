"""The one door to communication: messages and sums between the ranks of a program.

The engine is given a transport and never calls ``torch.distributed`` itself, so that the
same engine runs on a process group of processes (gloo, NCCL) and on ranks that are threads
of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

Ranks = tuple[int, ...]


class Pending(Protocol):
    """A communication under way."""

    def wait(self) -> None:
        """Returns when it is done; raises where it failed or took longer than the limit."""
        ...


class Transport(Protocol):
    """Messages and sums between ranks, numbered in the world. Tensors must be contiguous."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Pending: ...

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending: ...

    def all_reduce(self, tensor: torch.Tensor, ranks: Ranks) -> Pending:
        """Sums in place over ``ranks``, each of which must call it."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Ranks) -> Pending:
        """Overwrites ``tensor`` on ``ranks`` with that of ``source``."""
        ...


class _Done:
    def wait(self) -> None:
        """Nothing was under way."""


class _Work:
    """Waits with the communication's limit; keeps its tensor alive until then."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor, timeout: timedelta) -> None:
        self._work = work
        self._tensor = tensor
        self._timeout = timeout
        self._waiting = True

    def wait(self) -> None:
        # A second wait for one gloo message would wait for a message that never comes.
        if self._waiting:
            self._work.wait(self._timeout)
            self._waiting = False


class ProcessGroupTransport:
    """A transport over process groups of torch.

    Args:
        world: the group of all ranks, with its rank and size.
        subgroup: gives the group of a sorted tuple of ranks; called by every rank for the
            same tuples in the same order (``prepare``), members or not.
        timeout: limit of every wait.
        blocking_sends: complete each send before returning, which shows wrong orders that
            asynchronous sends hide; for tests.
    """

    def __init__(
        self,
        world: dist.ProcessGroup,
        subgroup: Callable[[Ranks], dist.ProcessGroup | None],
        *,
        timeout: timedelta,
        blocking_sends: bool = False,
    ) -> None:
        self._world = world
        self._subgroup = subgroup
        self._timeout = timeout
        self._blocking = blocking_sends
        self._groups: dict[Ranks, dist.ProcessGroup | None] = {}

    @property
    def rank(self) -> int:
        return self._world.rank()

    @property
    def size(self) -> int:
        return self._world.size()

    def prepare(self, groups: Iterable[Ranks]) -> None:
        """Creates groups that are not there yet; a collective call, in sorted order."""
        everyone = tuple(range(self.size))
        self._groups.setdefault(everyone, self._world)
        for ranks in sorted(set(groups)):
            if ranks not in self._groups and len(ranks) > 1:
                self._groups[ranks] = self._subgroup(ranks)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Pending:
        pending = self._pending(self._world.send([tensor], to, tag), tensor)
        if self._blocking:
            pending.wait()
        return pending

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return self._pending(self._world.recv([tensor], source, tag), tensor)

    def all_reduce(self, tensor: torch.Tensor, ranks: Ranks) -> Pending:
        if len(ranks) == 1:
            return _Done()
        # On a strided tensor gloo's collectives give wrong numbers without an error.
        assert tensor.is_contiguous()
        return self._pending(self._group(ranks).allreduce([tensor]), tensor)

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Ranks) -> Pending:
        if len(ranks) == 1:
            return _Done()
        assert tensor.is_contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = ranks.index(source)
        options.rootTensor = 0
        return self._pending(self._group(ranks).broadcast([tensor], options), tensor)

    def _group(self, ranks: Ranks) -> dist.ProcessGroup:
        group = self._groups.get(ranks)
        assert group is not None, f"rank {self.rank} is not in the prepared group {ranks}"
        return group

    def _pending(self, work: dist.Work, tensor: torch.Tensor) -> Pending:
        return _Work(work, tensor, self._timeout)


def world_transport(timeout: timedelta, *, blocking_sends: bool = False) -> ProcessGroupTransport:
    """A transport over the initialised default process group of torch.distributed."""

    def subgroup(ranks: Ranks) -> dist.ProcessGroup | None:
        group = dist.new_group(list(ranks), timeout=timeout)
        return group if isinstance(group, dist.ProcessGroup) else None

    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    transport = ProcessGroupTransport(world, subgroup, timeout=timeout, blocking_sends=blocking_sends)
    transport.prepare([])
    return transport


class LocalTransport:
    """The transport of a single process: there is nobody to talk to."""

    rank = 0
    size = 1

    def prepare(self, groups: Iterable[Ranks]) -> None:
        """No groups are needed."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Pending:
        raise AssertionError("a single process sends nothing")

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        raise AssertionError("a single process receives nothing")

    def all_reduce(self, tensor: torch.Tensor, ranks: Ranks) -> Pending:
        return _Done()

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Ranks) -> Pending:
        return _Done()
