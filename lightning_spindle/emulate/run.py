"""An iteration of a program on virtual devices."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_spindle.costs import Costs
from lightning_spindle.emulate.clocks import Clocks
from lightning_spindle.emulate.network import Network
from lightning_spindle.emulate.stubs import stub_capture
from lightning_spindle.emulate.transport import EmulatedTransport
from lightning_spindle.program import Instruction, Kind, Program
from lightning_spindle.runtime.engine import Engine
from lightning_spindle.runtime.iteration import Mark, TaskBatch
from lightning_spindle.runtime.transport import ProcessGroupTransport, Ranks
from lightning_spindle.timeline import Category, Timeline

LIMIT_S = 300.0
"""Of real time for any wait of which nothing comes."""


def emulate(program: Program, costs: Costs, rows: Mapping[str, int] | None = None) -> Timeline:
    """What the engine does in an iteration, each device on a clock of its own.

    The second iteration counts: in the first, messages are preceded by their forms.

    Args:
        rows: as for ``simulate``.

    Raises:
        ValueError: devices that share cores; a rank's virtual clock knows nothing of the others' work.
        EmulationError: the program's ranks wait for each other for ever.
    """
    if costs.cluster.cores is not None:
        raise ValueError("devices that share cores cannot be emulated; give the cluster cores=None")
    given = dict(costs.graph.rows) if rows is None else dict(rows)
    for run in program.runs if rows is None else ():
        given.setdefault(run.task, 1)
    network = Network(costs)
    clocks = Clocks(program.devices, network, LIMIT_S)
    store = dist.HashStore()
    marks: dict[int, list[Mark]] = {}
    failures: list[BaseException] = []

    def live(rank: int) -> None:
        try:
            transport = _transport(rank, program, store)
            marks[rank] = _Rank(transport, program, costs, clocks, network).train(given)
            clocks.leave()
        except BaseException as e:
            failures.append(e)
            clocks.fail(e)

    threads = [threading.Thread(target=live, args=(r,), daemon=True) for r in range(program.devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return _timeline(program, marks)


def _transport(rank: int, program: Program, store: dist.Store) -> ProcessGroupTransport:
    """Real gloo between threads; a collective call."""
    limit = timedelta(seconds=LIMIT_S)

    def group(ranks: Ranks) -> dist.ProcessGroup | None:
        if rank not in ranks:
            return None
        scope = dist.PrefixStore(str(ranks), store)
        return dist.ProcessGroupGloo(scope, ranks.index(rank), len(ranks), limit)

    world = group(tuple(range(program.devices)))
    assert world is not None
    transport = ProcessGroupTransport(world, group, timeout=limit)
    transport.prepare(program.groups())
    return transport


class _VirtualEngine(Engine):
    """The engine, whose laps are read off its rank's virtual clock."""

    def __init__(self, clocks: Clocks, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._clocks = clocks
        self._since_s = 0.0

    def begin(self) -> None:
        """All ranks begin an iteration together."""
        self._clocks.align(self._transport.rank)
        self._since_s = self._clocks.now_s[self._transport.rank]

    def step(self, seconds: float) -> None:
        """The optimizer's."""
        self._clocks.spend(self._transport.rank, seconds)
        self._lap(None, Category.OPTIMIZER)

    def _lap(self, instruction: Instruction | None, category: Category) -> None:
        now_s = self._clocks.now_s[self._transport.rank]
        self.marks.append(Mark(instruction, category, self._since_s, now_s))
        self._since_s = now_s


class _Rank:
    """A rank's engine, with stubs for operators and a number for each parameter."""

    def __init__(
        self,
        real: ProcessGroupTransport,
        program: Program,
        costs: Costs,
        clocks: Clocks,
        network: Network,
    ) -> None:
        rank = real.rank
        held = [p for p in costs.graph.parameters if rank in program.holders.get(p.name, ())]
        self.parameters = {p.name: torch.nn.Parameter(torch.zeros(1), p.trainable) for p in held}
        self.optimizer_s = costs.optimizer_s(costs.trainable_bytes(program.stepped(rank)))
        self.trains = any(i.kind is Kind.BACKWARD for i in program.order)

        def spend(operator: str, rows: int, backward: bool) -> None:
            clocks.spend(rank, costs.operator_s(operator, rows, backward))

        capture = stub_capture(costs.graph, self.parameters, spend)
        mine = [o for run in program.runs if rank in run.devices for o in run.operators]
        self.engine = _VirtualEngine(
            clocks,
            _shrunk(program),
            capture,
            {o: capture.pieces[o].build() for o in mine},
            self.parameters,
            EmulatedTransport(real, clocks, network, program, costs),
            torch.device("cpu"),
        )

    def train(self, rows: Mapping[str, int]) -> list[Mark]:
        """Two iterations; the marks of the second, which all ranks begin at the same time."""
        marks: list[Mark] = []
        for index in range(2):
            self.engine.begin()
            marks = self._iterate(rows, index)
        return marks

    def _iterate(self, rows: Mapping[str, int], index: int) -> list[Mark]:
        tasks = self.engine.tasks
        batches = {
            task: TaskBatch(count, [torch.zeros(count)] if task in tasks else None)
            for task, count in rows.items()
            if count
        }
        iteration = self.engine.forward(batches, index=index, batch_idx=index)
        if self.trains:
            for p in self.parameters.values():
                p.grad = None
            self.engine.backward(iteration, dict.fromkeys(rows, 1.0), sync=True)
            self.engine.step(self.optimizer_s)
            self.engine.share()
        return list(self.engine.marks)


def _shrunk(program: Program) -> Program:
    """The same program with a number for each parameter: what the stubs' gradients are."""
    buckets = tuple(replace(b, bytes=4 * len(b.parameters), dtype="float32") for b in program.buckets)
    broadcasts = tuple(replace(b, bytes=4 * len(b.parameters), dtype="float32") for b in program.broadcasts)
    return replace(program, buckets=buckets, broadcasts=broadcasts)


def _timeline(program: Program, marks: Mapping[int, list[Mark]]) -> Timeline:
    start_s = min(m.start_s for of in marks.values() for m in of)
    events = (
        m.event(program, rank, start_s) for rank, of in marks.items() for m in of if m.end_s > m.start_s
    )
    return Timeline("emulated", program.devices, tuple(events))
