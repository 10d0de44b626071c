"""A dry run of a program in which every message and collective blocks until all have come."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_spindle.program import Instruction, Kind, Program

_BEFORE, _AFTER = 3, 2
"""Instructions shown before and after the one that a rank stands at."""


class ProgramError(ValueError):
    """A rank's instructions cannot be executed as they stand."""


class DeadlockError(ProgramError):
    """Ranks wait for each other for ever."""


def check_deadlock(program: Program, projections: Sequence[Sequence[Instruction]] | None = None) -> None:
    """Executes each rank's instructions with blocking sends, receives and collectives.

    What passes cannot deadlock under any transport, buffered or not: a rendezvous is the
    strictest case. Also checked: that a rank has computed or received what an instruction
    needs, and that it executes only instructions that it takes part in. Linear in the
    number of instructions of all ranks.

    Args:
        projections: the instructions of each rank; ``program.rank`` where not given.

    Raises:
        DeadlockError: ranks block each other; the message draws each rank's instructions
            and marks the one that it is blocked in.
        ProgramError: an instruction lacks its input, runs twice, or is on the wrong rank.
    """
    streams = program.projections() if projections is None else projections
    if len(streams) != program.devices:
        raise ProgramError(f"invalid program: {len(streams)} instruction lists for {program.devices} ranks")
    _Run(program, streams).execute()


class _Run:
    """Positions of all ranks; a message or collective advances its ranks together."""

    def __init__(self, program: Program, streams: Sequence[Sequence[Instruction]]) -> None:
        self.program = program
        self.streams = streams
        self.at = [0] * len(streams)
        self.arrived: dict[Instruction, list[int]] = {}
        self.parties: dict[Instruction, tuple[int, ...]] = {i: program.participants(i) for i in program.order}
        self.needs = _Needs(program)
        self.done: list[set[Instruction]] = [set() for _ in streams]

    def execute(self) -> None:
        moving = list(range(len(self.streams)))
        while moving:
            rank = moving.pop()
            if self.at[rank] == len(self.streams[rank]):
                continue
            instruction = self.streams[rank][self.at[rank]]
            parties = self._parties(rank, instruction)
            if instruction.kind in (Kind.FORWARD, Kind.BACKWARD):
                self._advance(rank, instruction)
                moving.append(rank)
                continue
            here = self.arrived.setdefault(instruction, [])
            here.append(rank)
            if len(here) == len(parties):
                del self.arrived[instruction]
                for r in parties:
                    self._advance(r, instruction)
                moving.extend(reversed(parties))
        if any(at < len(stream) for at, stream in zip(self.at, self.streams, strict=True)):
            raise DeadlockError(self._picture("deadlock: ranks wait for each other for ever"))

    def _advance(self, rank: int, instruction: Instruction) -> None:
        self.done[rank].add(instruction)
        self.at[rank] += 1

    def _parties(self, rank: int, instruction: Instruction) -> tuple[int, ...]:
        """Who takes part, after checks that ``rank`` may execute the instruction now."""
        parties = self.parties.get(instruction)
        if parties is None or rank not in parties:
            self._fail(rank, instruction, "is not this rank's to execute")
        if instruction in self.done[rank]:
            self._fail(rank, instruction, "comes a second time")
        for need in self.needs.of(instruction, rank):
            if need not in self.done[rank]:
                self._fail(rank, instruction, f"comes before {self.program.describe(need)}, which it needs")
        return parties or ()

    def _fail(self, rank: int, instruction: Instruction, why: str) -> None:
        known = instruction in self.parties
        what = self.program.describe(instruction) if known else str(instruction)
        raise ProgramError(self._picture(f"invalid program: on rank {rank} {what} {why}", {rank}))

    def _picture(self, title: str, marked: set[int] | None = None) -> str:
        """The step × rank picture: a line a rank, [brackets] around where it stands."""
        lines = [title, "", "rank  step  instructions ([x]: stands here)"]
        stuck: list[str] = []
        for rank, (at, stream) in enumerate(zip(self.at, self.streams, strict=True)):
            if at == len(stream) and marked is None and len(self.streams) > 16:
                continue  # the blocked ranks are what matters in a big picture
            first = max(0, at - _BEFORE)
            cells = [
                f"[{i}]" if k == at else f"{i}" for k, i in enumerate(stream[first : at + _AFTER + 1], first)
            ]
            cells = ["…"] * (first > 0) + cells + (["…"] if at + _AFTER + 1 < len(stream) else [])
            lines.append(f"{rank:4}  {at:4}  " + "  ".join(cells + ["[end]"] * (at == len(stream))))
            if at < len(stream) and marked is None:
                stuck.append(self._blocked(rank, stream[at]))
        return "\n".join(lines + [""] * bool(stuck) + stuck)

    def _blocked(self, rank: int, instruction: Instruction) -> str:
        here = self.arrived.get(instruction, ())
        missing = [r for r in self.parties[instruction] if r not in here]
        return (
            f"rank {rank} is blocked in {self.program.describe(instruction)}, waiting for {_ranks(missing)}"
        )


class _Needs:
    """What a rank must have executed before an instruction."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.summing = {p: b.index for b in program.buckets for p in b.parameters}
        """The bucket of each parameter."""
        self.arriving: dict[tuple[Kind, int, int], list[Instruction]] = {}
        """Messages by the kind, run and shard that wait for them."""
        for i in program.order:
            if i.kind is Kind.ACTIVATION:
                key = (Kind.FORWARD, program.edges[i.index].target, i.target)
            elif i.kind is Kind.GRADIENT:
                key = (Kind.BACKWARD, program.edges[i.index].source, i.source)
            else:
                continue
            self.arriving.setdefault(key, []).append(i)

    def of(self, instruction: Instruction, rank: int) -> Sequence[Instruction]:
        kind, index = instruction.kind, instruction.index
        if kind is Kind.ACTIVATION or kind is Kind.GRADIENT:
            return self._sending(instruction, rank)
        if kind is Kind.REDUCE:
            runs = self.program.runs
            return [
                Instruction(Kind.BACKWARD, r)
                for r in self.program.buckets[index].runs
                if rank in runs[r].devices
            ]
        if kind is Kind.BROADCAST:
            # The step comes in between, and needs the gradients.
            given = self.program.broadcasts[index].parameters
            return [Instruction(Kind.REDUCE, b) for b in sorted({self.summing[p] for p in given})]
        if kind is Kind.EXCHANGE:
            return ()
        run = self.program.runs[index]
        shard = run.devices.index(rank)
        inputs = self.arriving.get((kind, index, shard), [])
        return inputs if kind is Kind.FORWARD else [Instruction(Kind.FORWARD, index), *inputs]

    def _sending(self, message: Instruction, rank: int) -> Sequence[Instruction]:
        """A sender has computed what it sends; a receiver needs nothing."""
        edge = self.program.edges[message.index]
        if message.kind is Kind.ACTIVATION:
            computed, shard = Instruction(Kind.FORWARD, edge.source), message.source
            sender = self.program.runs[edge.source].devices[shard]
        else:
            computed, shard = Instruction(Kind.BACKWARD, edge.target), message.target
            sender = self.program.runs[edge.target].devices[shard]
        return (computed,) if rank == sender else ()


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
