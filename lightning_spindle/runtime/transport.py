"""The one door to communication: messages and sums between the ranks of a program.

The engine is given a transport and never calls ``torch.distributed`` itself, so that the
same engine runs on a process group of processes (gloo, NCCL) and on ranks that are threads
of one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_spindle.runtime.failures import Failures

Ranks = tuple[int, ...]

_NO_TAG = 2**29
"""A tag that no message has: they are numbered from 0."""


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


def everyone(transport: Transport) -> Ranks:
    """All ranks of a transport."""
    return tuple(range(transport.size))


class _Done:
    def wait(self) -> None:
        """Nothing was under way."""


class _Work:
    """Waits with the communication's limit; keeps its tensor alive until then."""

    def __init__(
        self, work: dist.Work, tensor: torch.Tensor, transport: ProcessGroupTransport, peers: Ranks
    ) -> None:
        self._work = work
        self._tensor = tensor
        self._transport = transport
        self._peers = peers
        self._waiting = True

    def wait(self) -> None:
        # A second wait for one gloo message would wait for a message that never comes.
        if self._waiting:
            self._waiting = False
            with self._transport.explained(self._peers):
                self._work.wait(self._transport.timeout)


class ProcessGroupTransport:
    """A transport over process groups of torch.

    Args:
        world: the group of all ranks, with its rank and size.
        subgroup: gives the group of a sorted tuple of ranks; called by every rank for the
            same tuples in the same order (``prepare``), members or not.
        timeout: limit of every wait.
        failures: of other ranks, which then are the error instead of a broken connection.
        blocking_sends: complete each send before returning, which shows wrong orders that
            asynchronous sends hide; for tests.
    """

    def __init__(
        self,
        world: dist.ProcessGroup,
        subgroup: Callable[[Ranks], dist.ProcessGroup | None],
        *,
        timeout: timedelta,
        failures: Failures | None = None,
        blocking_sends: bool = False,
    ) -> None:
        self.world = world
        self._subgroup = subgroup
        self._failures = failures
        self.timeout = timeout
        self._blocking = blocking_sends
        self._groups: dict[Ranks, dist.ProcessGroup | None] = {}

    @property
    def rank(self) -> int:
        return self.world.rank()

    @property
    def size(self) -> int:
        return self.world.size()

    def prepare(self, groups: Iterable[Ranks]) -> None:
        """Creates groups that are not there yet; a collective call, in sorted order."""
        self._groups.setdefault(everyone(self), self.world)
        for ranks in sorted(set(groups)):
            if ranks not in self._groups and len(ranks) > 1:
                self._groups[ranks] = self._subgroup(ranks)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Pending:
        data = _as_bytes(tensor)
        pending = self._post(lambda: self.world.send([data], to, tag), data, (to,))
        if self._blocking:
            pending.wait()
        return pending

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        data = _as_bytes(tensor)
        return self._post(lambda: self.world.recv([data], source, tag), data, (source,))

    def all_reduce(self, tensor: torch.Tensor, ranks: Ranks) -> Pending:
        if len(ranks) == 1:
            return _Done()
        # On a strided tensor gloo's collectives give wrong numbers without an error.
        assert tensor.is_contiguous()
        return self._post(lambda: self._group(ranks).allreduce([tensor]), tensor, ranks)

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Ranks) -> Pending:
        if len(ranks) == 1:
            return _Done()
        data = _as_bytes(tensor)
        options = dist.BroadcastOptions()
        options.rootRank = ranks.index(source)
        options.rootTensor = 0
        return self._post(lambda: self._group(ranks).broadcast([data], options), data, ranks)

    @contextmanager
    def explained(self, peers: Ranks) -> Iterator[None]:
        """Inside, a communication with ``peers`` that fails raises PeerError, which says why."""
        start_s = time.monotonic()
        try:
            yield
        except RuntimeError as e:
            if self._failures is None:
                raise
            waited_s = time.monotonic() - start_s
            others = [str(p) for p in peers if p != self.rank]
            names = f"rank{'s' * (len(others) > 1)} {', '.join(others)}"
            raise self._failures.explain(e, names, waited_s) from e

    def break_off(self) -> None:
        """Ends all communication of this rank: what waits here or for it at other ranks raises at once."""
        for ranks, group in self._groups.items():
            if group is not None and self.rank in ranks:
                _disconnect(group)

    def _group(self, ranks: Ranks) -> dist.ProcessGroup:
        group = self._groups.get(ranks)
        assert group is not None, f"rank {self.rank} is not in the prepared group {ranks}"
        return group

    def _post(self, start: Callable[[], dist.Work], tensor: torch.Tensor, peers: Ranks) -> Pending:
        with self.explained(peers):
            return _Work(start(), tensor, self, peers)


def _disconnect(group: dist.ProcessGroup) -> None:
    """Closes this rank's connections of a group, whatever is under way.

    Gloo keeps a dead rank's peers waiting while an operation of its own is under way, and closes
    all connections of a group where a receive takes longer than its limit: so one is made to. From
    a peer that is lost already it fails at once and closes nothing, so every peer is tried.
    """
    if group.name() != "gloo":
        with suppress(RuntimeError):
            group.abort()
        return
    for peer in set(range(group.size())) - {group.rank()}:
        with suppress(RuntimeError):
            group.recv([torch.zeros(1)], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, for what only moves: backends do not know every dtype."""
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8)


def world_transport(
    timeout: timedelta, *, failures: Failures | None = None, blocking_sends: bool = False
) -> ProcessGroupTransport:
    """A transport over the initialised default process group of torch.distributed."""

    def subgroup(ranks: Ranks) -> dist.ProcessGroup | None:
        group = dist.new_group(list(ranks), timeout=timeout)
        return group if isinstance(group, dist.ProcessGroup) else None

    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    transport = ProcessGroupTransport(
        world, subgroup, timeout=timeout, failures=failures, blocking_sends=blocking_sends
    )
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
