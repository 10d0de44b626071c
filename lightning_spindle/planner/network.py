"""A placement seen as a whole: which data flow between its runs, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_spindle.planner.memory import bit_set, bits, parameters_of
from lightning_spindle.planner.problem import PlanningProblem
from lightning_spindle.planner.sync import Sync
from lightning_spindle.planner.timing import PlacedRun, UnplacedRun
from lightning_spindle.planner.transfers import flow_bytes, transfer_ms

Groups = Sequence[tuple[int, ...]]
"""The devices of each run, in the order of their shards."""
SAME_TIME_MS = 1e-6
WIDTHS = (1, 2, 4)
"""Windows of so many starting times; and all from one on."""


@dataclass(frozen=True, slots=True)
class DataLink:
    """Bytes (whole batch) that go from one run to another, by their indices."""

    bytes: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Window:
    """The runs [first, last), which start within a span of time; ``across`` run over its ends."""

    first: int
    last: int
    across: tuple[int, ...]


class Network:
    """Runs in order of start, ``links`` (data that go from one to another), and ``windows`` of time.

    ``sync_weight``: what a millisecond of synchronisation counts beside one of ``links``.
    """

    def __init__(self, runs: Iterable[UnplacedRun], problem: PlanningProblem, sync_weight: float) -> None:
        self.sync_weight = sync_weight
        self.runs = sorted(runs, key=lambda r: (r.start_ms, r.metaop, r.first))
        self.problem = problem
        self.links = self._links()
        self.touching: list[list[int]] = [[] for _ in self.runs]
        for k, link in enumerate(self.links):
            self.touching[link.source].append(k)
            self.touching[link.target].append(k)
        self.pins = [problem.metaop(r.metaop).pin for r in runs]
        self.island = np.array([problem.cluster.island(d) for d in range(problem.devices)])
        self.near = np.equal.outer(np.arange(self.island[-1] + 1), self.island).astype(float)
        self.windows = list(self._windows())
        self.sync = Sync(problem)
        self.parameters, self.frozen = self._parameters()
        self.activations = [
            problem.metaop(r.metaop).activation_bytes * (r.last - r.first) / r.n for r in self.runs
        ]

    def _parameters(self) -> tuple[list[tuple[tuple[int, ...], float]], ...]:
        """(runs that use them, bytes on a device), those of the same users as one; frozen ones apart."""
        users: dict[str, list[int]] = {}
        sizes: dict[str, float] = dict(self.problem.parameter_bytes)
        shards: dict[str, float] = {}
        for i, r in enumerate(self.runs):
            op = self.problem.metaop(r.metaop)
            for name in parameters_of(op, r.first, r.last):
                users.setdefault(name, []).append(i)
                shard = sizes.get(name, 0) / op.configuration(r.n).tensor
                shards[name] = max(shards.get(name, 0.0), shard)
        trained: dict[tuple[int, ...], float] = {}
        frozen: dict[tuple[int, ...], float] = {}
        for name, indices in sorted(users.items()):
            together = frozen if name in self.problem.frozen else trained
            together[tuple(indices)] = together.get(tuple(indices), 0.0) + shards[name]
        return tuple([(i, size) for i, size in sorted(of.items()) if size > 0] for of in (trained, frozen))

    def _links(self) -> list[DataLink]:
        flows = flow_bytes(self.problem.flows)
        last: dict[str, int] = {}
        found: list[DataLink] = []
        for i, r in enumerate(self.runs):
            op = self.problem.metaop(r.metaop)
            if r.first > 0:
                found.append(DataLink(op.layer_flow_bytes, last[r.metaop], i))
            else:
                found += [DataLink(flows.get((b, r.metaop), 0), last[b], i) for b in op.after]
            last[r.metaop] = i
        return found

    def start(self, placed: Iterable[PlacedRun]) -> Groups:
        """The groups of a placement of the same runs."""
        at = {(p.run.metaop, p.run.first): p.devices for p in placed}
        return [at[r.metaop, r.first] for r in self.runs]

    def _windows(self) -> Iterator[Window]:
        begins: list[int] = []
        for i, r in enumerate(self.runs):
            if not begins or r.start_ms > self.runs[begins[-1]].start_ms + SAME_TIME_MS:
                begins.append(i)
        ends = [*begins[1:], len(self.runs)]
        spans = [(i, i + w - 1) for w in WIDTHS for i in range(len(begins) + 1 - w)]
        spans += [(i, len(begins) - 1) for i in range(1, len(begins) - WIDTHS[-1])]
        for i, j in spans:
            lo, hi = begins[i], ends[j]
            cuts = [self.runs[k].start_ms + 2 * SAME_TIME_MS for k in (lo, hi) if k < len(self.runs)]
            across = [
                k
                for k, r in enumerate(self.runs)
                if any(r.start_ms < cut - 3 * SAME_TIME_MS and r.end_ms > cut for cut in cuts)
            ]
            yield Window(lo, hi, tuple(across))

    def link_ms(self, k: int, devices: Groups) -> float:
        link = self.links[k]
        return transfer_ms(link.bytes, devices[link.source], devices[link.target], self.problem.cluster)

    def sync_ms(self, devices: Groups) -> float:
        """All-reduce time of all parameters over the devices that hold them, summed."""
        held = [bit_set(group) for group in devices]
        total = 0.0
        for users, size in self.parameters:
            holders = _union(held, users)
            total += size * self.sync.seconds_a_byte(holders)
        return 1e3 * total

    def memory(self, devices: Groups) -> float:
        """Bytes on the fullest device."""
        count = self.problem.devices
        held = [bit_set(group) for group in devices]
        used = np.zeros(count)
        for users, size in self.parameters:
            holders = _union(held, users)
            used += self.problem.state_factor(holders.bit_count()) * size * bits(holders, count)
        for users, size in self.frozen:
            used += size * bits(_union(held, users), count)
        for members, activation_bytes in zip(held, self.activations, strict=True):
            if activation_bytes:
                used += activation_bytes * bits(members, count)
        return float(used.max())

    def feasible(self, devices: Groups) -> bool:
        """Whether no two runs share a device at the planned times, and pins are kept."""
        busy_ms = [0.0] * self.problem.devices
        at: dict[str, tuple[int, ...]] = {}
        for run, pin, group in zip(self.runs, self.pins, devices, strict=True):
            if pin is not None and at.setdefault(pin, group) != group:
                return False
            for d in group:
                if busy_ms[d] > run.start_ms + SAME_TIME_MS:
                    return False
                busy_ms[d] = run.end_ms
        return True


def _union(held: Sequence[int], runs: Iterable[int]) -> int:
    """Devices of any of the runs, as a bit set."""
    found = 0
    for i in runs:
        found |= held[i]
    return found
