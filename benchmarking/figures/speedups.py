"""Speedups over DeepSpeed by workload, tasks, devices and system: bars (paper, figure 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarking.figures.style import SYSTEMS, legend, named, panels, systems_of, workload_title
from benchmarking.report_simulated import speedup
from benchmarking.rows import SimulatedRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Reported = Mapping[tuple[str, int, int, str], float]
"""Speedups that others report, by workload, tasks, devices and system."""

_GROUP = 0.84
"""Width of a group of bars, of 1."""
_NOTE: dict[str, Any] = {"fontsize": 7, "rotation": 90, "ha": "center", "va": "bottom"}


def speedup_figure(rows: Sequence[SimulatedRow], reported: Reported | None = None) -> Figure:
    """A panel for each workload and number of tasks, a group of bars for each number of devices.

    ``reported`` values are drawn as diamonds over the bars of their systems. Where a system refused a
    cell, or DeepSpeed did, the bar's place says so.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("there are no rows to draw")
    cases = list(dict.fromkeys((row.workload, row.tasks, row.cluster) for row in rows))
    clusters = sorted({row.cluster for row in rows})
    columns = 2 if len(cases) in (2, 4) else min(3, len(cases))
    title = f"Speedup over DeepSpeed, simulated on devices of {', '.join(clusters)} (higher is better)"
    figure, axes = panels(-(-len(cases) // columns), columns, title, width=max(4.8, 7.5 / columns))
    systems = tuple(s for s in systems_of(row.name for row in rows) if s != "deepspeed")
    for each, (workload, tasks, cluster) in zip(axes, cases, strict=False):
        own = [r for r in rows if (r.workload, r.tasks, r.cluster) == (workload, tasks, cluster)]
        _panel(each, own, systems, reported or {})
        title = workload_title(workload, tasks) + (f", {cluster}" if len(clusters) > 1 else "")
        named(each, title, "devices", "speedup over DeepSpeed")
    for each in axes[len(cases) :]:
        each.set_visible(False)
    top = max(each.get_ylim()[1] for each in axes[: len(cases)])
    for each in axes:
        each.set_ylim(0.0, top * 1.08)
    legend(figure, axes[: len(cases)])
    return figure


def _panel(axes: Axes, rows: Sequence[SimulatedRow], systems: Sequence[str], reported: Reported) -> None:
    devices = sorted({row.devices for row in rows})
    width = _GROUP / max(1, len(systems))
    found = {(row.name, row.devices): row for row in rows}
    for k, system in enumerate(systems):
        look = SYSTEMS[system]
        at = [g + (k - (len(systems) - 1) / 2) * width for g in range(len(devices))]
        present = [found.get((system, n)) for n in devices]
        values = [None if row is None else speedup(row, rows) for row in present]
        axes.bar(at, [v or 0.0 for v in values], width * 0.92, color=look.colour, label=look.label)
        for x, row, value in zip(at, present, values, strict=True):
            if value is not None:
                axes.text(x, 0.03, f"{value:.2f}", color=look.on, **_NOTE)
            elif row is not None:
                axes.text(x, 0.03, "refused" if row.error else "no base", color="#AA0000", **_NOTE)
        told = [reported.get((rows[0].workload, rows[0].tasks, n, system)) for n in devices]
        points = [(x, value) for x, value in zip(at, told, strict=True) if value is not None]
        if points:
            axes.scatter(*zip(*points, strict=True), s=16, marker="D", facecolor="white", edgecolor="black",
                         linewidth=0.8, zorder=3, label="reported by the paper")  # fmt: skip
    axes.axhline(1.0, color=SYSTEMS["deepspeed"].colour, linestyle="--", linewidth=1.0, label="DeepSpeed = 1")
    axes.set_xticks(range(len(devices)), [str(n) for n in devices])
