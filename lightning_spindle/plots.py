"""Pictures of timelines. Needs the extra ``plots`` (matplotlib, imported when a picture is drawn)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_spindle.timeline import Category, Event, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with every kind of colour vision.
COLOURS = {
    Category.FORWARD: "#56B4E9",
    Category.BACKWARD: "#E69F00",
    Category.OPTIMIZER: "#F0E442",
    Category.DATA: "#999999",
    Category.TRANSFER: "#009E73",
    Category.SYNC: "#CC3377",
    Category.WAIT: "#E8E8E8",
}
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "oooo", "||||", "++++", "**")
"""Tasks in their order; an eleventh task starts anew."""

_BAR, _STRIP = 0.52, 0.2
"""Heights of a device's computing bar and of the strip for communication below it."""
_LABEL_SHARE = 0.018
"""Events of at least this share of the axis carry their instruction."""


def timeline_figure(predicted: Timeline | None, measured: Timeline | None, path: str | Path) -> Path:
    """Draws predicted and measured side by side on one scale, and writes the picture.

    A row a device: computing and waiting in the bar, messages and collectives in the strip
    below it, coloured by category, hatched by task; milliseconds from the iteration's start.
    Either timeline may be None, and its panel is left out. The ending of ``path`` decides
    the format (.png, .svg, .pdf).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: there is no timeline.
    """
    shown = [t.from_zero() for t in (predicted, measured) if t is not None]
    if not shown:
        raise ValueError("there is no timeline to draw")
    devices = max(t.devices for t in shown)
    tasks = tuple(dict.fromkeys(task for t in shown for task in t.tasks))
    size = (12.0 if len(shown) == 1 else 17.2, min(1.9 + 0.62 * devices, 18.0))
    figure = _matplotlib("figure").Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    span_ms = max(t.span_s for t in shown) * 1e3 or 1.0
    for axes, timeline in zip(panels, shown, strict=True):
        _panel(axes, timeline, tasks, span_ms, labelled=devices <= 16)
        axes.set_title(_title(timeline, shown[0]), fontsize=12)
    panels[0].set_ylim(devices - 0.5, -0.5)
    panels[0].set_yticks(*_ticks(devices))
    _legend(figure, shown, tasks)
    path = Path(path)
    figure.savefig(path, dpi=130)
    return path


def _matplotlib(module: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(
            "drawing timelines needs matplotlib: pip install 'lightning_spindle[plots]'"
        ) from e


def _panel(axes: Axes, timeline: Timeline, tasks: Sequence[str], span_ms: float, *, labelled: bool) -> None:
    groups: dict[tuple[int, Category, str], list[Event]] = {}
    for e in timeline.events:
        groups.setdefault((e.rank, e.category, e.task), []).append(e)
    # Waiting first: whatever overlaps is drawn over it.
    for (rank, category, task), events in sorted(groups.items(), key=lambda g: g[0][1] is not Category.WAIT):
        bottom, height = _lane(rank, category)
        computes = category.computes
        axes.broken_barh(
            [(e.start_s * 1e3, e.duration_s * 1e3) for e in events],
            (bottom, height),
            facecolors=COLOURS[category],
            edgecolors="#333333" if computes else COLOURS[category],
            linewidth=0.4,
            hatch=HATCHES[tasks.index(task) % len(HATCHES)] if task and computes else None,
            **_hatch_style(),
        )
    if labelled:
        for e in timeline.events:
            _label(axes, e, span_ms)
    for rank in range(timeline.devices - 1):
        axes.axhline(rank + 0.5, color="#DDDDDD", linewidth=0.6, zorder=0)
    axes.axvline(timeline.span_s * 1e3, color="#333333", linewidth=1.0, linestyle=":")
    axes.set_xlim(0.0, span_ms * 1.01)
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)


def _hatch_style() -> dict[str, Any]:
    """Thin, half transparent hatches where matplotlib can colour them apart from edges."""
    patches = _matplotlib("collections")
    return {"hatchcolor": "#00000059"} if hasattr(patches.Collection, "set_hatchcolor") else {}


def _lane(rank: int, category: Category) -> tuple[float, float]:
    """Bottom and height of a device's bar, or of the strip below it."""
    if category.communicates:
        return rank - 0.4 + _BAR + 0.06, _STRIP
    return rank - 0.4, _BAR


def _label(axes: Axes, e: Event, span_ms: float) -> None:
    if not e.category.computes or e.duration_s * 1e3 < _LABEL_SHARE * span_ms:
        return
    bottom, height = _lane(e.rank, e.category)
    text = axes.text(
        (e.start_s + e.end_s) / 2 * 1e3,
        bottom + height / 2,
        e.instruction or str(e.category)[:3],
        ha="center",
        va="center",
        fontsize=6.5,
        clip_on=True,
    )
    halo = _matplotlib("patheffects").withStroke(linewidth=2.0, foreground=COLOURS[e.category])
    text.set_path_effects([halo])


def _title(timeline: Timeline, first: Timeline) -> str:
    ms = timeline.span_s * 1e3
    title = f"{timeline.source}: {ms:.2f} ms" if ms < 100 else f"{timeline.source}: {ms:.0f} ms"
    if timeline is not first and first.span_s:
        title += f" ({timeline.span_s / first.span_s - 1:+.0%})"
    return f"{title}, devices busy {timeline.utilisation:.0%}"


def _ticks(devices: int) -> tuple[list[int], list[str]]:
    step = 1 if devices <= 32 else 8
    at = list(range(0, devices, step))
    return at, [f"device {r}" for r in at]


def _legend(figure: Figure, shown: Sequence[Timeline], tasks: Sequence[str]) -> None:
    patch = _matplotlib("patches").Patch
    present = {e.category for t in shown for e in t.events}
    handles = [
        patch(facecolor=COLOURS[c], edgecolor="#333333", linewidth=0.4, label=str(c))
        for c in Category
        if c in present
    ]
    handles += [
        patch(
            facecolor="white", edgecolor="#333333", linewidth=0.4, hatch=HATCHES[k % len(HATCHES)], label=task
        )
        for k, task in enumerate(tasks)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 10), frameon=False)
