"""Measuring operators on the devices, with every local rank busy (paper, section 3.2).

Legend: B rows of a task's example batch; r rows of a pass; a *block* is a few passes in a
row between two barriers, long enough that the ranks' blocks overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch

from lightning_spindle.capture.pieces import Capture
from lightning_spindle.estimate.devices import usable_cores
from lightning_spindle.estimate.links import PreparedTransport, measure_links
from lightning_spindle.estimate.passes import Callables, OperatorTime, TaskPasses
from lightning_spindle.estimate.samples import LinkSamples, Samples
from lightning_spindle.estimate.untouched import untouched
from lightning_spindle.graph import Layout
from lightning_spindle.planner.problem import LayerTime
from lightning_spindle.runtime.objects import broadcast_object, number_of_rank_zero
from lightning_spindle.runtime.transport import Transport

Progress = Callable[[float, str], None]

BLOCK_S = 0.02
MOST_PASSES = 50
LEAST_BLOCKS, MOST_BLOCKS = 3, 8
SETTLED_SPREAD = 0.03
LINKS_SHARE, LINKS_MOST_S = 0.1, 2.0


def measure(
    capture: Capture,
    callables: Callables,
    leaves: Mapping[str, Sequence[Any]],
    transport: PreparedTransport,
    device: torch.device,
    *,
    module: torch.nn.Module,
    budget_s: float = 30.0,
    busy: int | None = None,
    cores: int | None = None,
    island_size: int | None = None,
    progress: Progress | None = None,
) -> Samples:
    """Times of all operators and links; a collective call that returns rank 0's figures to all.

    Every operator is timed, forward and backward apart, at the r of each allocation up to the
    number of ranks, operators that see the whole batch at B alone, metrics never (0 ms). What
    training does afterwards is the same bit for bit (``untouched``), and the example batch is
    copied first. Rank 0 leads: it chooses what is measured next and ends when figures have
    settled or ``budget_s`` is used up; one pass of each task at B is always made. An r for
    which no time was left has no sample.

    Args:
        callables: built pieces of all operators.
        leaves: an example batch of every task, on ``device``.
        module: the module that the pieces run, with its parameters under canonical names.
        budget_s: for everything, links included.
        busy: ranks on this machine; default all.
        cores: workloads that this machine runs at full speed; default ``usable_cores``.
        island_size: devices of an island, where there are several islands.
        progress: called now and then with the fraction done and what is measured.

    Raises:
        ValueError: a task has no example batch, or one without rows.
        RuntimeError: an operator failed; the message names it.
    """
    start = time.monotonic()
    tasks = dict.fromkeys(o.task for o in capture.graph.operators)
    missing = [task for task in tasks if task not in leaves]
    if missing:
        raise ValueError(f"cannot measure tasks {missing}: the example has no batch of them")
    transport.prepare([])
    with untouched(module, device), torch.enable_grad():
        links = measure_links(
            transport, device, min(LINKS_MOST_S, LINKS_SHARE * budget_s), island_size=island_size
        )
        parameters = dict(module.named_parameters())
        units = []
        for task in tasks:
            copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves[task]]
            passes = TaskPasses(task, capture, callables, parameters, copies, device)
            if passes.batch < 1:
                raise ValueError(f"cannot measure task {task}: its example batch has no rows")
            units += [_Unit(passes, rows) for rows in row_counts(passes.batch, transport.size)]
        bench = _Bench([u for u in units if u.passes.at(u.rows)], transport, device, start + budget_s)
        bench.run(progress, start)
    ranks = transport.size if busy is None else busy
    samples = _samples(capture, bench.units, links, ranks, usable_cores(device) if cores is None else cores)
    return Samples.from_json(broadcast_object(samples.to_json(), transport, device))


def row_counts(batch: int, devices: int) -> list[int]:
    """r of the largest shard for every allocation of up to ``devices``, from B down."""
    return sorted({-(-batch // n) for n in range(1, min(devices, batch) + 1)}, reverse=True)


@dataclass(slots=True)
class _Unit:
    """A task at a number of rows, and what was measured of it on this rank."""

    passes: TaskPasses
    rows: int
    warm: list[OperatorTime] = field(default_factory=list)
    pass_s: float = 0.0
    blocks_ms: list[float] = field(default_factory=list)
    least: list[OperatorTime] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        """Whether another block would hardly change the figures."""
        if len(self.blocks_ms) < LEAST_BLOCKS:
            return False
        middle = median(self.blocks_ms)
        spread = median(abs(ms - middle) for ms in self.blocks_ms)
        return len(self.blocks_ms) >= MOST_BLOCKS or spread <= SETTLED_SPREAD * middle

    def run(self, count: int) -> None:
        """The first call warms up; each later one is a block of ``count`` passes."""
        start = time.perf_counter()
        passes = [self.passes.run(self.rows) for _ in range(count)]
        self.pass_s = (time.perf_counter() - start) / count
        if not self.warm:
            self.warm = passes[0]
            return
        self.blocks_ms.append(fmean(map(_total_ms, passes)))
        known = [self.least] if self.least else []
        self.least = [_least(times) for times in zip(*passes, *known, strict=True)]

    def times(self) -> list[OperatorTime]:
        """Each operator's least time, all scaled so that their sum is the median of the blocks'.

        Where ranks outnumber cores, a rank waits now and then for a core, and which operators
        it then times is chance: least times have the operators' proportions without the waits,
        and the sum of a block has the waits.
        """
        if not self.blocks_ms:
            return self.warm
        total_ms = _total_ms(self.least)
        scale = median(self.blocks_ms) / total_ms if total_ms > 0 else 1.0
        return [OperatorTime(t.operator, t.forward_ms * scale, t.backward_ms * scale) for t in self.least]


class _Bench:
    """Runs units, rank 0 choosing which; all ranks run the same one at the same time."""

    def __init__(
        self, units: list[_Unit], transport: Transport, device: torch.device, deadline_s: float
    ) -> None:
        # Whole batches first: smaller passes read what they gave.
        self.units = sorted(units, key=lambda u: u.rows != u.passes.batch)
        self._transport = transport
        self._device = device
        self._deadline_s = deadline_s

    def run(self, progress: Progress | None, start_s: float) -> None:
        while True:
            chosen = self._choose() if self._transport.rank == 0 else 0
            chosen = number_of_rank_zero(self._transport, self._device, chosen)
            if chosen < 0:
                break
            index, count = divmod(chosen, MOST_PASSES + 1)
            unit = self.units[index]
            if progress is not None:
                budget_s = max(self._deadline_s - start_s, 1e-9)
                used = (time.monotonic() - start_s) / budget_s
                done = sum(u.settled for u in self.units) / len(self.units)
                progress(min(1.0, max(used, done)), f"{unit.passes.task}: {unit.rows} rows")
            unit.run(count)
        if progress is not None:
            progress(1.0, "measured")

    def _choose(self) -> int:
        """Unit and passes of the next block as one number; -1 to end."""
        left_s = self._deadline_s - time.monotonic()
        order = sorted(range(len(self.units)), key=lambda i: (self._age(i), i))
        open_units = sum(not u.settled for u in self.units)
        block_s = min(BLOCK_S, left_s / max(1, LEAST_BLOCKS * open_units))
        for index in order:
            unit = self.units[index]
            if not unit.warm:
                if unit.rows == unit.passes.batch or self._whole_pass_s(unit) < left_s:
                    return index * (MOST_PASSES + 1) + 1
            elif not unit.settled and unit.pass_s < left_s:
                fitting = int(block_s / max(unit.pass_s, 1e-9))
                return index * (MOST_PASSES + 1) + max(1, min(MOST_PASSES, fitting))
        return -1

    def _age(self, index: int) -> int:
        unit = self.units[index]
        return len(unit.blocks_ms) if unit.warm else -1

    def _whole_pass_s(self, unit: _Unit) -> float:
        """What a pass over all rows of the unit's task took: no smaller one takes longer."""
        return next(u.pass_s for u in self.units if u.passes is unit.passes)


def _samples(
    capture: Capture, units: Sequence[_Unit], links: LinkSamples, busy: int, cores: int | None
) -> Samples:
    found: dict[str, dict[int, LayerTime]] = {o.name: {} for o in capture.graph.operators}
    for unit in units:
        for t in unit.times():
            found[t.operator][unit.rows] = LayerTime(t.forward_ms, t.backward_ms)
    batches = {u.passes.task: u.passes.batch for u in units}
    for o in capture.graph.operators:
        if not found[o.name]:
            assert o.layout is Layout.EVERYWHERE or o.inputs, f"{o.name} was not measured"
            found[o.name][batches.get(o.task, 1)] = LayerTime(0.0, 0.0)
    return Samples(found, links, busy, cores, min((len(u.blocks_ms) for u in units), default=0))


def _least(times: Sequence[OperatorTime]) -> OperatorTime:
    forward_ms, backward_ms = min(t.forward_ms for t in times), min(t.backward_ms for t in times)
    return OperatorTime(times[0].operator, forward_ms, backward_ms)


def _total_ms(times: Sequence[OperatorTime]) -> float:
    return sum(t.forward_ms + t.backward_ms for t in times)
