"""What the ranks did in the last iterations, as a timeline beside the predicted one."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from statistics import median

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_spindle.costs import Costs
from lightning_spindle.program import Program
from lightning_spindle.runtime.iteration import Mark
from lightning_spindle.runtime.objects import gather_objects
from lightning_spindle.runtime.session import Step
from lightning_spindle.runtime.transport import Transport, everyone
from lightning_spindle.simulate import simulate
from lightning_spindle.timeline import Category, Timeline, comparison, timeline_trace

KEPT_ITERATIONS = 30
_CLOCK_TRIES = 5


class Recording:
    """Keeps the marks of the last iterations of one rank.

    ``predicted`` is the simulated timeline; None where the plan was given, not measured.
    """

    def __init__(self, step: Step, costs: Costs | None) -> None:
        self._engine, self._costs = step.engine, costs
        self._kept: deque[tuple[Mark, ...]] = deque(maxlen=KEPT_ITERATIONS)
        self._follow(step.program)

    def _follow(self, program: Program) -> None:
        """Forgets iterations of another program: instructions are told by their numbers."""
        self._program = program
        self._kept.clear()
        self.predicted = None if self._costs is None else simulate(program, self._costs)

    def iteration_ended(self, step: Step) -> None:
        """Called when the optimizer has stepped; what follows the engine's last mark was its step.

        Iterations of other steps than that which was planned are not kept.
        """
        if step.engine is not self._engine:
            return
        marks = self._engine.marks
        if self._engine.program is not self._program:
            self._follow(self._engine.program)
        if marks:
            optimizer = Mark(None, Category.OPTIMIZER, marks[-1].end_s, time.perf_counter())
            self._kept.append((*marks, optimizer))

    def measured(self, transport: Transport, device: torch.device) -> Timeline | None:
        """The kept iteration of median length on all ranks, on rank 0's clock (collective).

        Returns:
            None on ranks other than 0, and where no iteration was recorded.
        """
        offset_s = _clock_offset_s(transport, device)
        shifted = [
            tuple(Mark(m.instruction, m.category, m.start_s - offset_s, m.end_s - offset_s) for m in marks)
            for marks in self._kept
        ]
        ranks = gather_objects(shifted, transport, device)
        if ranks is None or not ranks[0]:
            return None
        spans = [
            max(r[k][-1].end_s for r in ranks) - min(r[k][0].start_s for r in ranks)
            for k in range(min(len(r) for r in ranks))
        ]
        middle = min(range(len(spans)), key=lambda k: abs(spans[k] - median(spans)))
        start_s = min(r[middle][0].start_s for r in ranks)
        events = [
            mark.event(self._program, rank, start_s)
            for rank, kept in enumerate(ranks)
            for mark in kept[middle]
        ]
        return Timeline("measured", transport.size, tuple(events), middle)

    def write(self, folder: Path, transport: Transport, device: torch.device) -> None:
        """Writes ``timeline.json`` and, where matplotlib is there, ``timeline.png`` (collective)."""
        measured = self.measured(transport, device)
        if measured is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        timelines = [t for t in (self.predicted, measured) if t is not None]
        (folder / "timeline.json").write_text(timeline_trace(*timelines))
        if self.predicted is not None:
            rank_zero_info(comparison(self.predicted, measured))
        try:
            from lightning_spindle.plots import timeline_figure

            timeline_figure(self.predicted, measured, folder / "timeline.png")
        except ImportError as e:
            rank_zero_warn(f"timeline.png was not drawn: {e}")


def _clock_offset_s(transport: Transport, device: torch.device) -> float:
    """This rank's clock minus rank 0's, as exact as ranks leave a collective together."""
    differences = []
    for _ in range(_CLOCK_TRIES):
        barrier = torch.zeros(1, device=device)
        transport.all_reduce(barrier, everyone(transport)).wait()
        now_s = time.perf_counter()
        table = torch.zeros(transport.size, dtype=torch.float64, device=device)
        table[transport.rank] = now_s
        transport.all_reduce(table, everyone(transport)).wait()
        differences.append(now_s - float(table[0]))
    return median(differences)
