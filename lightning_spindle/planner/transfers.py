"""What moving data costs when MetaOps change devices (paper, sections 3.5 and 3.6).

Shard i of n devices holds the rows from i/n to (i+1)/n of a batch, in the order of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from lightning_spindle.cluster import Cluster
from lightning_spindle.graph import Flow
from lightning_spindle.plan import Run
from lightning_spindle.planner.problem import PlanningProblem

Inputs = Sequence[tuple[int, tuple[int, ...]]]
"""(bytes, devices that hold them in the order of their shards) for each input of a run."""
BOTH_WAYS = 2.0
"""An activation goes forward and its gradient comes back."""


def shares(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """(sender, receiver, fraction of the rows) between two groups, devices that keep rows included.

    At most len(source) + len(target) - 1 of them: both groups hold consecutive ranges.
    """
    n, m = len(source), len(target)
    i = j = 0
    at = 0
    while i < n and j < m:
        until = min((i + 1) * m, (j + 1) * n)
        yield source[i], target[j], (until - at) / (n * m)
        at = until
        i, j = i + (until == (i + 1) * m), j + (until == (j + 1) * n)


def transfer_ms(size_bytes: float, source: Sequence[int], target: Sequence[int], cluster: Cluster) -> float:
    """Milliseconds to bring a value of that size (all rows) to another group, and its gradient back.

    The busiest device decides: what it receives, or what it sends, one message after the other.
    The same devices in the same order cost nothing.
    """
    busy: dict[tuple[str, int], float] = {}
    for sender, receiver, share in shares(source, target):
        if sender != receiver:
            seconds = cluster.link(sender, receiver).seconds(share * size_bytes)
            for key in (("send", sender), ("receive", receiver)):
                busy[key] = busy.get(key, 0.0) + seconds
    return BOTH_WAYS * 1e3 * max(busy.values(), default=0.0)


def arranged(group: Sequence[int], inputs: Inputs, cluster: Cluster) -> tuple[int, ...]:
    """The devices of a group in the order of shards in which most rows stay where they are.

    Greedy over the pairs (device, shard) by the bytes that the device already holds of the shard;
    devices that hold nothing take shards whose rows are in their island, then what is left.
    O(n log n) for n devices in group and inputs.
    """
    sources = [(size, source) for size, source in inputs if size > 0]
    if not sources:
        return tuple(sorted(group))
    idle = set(group)
    if len(sources) == 1 and len(sources[0][1]) == len(group) and idle.issuperset(sources[0][1]):
        return sources[0][1]
    held: dict[tuple[int, int], float] = {}
    for size, source in sources:
        for sender, shard, share in shares(source, range(len(group))):
            if sender in idle:
                held[shard, sender] = held.get((shard, sender), 0.0) + share * size
    order = [-1] * len(group)
    for _, (shard, device) in sorted((-size, key) for key, size in held.items()):
        if order[shard] < 0 and device in idle:
            order[shard] = device
            idle.discard(device)
    if idle:
        _fill(order, idle, max(sources)[1], cluster)
    return tuple(order)


def _fill(order: list[int], idle: set[int], source: Sequence[int], cluster: Cluster) -> None:
    """Gives the shards without a device one of ``idle``, in the island of their rows where it can."""
    islands: dict[int, list[int]] = {}
    for device in sorted(idle, reverse=True):
        islands.setdefault(cluster.island(device), []).append(device)
    for shard, device in enumerate(order):
        near = islands.get(cluster.island(source[shard * len(source) // len(order)]))
        if device < 0 and near:
            order[shard] = near.pop()
    rest = sorted((d for devices in islands.values() for d in devices), reverse=True)
    for shard, device in enumerate(order):
        if device < 0:
            order[shard] = rest.pop()


def flow_bytes(flows: Iterable[Flow]) -> dict[tuple[str, str], int]:
    """(source, target) to bytes."""
    total: dict[tuple[str, str], int] = {}
    for f in flows:
        total[f.source, f.target] = total.get((f.source, f.target), 0) + f.bytes
    return total


def inputs_of(
    metaop: str,
    first: int,
    problem: PlanningProblem,
    flows: Mapping[tuple[str, str], int],
    at: Mapping[str, tuple[int, ...]],
) -> list[tuple[int, tuple[int, ...]]]:
    """(bytes, devices that hold them) for each input of the run of a MetaOp that starts with layer ``first``.

    ``at`` tells where the last run of a MetaOp was.
    """
    op = problem.metaop(metaop)
    if first > 0:
        return [(op.layer_flow_bytes, at[metaop])]
    return [(flows.get((before, metaop), 0), at[before]) for before in op.after]


def transfers_ms(runs: Iterable[Run], problem: PlanningProblem) -> float:
    """The time that all transfers of a plan take, summed: what placement keeps small."""
    flows = flow_bytes(problem.flows)
    at: dict[str, tuple[int, ...]] = {}
    total = 0.0
    for run in sorted(runs, key=lambda r: (r.start_ms, r.end_ms, r.metaop, r.first)):
        for size, devices in inputs_of(run.metaop, run.first, problem, flows, at):
            total += transfer_ms(size, devices, run.devices, problem.cluster)
        at[run.metaop] = run.devices
    return total
