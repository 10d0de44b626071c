"""One look for all figures: what systems are called, their colours, how a picture is made and written.

Needs the extra ``plots`` (matplotlib, imported when a picture is made).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Look:
    """How a system is shown everywhere."""

    label: str
    colour: str
    line: str = "-"
    on: str = "black"
    """The colour of text on its bars."""


# Okabe and Ito's palette: told apart with every kind of colour vision.
SYSTEMS = {
    "deepspeed": Look("DeepSpeed", "#666666", "--", "white"),
    "megatron": Look("Megatron-LM", "#BBBBBB", "--"),
    "seq": Look("Spindle-Seq", "#F0E442"),
    "uniform": Look("Spindle-Uniform", "#CC79A7"),
    "stmm": Look("Spindle-STMM", "#009E73"),
    "optimus": Look("Spindle-Optimus", "#E69F00"),
    "spindle": Look("Spindle (the paper's planner)", "#56B4E9"),
    "search": Look("Spindle, planner search", "#0072B2", on="white"),
    "auto": Look("Spindle, planner auto", "#D55E00"),
}
"""By planner, or by name where a system has no planner; in the order in which they are shown."""

WORKLOADS = {"multitask_clip": "Multitask-CLIP", "ofasys": "OFASys", "qwen_val": "QWen-VAL"}
LINES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#666666", "#F0E442")
"""For lines that are no systems."""
MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*")


def systems_of(names: Iterable[str]) -> tuple[str, ...]:
    """Each once, in the order in which they are shown."""
    present = set(names)
    return tuple(name for name in SYSTEMS if name in present)


def workload_title(workload: str, tasks: int) -> str:
    """Such as "OFASys, 4 tasks"; the workload's name may tell its size too."""
    name, _, size = workload.partition(" ")
    title = f"{WORKLOADS.get(name, name)}{f' {size}' if size else ''}"
    return f"{title}, {tasks} task{'s' * (tasks != 1)}"


def panels(
    rows: int, columns: int, title: str, *, width: float = 4.6, height: float = 3.3
) -> tuple[Figure, list[Axes]]:
    """A figure with its panels, row by row; ``width`` and ``height`` of each in inches.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = _figures().Figure(figsize=(width * columns, height * rows + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8)
        each.grid(axis="y", color="#E5E5E5", linewidth=0.6)
        each.set_axisbelow(True)
    return figure, axes


def named(axes: Axes, title: str, x: str, y: str) -> None:
    """Title and axes, with their units."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)


def devices_axis(axes: Axes, devices: Sequence[int]) -> None:
    """Numbers of devices on a logarithmic axis, each a tick."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(devices, [str(n) for n in devices])
    axes.minorticks_off()


def legend(figure: Figure, axes: Iterable[Axes], columns: int = 5) -> None:
    """One legend below all panels, each label once."""
    handles: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(len(handles), columns),
        frameon=False,
        fontsize=9,
    )


def save(figure: Figure, path: Path) -> Path:
    """Write a picture that is the same for equal figures."""
    figure.savefig(path, dpi=90, metadata={"Software": None})
    return path


def _figures() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(
            "drawing figures needs matplotlib: pip install 'lightning_spindle[plots]'"
        ) from e
