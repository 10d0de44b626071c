"""The engine's transport: data go over real process groups, time over the modelled network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle

import torch

from lightning_spindle.costs import Costs
from lightning_spindle.emulate.clocks import Clocks
from lightning_spindle.emulate.network import Network, Posted
from lightning_spindle.program import Instruction, Kind, Program
from lightning_spindle.runtime.messages import tag_of
from lightning_spindle.runtime.transport import Pending, ProcessGroupTransport, Ranks

_STAMP_BYTES = 8


class _Emulated:
    """A communication under way in both worlds."""

    def __init__(self, owner: EmulatedTransport, pending: Pending, posted: Posted) -> None:
        self._owner, self._pending, self._posted = owner, pending, posted

    def wait(self) -> None:
        """Until it has ended in virtual time; then its data are there, or as good as."""
        self._owner.clocks.wait(self._owner.rank, self._posted)
        self._pending.wait()


class _Incoming(_Emulated):
    """A message on its way in: its sender's clock, then its bytes."""

    def __init__(
        self,
        owner: EmulatedTransport,
        pending: Pending,
        posted: Posted,
        tensor: torch.Tensor,
        data: torch.Tensor,
        source: int,
    ) -> None:
        super().__init__(owner, pending, posted)
        self._tensor, self._data, self._source = tensor, data, source

    def wait(self) -> None:
        """Raises AssertionError where the message that came is not the one that the network timed."""
        super().wait()
        stamp_s = float(self._data[:_STAMP_BYTES].view(torch.float64))
        assert stamp_s == self._posted.posted_s[self._source], "a message overtook another"
        self._tensor.view(-1).view(torch.uint8).copy_(self._data[_STAMP_BYTES:])


class EmulatedTransport:
    """A rank's transport for the engine of one program.

    A message's size is that of the value whose rows its small tensor stands for; each carries its
    sender's virtual clock, by which the receiver knows it. The n-th collective of a rank is that of the
    n-th instruction which asks for one.
    """

    def __init__(
        self, real: ProcessGroupTransport, clocks: Clocks, network: Network, program: Program, costs: Costs
    ) -> None:
        self.clocks = clocks
        self._real, self._network, self._program, self._costs = real, network, program, costs
        self._values = costs.graph.value_map()
        self._places: dict[tuple[int, int, int], int] = {}
        """Messages by their tag and ends, to where they are in the program."""
        collectives: list[tuple[int, Instruction]] = []
        for place, i in enumerate(program.order):
            if i.kind in (Kind.ACTIVATION, Kind.GRADIENT):
                sender, receiver = program.participants(i)
                self._places[tag_of(i), sender, receiver] = place
            elif i.kind in (Kind.EXCHANGE, Kind.REDUCE, Kind.BROADCAST) and real.rank in program.participants(
                i
            ):
                collectives.append((place, i))
        self._collectives: Iterator[tuple[int, Instruction]] = cycle(collectives)

    @property
    def rank(self) -> int:
        return self._real.rank

    @property
    def size(self) -> int:
        return self._real.size

    def prepare(self, groups: Iterable[Ranks]) -> None:
        self._real.prepare(groups)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Pending:
        now_s, posted = self._post(tensor, self.rank, to, tag)
        stamp = torch.tensor([now_s], dtype=torch.float64).view(torch.uint8)
        data = torch.cat([stamp, tensor.detach().reshape(-1).view(torch.uint8)])
        return _Emulated(self, self._real.send(data, to, tag), posted)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        _, posted = self._post(tensor, source, self.rank, tag)
        data = torch.empty(tensor.nbytes + _STAMP_BYTES, dtype=torch.uint8)
        return _Incoming(self, self._real.receive(data, source, tag), posted, tensor, data, source)

    def all_reduce(self, tensor: torch.Tensor, ranks: Ranks) -> Pending:
        now_s, place, instruction = self._next(ranks)
        if instruction.kind is Kind.EXCHANGE:
            posted = self._network.exchange(now_s, self.rank, place, ranks)
        else:
            size = self._program.buckets[instruction.index].bytes
            posted = self._network.sum(now_s, self.rank, place, ranks, size)
        return _Emulated(self, self._real.all_reduce(tensor, ranks), posted)

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Ranks) -> Pending:
        now_s, place, instruction = self._next(ranks)
        # An emulated step was taken apart: no logs are broadcast in it.
        assert instruction.kind is Kind.BROADCAST
        size = self._program.broadcasts[instruction.index].bytes
        posted = self._network.broadcast(now_s, self.rank, place, ranks, size)
        return _Emulated(self, self._real.broadcast(tensor, source, ranks), posted)

    def _next(self, ranks: Ranks) -> tuple[float, int, Instruction]:
        """In turn, this rank's next collective: when, where in the program, and which."""
        place, instruction = next(self._collectives)
        assert ranks == self._program.participants(instruction), f"{instruction} over {ranks}"
        return self.clocks.take_turn(self.rank), place, instruction

    def _post(self, tensor: torch.Tensor, source: int, target: int, tag: int) -> tuple[float, Posted]:
        """In turn, one end of a message; when that was."""
        now_s = self.clocks.take_turn(self.rank)
        place = self._places[tag, source, target]
        size = self._bytes(tensor, tag)
        return now_s, self._network.message(now_s, self.rank, place, source, target, size)

    def _bytes(self, tensor: torch.Tensor, tag: int) -> float:
        """What the message would have: a header's own size, else that of the value's rows."""
        if tensor.dtype == torch.int64:
            return float(tensor.nbytes)
        edge = self._program.edges[(tag - 1) // 2]
        gradient = tag % 2 == 0  # which has an entry more
        value = self._values[edge.value]
        rows = (tensor.numel() - gradient) // value.per_row
        return self._costs.value_bytes(edge.value, self._program.runs[edge.source].task, rows)
