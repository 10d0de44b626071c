"""Utilisation over time, by device and by MetaOp (paper, figure 9): FLOP/s reached over the device's peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarking.figures.head import head_of
from benchmarking.figures.style import SYSTEMS, legend, named, panels, workload_title
from benchmarking.figures.suite import Suite
from benchmarking.rows import CellRow
from benchmarking.simulated import Cell, Result
from benchmarking.tables import table
from lightning_spindle.graph import Layout
from lightning_spindle.program import Instruction, row_range
from lightning_spindle.timeline import Category, Event

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = ("deepspeed", "seq", "uniform", "stmm", "optimus", "spindle", "search")
BINS = 60
"""Of the slowest system's iteration."""


@dataclass(frozen=True, slots=True)
class UtilisationRow(CellRow):
    """``share`` of the peak, by kind: "time" (``at`` is in ms), "device" (a rank), "metaop" (its name)."""

    system: str
    kind: str
    at: str
    share: float


@dataclass(frozen=True, slots=True)
class Worked:
    """An event with the floating-point operations of its operators, by MetaOp."""

    event: Event
    flops: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        return sum(flops for _, flops in self.flops)


def rows(suite: Suite) -> list[UtilisationRow]:
    """Of every system that can run the case study's cell."""
    found = []
    for cell in suite.cells("utilisation"):
        results = {name: suite.result(cell, name) for name in SHOWN}
        worked = {name: worked_of(cell, r) for name, r in results.items() if r.timeline is not None}
        spans_s = {name: r.timeline.span_s for name, r in results.items() if r.timeline is not None}
        bin_s = max(spans_s.values(), default=0.0) / BINS
        for system, events in worked.items():
            shares = {
                "time": over_time(events, cell, spans_s[system], bin_s),
                "device": by_device(events, cell, spans_s[system]),
                "metaop": by_metaop(events, cell),
            }
            found += [
                UtilisationRow(*head_of(cell), system, kind, at, share)
                for kind, values in shares.items()
                for at, share in values
            ]
    return found


def worked_of(cell: Cell, result: Result) -> list[Worked]:
    """A result's forward and backward events with what they computed."""
    assert result.timeline is not None
    operators_of = _of_baseline(cell) if result.plan is None else _of_program(cell, result)
    metaop_of = {o: m.name for m in cell.metagraph.metaops for layer in m.layers for o in layer}
    found = []
    for e in result.timeline.events:
        if e.category not in (Category.FORWARD, Category.BACKWARD):
            continue
        flops: dict[str, float] = {}
        for operator, count in operators_of(e):
            passes = cell.costs.passes(operator, e.category is Category.BACKWARD)
            at = metaop_of.get(operator, operator)
            flops[at] = flops.get(at, 0.0) + passes * cell.costs.work(operator, count).flops
        found.append(Worked(e, tuple(flops.items())))
    return found


Operators = Callable[[Event], list[tuple[str, int]]]
"""The operators of an event, with the rows that it ran them on."""


def _of_program(cell: Cell, result: Result) -> Operators:
    assert result.plan is not None
    program = cell.step.program(result.plan)

    def operators(e: Event) -> list[tuple[str, int]]:
        run = program.runs[Instruction.parse(e.instruction).index]
        shard = run.shard_of(e.rank)
        assert shard is not None
        first, last = run.rows(shard, cell.costs.example_rows(run.task))
        return [(o, last - first) for o in run.operators]

    return operators


def _of_baseline(cell: Cell) -> Operators:
    """Data parallelism over all devices, as DeepSpeed's; an event is of one operator."""
    by_name, devices = cell.graph.operator_map(), cell.costs.cluster.devices

    def operators(e: Event) -> list[tuple[str, int]]:
        o = by_name[e.label]
        whole = cell.costs.example_rows(o.task)
        first, last = row_range(e.rank, devices, whole) if o.layout is Layout.SPLIT else (0, whole)
        return [(e.label, last - first)]

    return operators


