"""A program with its costs filled in: what one simulated iteration works through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_spindle.costs import Costs
from lightning_spindle.program import Instruction, Kind, Program
from lightning_spindle.simulate.links import Transfer, uplinks_of

Key = tuple[Kind, int, int]
"""FORWARD or BACKWARD, run, rank: what messages arrive for."""


@dataclass(slots=True, eq=False)
class Step:
    """An instruction of the global order, with its place in the simulation.

    ``transfer`` is what a message, a sum or the exchange takes of the links; ``feeds`` names the
    computation that waits for a message. Mutable: ``arrived`` counts ranks that came.
    """

    instruction: Instruction
    text: str
    ranks: tuple[int, ...]
    transfer: Transfer
    feeds: Key | None = None
    arrived: int = 0


@dataclass(slots=True)
class Prepared:
    """Each rank's steps, and the time and memory of each computation.

    ``missing`` counts the messages that a computation still waits for. Messages whose row
    ranges do not meet are left out, as the engine skips them.
    """

    streams: list[list[Step]]
    missing: dict[Key, int]
    work_s: dict[Key, float]
    kept_bytes: dict[tuple[int, int], float]
    """Activations by run and rank."""
    passed_back: frozenset[int]
    """Runs that have a BACKWARD."""


def prepare(program: Program, costs: Costs, rows: Mapping[str, int]) -> Prepared:
    """Looks every cost up once; ``rows`` are this iteration's rows by task."""
    streams: list[list[Step]] = [[] for _ in range(program.devices)]
    ready = Prepared(streams, {}, {}, {}, _passed_back(program))
    seconds: dict[tuple[int, int, bool], float] = {}
    for position, instruction in enumerate(program.order):
        ranks = program.participants(instruction)
        step = Step(instruction, str(instruction), ranks, Transfer(position, ranks, ranks))
        match instruction.kind:
            case Kind.FORWARD | Kind.BACKWARD:
                _computing(program, costs, rows, instruction, ready, seconds)
            case Kind.ACTIVATION | Kind.GRADIENT:
                if not _message(program, costs, rows, step, ready):
                    continue
            case Kind.REDUCE:
                size = program.buckets[instruction.index].bytes
                _collective(step, costs, costs.all_reduce_s(size, ranks), costs.uplink_bytes(size, ranks))
            case Kind.BROADCAST:
                size = program.broadcasts[instruction.index].bytes
                carried = costs.broadcast_uplink_bytes(size, ranks)
                _collective(step, costs, costs.broadcast_s(size, ranks), carried)
            case Kind.EXCHANGE:
                step.transfer.seconds = costs.exchange_s(ranks)
        for rank in ranks:
            streams[rank].append(step)
    return ready


def _passed_back(program: Program) -> frozenset[int]:
    return frozenset(i.index for i in program.order if i.kind is Kind.BACKWARD)


def _computing(
    program: Program,
    costs: Costs,
    rows: Mapping[str, int],
    instruction: Instruction,
    ready: Prepared,
    seconds: dict[tuple[int, int, bool], float],
) -> None:
    """Work of each shard; shards of equal rows are looked up once."""
    run = program.runs[instruction.index]
    backward = instruction.kind is Kind.BACKWARD
    for shard, rank in enumerate(run.devices):
        first, last = run.rows(shard, rows.get(run.task, 0))
        n = last - first
        known = seconds.get((run.index, n, backward))
        if known is None:
            known = sum(costs.operator_s(o, n, backward) for o in run.operators) if n else 0.0
            seconds[run.index, n, backward] = known
        ready.work_s[instruction.kind, run.index, rank] = known
        if not backward:
            kept = sum(costs.activation_bytes(o, n) for o in run.operators) if n else 0.0
            ready.kept_bytes[run.index, rank] = kept


def _collective(step: Step, costs: Costs, seconds: float, uplink_bytes: float) -> None:
    """Fills in what summing a bucket, or broadcasting one, takes."""
    step.transfer.seconds = seconds
    step.transfer.uplinks = uplinks_of(step.ranks, step.ranks, costs.cluster)
    step.transfer.uplink_bytes = uplink_bytes


def _message(program: Program, costs: Costs, rows: Mapping[str, int], step: Step, ready: Prepared) -> bool:
    """Fills in what a message takes and feeds; False where no rows meet."""
    i = step.instruction
    edge = program.edges[i.index]
    task = program.runs[edge.source].task
    first, last = program.shared_rows(edge, i.source, i.target, rows.get(task, 0))
    if first >= last:
        return False
    sender, receiver = step.ranks
    size = costs.value_bytes(edge.value, task, last - first)
    uplinks = uplinks_of((sender,), (receiver,), costs.cluster)
    seconds = costs.message_s(size, sender, receiver)
    step.transfer = Transfer(step.transfer.position, (sender,), (receiver,), seconds, size, uplinks)
    if i.kind is Kind.ACTIVATION:
        step.feeds = (Kind.FORWARD, edge.target, receiver)
    else:
        step.feeds = (Kind.BACKWARD, edge.source, receiver)
    ready.missing[step.feeds] = ready.missing.get(step.feeds, 0) + 1
    return True
