"""Scaling curves of MetaOps with their α-β fit (paper, figure 4 and section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarking.figures.head import head_of
from benchmarking.figures.style import LINES, MARKERS, devices_axis, legend, named, panels, workload_title
from benchmarking.figures.suite import Suite
from benchmarking.rows import CellRow
from benchmarking.tables import table
from lightning_spindle.graph import Layout
from lightning_spindle.planner.curves import fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class ScalingRow(CellRow):
    """Forward and backward of one layer on ``n`` devices: the cost model's time, and the curve's.

    ``left_out_ms`` is that of a curve fitted to the other samples, None where fewer than three remain.
    """

    metaop: str
    layers: int
    n: int
    ms: float
    fitted_ms: float
    left_out_ms: float | None
    scalability: float


def rows(suite: Suite) -> list[ScalingRow]:
    """Every MetaOp that can be divided, at its valid allocations."""
    found = []
    for cell in suite.cells("scaling"):
        for op in cell.problem.metaops:
            if op.layout is not Layout.SPLIT:
                continue
            samples = [(n, time.total_ms) for n, time in op.times]
            curve = fit(samples)
            for n, ms in samples:
                others = [s for s in samples if s[0] != n]
                left_out_ms = fit(others).time_ms(n) if len(others) >= 3 else None
                found.append(
                    ScalingRow(
                        *head_of(cell),
                        op.name,
                        op.layers,
                        n,
                        ms,
                        curve.time_ms(n),
                        left_out_ms,
                        samples[0][1] / ms,
                    )
                )
    return found


def draw(found: Sequence[ScalingRow]) -> Figure:
    """Times of a layer and their scalability ς(n) = T(1) / T(n); points are samples, lines the fit."""
    title = f"Scaling curves of a layer, {workload_title(found[0].workload, found[0].tasks)}, simulated"
    figure, (times, gains) = panels(1, 2, title, width=6.2, height=4.2)
    devices = sorted({row.n for row in found})
    for k, metaop in enumerate(dict.fromkeys(row.metaop for row in found)):
        own = [row for row in found if row.metaop == metaop]
        n = [row.n for row in own]
        look = {"color": LINES[k % len(LINES)], "linewidth": 1.2}
        points = {"color": LINES[k % len(LINES)], "marker": MARKERS[k % len(MARKERS)], "linestyle": "none"}
        times.plot(n, [row.fitted_ms for row in own], **look)
        times.plot(n, [row.ms for row in own], **points, markersize=5, label=metaop)
        gains.plot(n, [own[0].fitted_ms / row.fitted_ms for row in own], **look)
        gains.plot(n, [row.scalability for row in own], **points, markersize=5)
    gains.plot(devices, devices, color="#999999", linestyle=":", label="perfect scaling")
    for axes in (times, gains):
        devices_axis(axes, devices)
    times.set_yscale("log")
    gains.set_yscale("log", base=2)
    gains.set_yticks(devices, [str(n) for n in devices])
    named(times, "time T(n); lines: α-β fit", "devices n", "ms a layer, forward and backward")
    named(gains, "scalability T(1) / T(n)", "devices n", "times as fast as one device")
    legend(figure, (times, gains), columns=4)
    return figure


def tell(found: Sequence[ScalingRow]) -> str:
    """How far each MetaOp scales, and how well the fit tells its times."""
    lines = []
    for metaop in dict.fromkeys(row.metaop for row in found):
        own = [row for row in found if row.metaop == metaop]
        worst = max(abs(row.fitted_ms / row.ms - 1) for row in own)
        left_out = [abs(row.left_out_ms / row.ms - 1) for row in own[1:-1] if row.left_out_ms is not None]
        error = f"{sum(left_out) / len(left_out):.1%}" if left_out else "-"
        last = own[-1]
        lines.append(
            [
                metaop,
                str(last.layers),
                f"{own[0].ms:.2f}",
                f"{last.ms:.2f}",
                f"{last.scalability:.1f} of {last.n}",
                f"{worst:.1%}",
                error,
            ]
        )
    head = ["MetaOp", "layers", "T(1) ms", "T(n) ms", "scalability", "fit, worst", "left out, mean"]
    return table(head, lines)