def over_time(worked: Sequence[Worked], cell: Cell, span_s: float, bin_s: float) -> list[tuple[str, float]]:
    """Mean over the devices in equal bins, until the iteration's end; an event computes evenly."""
    flops = [0.0] * (int(span_s / bin_s) + 1)
    for w in worked:
        k, start_s = int(w.event.start_s / bin_s), w.event.start_s
        while start_s < w.event.end_s and k < len(flops):
            end_s = min(w.event.end_s, (k + 1) * bin_s)
            flops[k] += w.total * (end_s - start_s) / w.event.duration_s
            k, start_s = k + 1, end_s
    peak = cell.costs.kind.flops_per_s * cell.costs.cluster.devices
    widths_s = [min(bin_s, span_s - k * bin_s) for k in range(len(flops))]
    return [
        (f"{k * bin_s * 1e3:.3f}", done / (width_s * peak))
        for k, (done, width_s) in enumerate(zip(flops, widths_s, strict=True))
        if width_s > 0
    ]


def by_device(worked: Sequence[Worked], cell: Cell, span_s: float) -> list[tuple[str, float]]:
    """Each device's mean over the iteration."""
    flops = [0.0] * cell.costs.cluster.devices
    for w in worked:
        flops[w.event.rank] += w.total
    peak = cell.costs.kind.flops_per_s
    return [(str(rank), done / (span_s * peak)) for rank, done in enumerate(flops)]


def by_metaop(worked: Sequence[Worked], cell: Cell) -> list[tuple[str, float]]:
    """Each MetaOp's mean over the time that devices work for it; an event of several is divided by FLOPs.

    MetaOps that see a whole batch on one device (contrastive losses) are left out: they compute little.
    """
    flops: dict[str, float] = {}
    busy_s: dict[str, float] = {}
    for w in worked:
        for metaop, done in w.flops:
            flops[metaop] = flops.get(metaop, 0.0) + done
            busy_s[metaop] = busy_s.get(metaop, 0.0) + w.event.duration_s * (
                done / w.total if w.total else 1.0
            )
    peak = cell.costs.kind.flops_per_s
    shown = [m.name for m in cell.metagraph.metaops if m.layout is Layout.SPLIT and flops.get(m.name)]
    return [(name, flops[name] / (busy_s[name] * peak)) for name in shown]


def draw(found: Sequence[UtilisationRow]) -> Figure:
    """Three panels, one for each kind."""
    first = found[0]
    title = (
        f"Utilisation, {workload_title(first.workload, first.tasks)} on {first.devices} devices, simulated"
    )
    figure, (time, device, metaop) = panels(1, 3, title, width=5.4, height=4.0)
    for system in dict.fromkeys(row.system for row in found):
        look = SYSTEMS[system]
        style = {"color": look.colour, "linestyle": look.line, "label": look.label, "linewidth": 1.5}
        values = {kind: _values(found, system, kind) for kind in ("time", "device", "metaop")}
        at, shares = zip(*values["time"], strict=True)
        time.step([float(ms) for ms in at], [100 * s for s in shares], where="post", **style)
        device.plot(range(len(values["device"])), [100 * s for _, s in values["device"]], marker=".", **style)
        metaop.plot(range(len(values["metaop"])), [100 * s for _, s in values["metaop"]], marker=".", **style)
    names = [name for name, _ in _values(found, found[0].system, "metaop")]
    metaop.set_xticks(
        range(len(names)), [n.replace("/towers.", "\n") for n in names], rotation=90, fontsize=6
    )
    named(time, "mean of the devices over time", "ms from the iteration's start", "% of the peak FLOP/s")
    named(device, "by device, over the iteration", "device", "% of the peak FLOP/s")
    named(metaop, "by MetaOp, while it runs", "", "% of the peak FLOP/s")
    for axes in (time, device, metaop):
        axes.set_ylim(bottom=0)
    legend(figure, (time,), columns=4)
    return figure


def _values(found: Sequence[UtilisationRow], system: str, kind: str) -> list[tuple[str, float]]:
    return [(row.at, row.share) for row in found if row.system == system and row.kind == kind]


def tell(found: Sequence[UtilisationRow]) -> str:
    """Means and extremes of each system."""
    lines = []
    for system in dict.fromkeys(row.system for row in found):
        devices = [share for _, share in _values(found, system, "device")]
        metaops = [share for _, share in _values(found, system, "metaop")]
        lines.append(
            [
                SYSTEMS[system].label,
                f"{sum(devices) / len(devices):.1%}",
                f"{min(devices):.1%} to {max(devices):.1%}",
                f"{min(metaops):.1%} to {max(metaops):.1%}",
            ]
        )
    return table(["share of the peak FLOP/s", "mean", "devices", "MetaOps while they run"], lines)
