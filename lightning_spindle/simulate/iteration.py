"""Discrete-event simulation of one iteration, as the engine executes it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from lightning_spindle.costs import Costs
from lightning_spindle.program import Kind, Program
from lightning_spindle.simulate.cores import SharedCores
from lightning_spindle.simulate.deadlock import ProgramError, check_deadlock
from lightning_spindle.simulate.links import Links, Transfer
from lightning_spindle.simulate.memory import Memory
from lightning_spindle.simulate.prepared import Key, Step, prepare
from lightning_spindle.timeline import Category, Event, Timeline


def simulate(program: Program, costs: Costs, rows: Mapping[str, int] | None = None) -> Timeline:
    """What one iteration of a program would look like; its ``span_s`` is the predicted time.

    * Each rank works through its instructions in order. Computing takes the time of the
      run's operators at the shard's rows; on machines with ``cluster.cores``, ranks that
      compute at the same time share them.
    * Messages do not block: the sender goes on once it has posted, the receiver at once
      too, and waits where a FORWARD or BACKWARD uses the rows. A message moves when both
      have posted, beside computing, as the links allow (``Links``).
    * A bucket is summed when its last holder has posted it, beside computing, and takes its
      devices' links in both directions. The exchange of results waits for all ranks.
    * At the end a rank waits for its messages and buckets, then runs its optimizer on what it steps.
      New values are then broadcast as buckets are summed, and waited for.
    * What each device holds is followed (``Memory``).

    Args:
        rows: this iteration's rows by task (a task that is missing is idle); the graph's
            example batch where not given.

    Raises:
        DeadlockError: the program's ranks wait for each other.
    """
    given = dict(costs.graph.rows) if rows is None else dict(rows)
    for run in program.runs if rows is None else ():
        given.setdefault(run.task, 1)
    return _Simulation(program, costs, given).execute()


class _Rank:
    """Where a rank stands."""

    __slots__ = ("at", "computing", "done", "outstanding", "stalled_s", "started_s", "stepped", "waits_for")

    def __init__(self) -> None:
        self.at = 0
        self.computing: Key | None = None
        self.started_s = 0.0
        self.outstanding = 0
        """Messages and buckets that it posted and that are still under way."""
        self.stepped = False
        self.stalled_s = 0.0
        self.waits_for: Key | str | None = None
        self.done = False


_EXCHANGE, _END, _OPTIMIZER = "exchange", "end", -1


class _Simulation:
    def __init__(self, program: Program, costs: Costs, rows: Mapping[str, int]) -> None:
        self.program, self.costs = program, costs
        self.ready = prepare(program, costs, rows)
        self.ranks = [_Rank() for _ in range(program.devices)]
        cluster = costs.cluster
        self.island = [cluster.island(r) for r in range(program.devices)]
        self.cores = [SharedCores(cluster.cores) for _ in range(max(self.island, default=0) + 1)]
        self.links = Links(cluster, self._planned)
        self.moving: dict[Transfer, Step] = {}
        self.memory = Memory(program, costs, self.ready.kept_bytes)
        self.heap: list[tuple[float, int, Step | int, int]] = []
        """Time, order of creation, a step that ends or an island, and its version."""
        self.created = 0
        self.events: list[Event] = []

    def execute(self) -> Timeline:
        for rank in range(self.program.devices):
            self._proceed(rank, 0.0)
        while self.heap or self.links.unsettled(math.inf):
            if self.links.unsettled(self.heap[0][0] if self.heap else math.inf):
                self.links.settle()
                continue
            now_s, _, what, version = heapq.heappop(self.heap)
            if isinstance(what, Step):
                if what.transfer.version == version:
                    self._end_of_step(what, now_s)
            elif self.cores[what].version == version:
                rank = self.cores[what].finish(now_s)
                self._end_of_computing(rank, now_s)
                self._schedule(what)
        if not all(r.done for r in self.ranks):
            check_deadlock(self.program)
            raise ProgramError("invalid program: the simulation stopped before its end")
        return Timeline("predicted", self.program.devices, tuple(self.events), memory=self.memory.samples())

    def _push(self, time_s: float, what: Step | int, version: int = 0) -> None:
        self.created += 1
        heapq.heappush(self.heap, (time_s, self.created, what, version))

    def _schedule(self, island: int) -> None:
        end_s = self.cores[island].next_end_s()
        if end_s is not None:
            self._push(end_s, island, self.cores[island].version)

    def _proceed(self, rank: int, now_s: float) -> None:
        """Executes a rank's instructions until it computes, waits, or is through."""
        state, stream = self.ranks[rank], self.ready.streams[rank]
        while state.at < len(stream):
            step = stream[state.at]
            kind = step.instruction.kind
            if kind is Kind.BROADCAST and not state.stepped:
                break
            if kind is Kind.FORWARD or kind is Kind.BACKWARD:
                key = (kind, step.instruction.index, rank)
                if self.ready.missing.get(key):
                    state.waits_for, state.stalled_s = key, now_s
                    return
                state.at += 1
                if self._compute(rank, key, self.ready.work_s[key], now_s):
                    return
                continue
            state.at += 1
            step.arrived += 1
            last = step.arrived == len(step.ranks)
            if kind is Kind.EXCHANGE:
                state.waits_for, state.stalled_s = _EXCHANGE, now_s
                if last:
                    self._push(now_s + step.transfer.seconds, step)
                    self._meet(step, now_s)
                return
            if kind is Kind.REDUCE:
                self.memory.copied(self.program.buckets[step.instruction.index].bytes, rank, now_s)
            elif kind is Kind.BROADCAST:
                self.memory.copied(self.program.broadcasts[step.instruction.index].bytes, rank, now_s)
            state.outstanding += 1
            if last:
                self.moving[step.transfer] = step
                self.links.post(step.transfer, now_s)
        self._wind_up(rank, now_s)

    def _wind_up(self, rank: int, now_s: float) -> None:
        """After backward, and after the broadcasts: wait for what is under way. In between: the optimizer."""
        state = self.ranks[rank]
        if state.outstanding:
            state.waits_for, state.stalled_s = _END, now_s
            return
        self.memory.copies_end(rank, now_s)
        if state.stepped:
            state.done = True
            return
        state.stepped = True
        work_s = 0.0
        if self.ready.passed_back:
            work_s = self.costs.optimizer_s(self.costs.trainable_bytes(self.memory.stepped[rank]))
        if not self._compute(rank, (Kind.EXCHANGE, _OPTIMIZER, rank), work_s, now_s):
            self._proceed(rank, now_s)

    def _compute(self, rank: int, key: Key, work_s: float, now_s: float) -> bool:
        """Starts computing; False where there is nothing to do."""
        kind, run, _ = key
        if kind is Kind.FORWARD:
            self.memory.forward_starts(run, rank, now_s)
        if work_s <= 0:
            self._release(rank, key, now_s)
            return False
        state = self.ranks[rank]
        state.computing, state.started_s = key, now_s
        island = self.island[rank]
        self.cores[island].add(now_s, rank, work_s)
        self._schedule(island)
        return True

    def _end_of_computing(self, rank: int, now_s: float) -> None:
        state = self.ranks[rank]
        assert state.computing is not None
        kind, index, _ = key = state.computing
        state.computing = None
        if index == _OPTIMIZER:
            self._event(rank, state.started_s, now_s, "", "optimizer", Category.OPTIMIZER)
            self._proceed(rank, now_s)
            return
        run = self.program.runs[index]
        category = Category.FORWARD if kind is Kind.FORWARD else Category.BACKWARD
        self._event(rank, state.started_s, now_s, f"{kind}{index}", run.label, category, run.task)
        self._release(rank, key, now_s)
        self._proceed(rank, now_s)

    def _release(self, rank: int, key: Key, now_s: float) -> None:
        """Frees a run's activations after its backward, or its forward where there is no backward."""
        kind, run, _ = key
        if kind is Kind.BACKWARD:
            self.memory.backward_ended(run, rank, now_s)
        if kind is Kind.BACKWARD or (kind is Kind.FORWARD and run not in self.ready.passed_back):
            self.memory.released(run, rank, now_s)

    def _planned(self, end_s: float, transfer: Transfer) -> None:
        self._push(end_s, self.moving[transfer], transfer.version)

    def _end_of_step(self, step: Step, now_s: float) -> None:
        if step.instruction.kind is Kind.EXCHANGE:
            for rank in step.ranks:
                self.ranks[rank].waits_for = None
                self.memory.gradients_cleared(self.ready.passed_back, rank, now_s)
            for rank in step.ranks:
                self._proceed(rank, now_s)
            return
        self._moved(step, now_s)
        feeds = step.feeds
        if feeds is not None:
            self.ready.missing[feeds] -= 1
        for rank in step.ranks:
            state = self.ranks[rank]
            state.outstanding -= 1
            if state.waits_for == _END:
                ended = state.outstanding == 0
            else:
                ended = (
                    state.waits_for is not None and state.waits_for == feeds and not self.ready.missing[feeds]
                )
            if ended:
                self._resume(rank, now_s)

    def _moved(self, step: Step, now_s: float) -> None:
        """A message or sum has ended: its links are free."""
        del self.moving[step.transfer]
        self.links.end(step.transfer, now_s)
        i = step.instruction
        label, task = self.program.label(i), self.program.task(i)
        category = Category.TRANSFER if i.kind in (Kind.ACTIVATION, Kind.GRADIENT) else Category.SYNC
        for rank in step.ranks:
            self._event(rank, step.transfer.start_s, now_s, step.text, label, category, task)

    def _resume(self, rank: int, now_s: float) -> None:
        state = self.ranks[rank]
        key, state.waits_for = state.waits_for, None
        if isinstance(key, tuple):
            run = self.program.runs[key[1]]
            text = f"{key[0]}{key[1]}"
            self._event(rank, state.stalled_s, now_s, text, f"inputs of {run.label}", Category.WAIT, run.task)
        else:
            what = "new values" if state.stepped else "messages and gradients"
            self._event(rank, state.stalled_s, now_s, "", what, Category.WAIT)
        self._proceed(rank, now_s)

    def _meet(self, step: Step, now_s: float) -> None:
        """All ranks are at the exchange: they waited for the last, and now exchange."""
        label = self.program.label(step.instruction)
        for rank in step.ranks:
            self._event(rank, self.ranks[rank].stalled_s, now_s, step.text, label, Category.WAIT)
            self._event(rank, now_s, now_s + step.transfer.seconds, step.text, label, Category.SYNC)

    def _event(
        self,
        rank: int,
        start_s: float,
        end_s: float,
        text: str,
        label: str,
        category: Category,
        task: str = "",
    ) -> None:
        if end_s > start_s:
            self.events.append(Event(rank, start_s, end_s, text, label, category, task))
