"""What a program makes each rank do in one iteration: FLOPs, bytes to and from others, parameters held.

This is the expectation that a running engine can be held against: what it computes, sends and
keeps must be this and no more, or the work is not divided as planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_spindle.graph import OperatorGraph
from lightning_spindle.program import Instruction, Kind, Program


@dataclass(slots=True)
class Traffic:
    """Messages or sums of one kind, and the bytes of the tensors in them.

    What is not counted: the entry by which a gradient says that it is there (one for each
    message, one for each parameter of a bucket), and the header that goes ahead of a value
    whose form its receiver does not know yet.
    """

    count: int = 0
    bytes: int = 0

    def add(self, size_bytes: int) -> None:
        self.count += 1
        self.bytes += size_bytes


@dataclass(slots=True)
class Work:
    """One rank's share of an iteration.

    ``rows``: rows that it sees of each operator that it runs. ``summed``: the buckets of gradients
    that it takes part in summing, each at its own size, however the sum is done; ``broadcast``: new
    values of parameters that it gives, gets or passes on, likewise. ``parameters``:
    the graph's, in its order, that this rank holds: those of its operators in any step, and unused ones.
    """

    rows: dict[str, int] = field(default_factory=dict)
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    sent: dict[Kind, Traffic] = field(default_factory=lambda: _by_kind())
    received: dict[Kind, Traffic] = field(default_factory=lambda: _by_kind())
    summed: Traffic = field(default_factory=Traffic)
    broadcast: Traffic = field(default_factory=Traffic)
    parameters: tuple[str, ...] = ()
    parameter_bytes: int = 0

    @property
    def flops(self) -> float:
        return self.forward_flops + self.backward_flops


def rank_work(
    program: Program,
    graph: OperatorGraph,
    rows: Mapping[str, int] | None = None,
    *,
    backward_flops: Mapping[str, float] | None = None,
) -> tuple[Work, ...]:
    """Each rank's work in an iteration of the given rows by task (default: the example batch's).

    Sizes and FLOPs of the example batch are scaled by rows: exact where an iteration's batch has
    its other dimensions (lengths), and for operators that see a part of the rows or all of the example's.

    Args:
        backward_flops: of each operator on the example batch. Default: as many products of forward's
            size as there are gradients to compute (of the parameters, of the inputs), which is exact
            for an operator that is one linear map. An operator may differ: attention multiplies two
            activations, the first layer of a network inside one needs no gradient of its input.
    """
    of_task = dict(graph.rows)
    given = of_task if rows is None else rows
    operators, values = graph.operator_map(), graph.value_map()
    backward = _estimated_backward_flops(graph) if backward_flops is None else backward_flops
    works = tuple(Work() for _ in range(program.devices))

    def share_of(task: str, count: int) -> float:
        return count / of_task.get(task, 1)

    def message_bytes(instruction: Instruction) -> int | None:
        edge = program.edges[instruction.index]
        task, value = program.runs[edge.source].task, values[edge.value]
        first, last = program.shared_rows(edge, instruction.source, instruction.target, given.get(task, 0))
        if first >= last:
            return None
        return value.bytes if value.dim is None else value.bytes * (last - first) // of_task.get(task, 1)

    for instruction in program.order:
        ranks = program.participants(instruction)
        match instruction.kind:
            case Kind.FORWARD | Kind.BACKWARD:
                run = program.runs[instruction.index]
                for shard, rank in enumerate(ranks):
                    first, last = run.rows(shard, given.get(run.task, 0))
                    for name in run.operators if first < last else ():
                        share = share_of(run.task, last - first)
                        if instruction.kind is Kind.BACKWARD:
                            works[rank].backward_flops += backward[name] * share
                        else:
                            works[rank].forward_flops += operators[name].forward_flops * share
                            works[rank].rows[name] = last - first
            case Kind.ACTIVATION | Kind.GRADIENT:
                size = message_bytes(instruction)
                if size is not None:
                    sender, receiver = ranks
                    works[sender].sent[instruction.kind].add(size)
                    works[receiver].received[instruction.kind].add(size)
            case Kind.REDUCE:
                for rank in ranks:
                    works[rank].summed.add(program.buckets[instruction.index].bytes)
            case Kind.BROADCAST:
                for rank in ranks:
                    works[rank].broadcast.add(program.broadcasts[instruction.index].bytes)
            case Kind.EXCHANGE:
                pass
    for rank, work in enumerate(works):
        held = [p for p in graph.parameters if rank in program.holders.get(p.name, (rank,))]
        work.parameters = tuple(p.name for p in held)
        work.parameter_bytes = sum(p.bytes for p in held)
    return works


def _by_kind() -> dict[Kind, Traffic]:
    return {Kind.ACTIVATION: Traffic(), Kind.GRADIENT: Traffic()}


def _estimated_backward_flops(graph: OperatorGraph) -> dict[str, float]:
    trainable = {p.name for p in graph.parameters if p.trainable}
    carrying, leading = graph.gradient_values(trainable), graph.loss_operators()
    return {
        o.name: o.forward_flops
        * (bool(trainable.intersection(o.parameters)) + bool(carrying.intersection(o.inputs)))
        * (o.name in leading)
        for o in graph.operators
    }
