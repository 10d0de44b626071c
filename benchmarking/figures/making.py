"""Making figures: each as a table of numbers (CSV), a picture (PNG) and a text (Markdown)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from benchmarking.figures import (
    breakdown,
    dynamic,
    end_to_end,
    memory,
    optimality,
    placement,
    planning,
    scaling,
    single_task,
    utilisation,
)
from benchmarking.figures.style import save
from benchmarking.figures.suite import Refusal, Suite
from benchmarking.measured import REPORT
from benchmarking.results import append
from benchmarking.simulated import reason

FIGURES: Mapping[str, ModuleType] = MappingProxyType(
    {
        "scaling": scaling,
        "end_to_end": end_to_end,
        "utilisation": utilisation,
        "breakdown": breakdown,
        "optimality": optimality,
        "planning": planning,
        "placement": placement,
        "dynamic": dynamic,
        "single_task": single_task,
        "memory": memory,
    }
)
"""Each has ``rows(suite)``, a list of frozen dataclasses, and of these ``draw(rows)`` and ``tell(rows)``."""

KINDS = {
    "simulated": "Simulated on the cluster's cost model.",
    "measured": "Measured: wall clock of this machine.",
}
"""What a report says of rows, by their ``mode``."""


@dataclass(frozen=True, slots=True)
class Made:
    """A figure's text, or why there is none; either way the systems that could not run its cells."""

    name: str
    text: str = ""
    error: str = ""
    refusals: Sequence[Refusal] = ()

    def __str__(self) -> str:
        shown = f"FAILED: {self.error}" if self.error else f"![{self.name}]({self.name}.png)\n\n{self.text}"
        refused = "\n".join(["Refused:", "", *(f"* {refusal}" for refusal in self.refusals)])
        return "\n\n".join([f"## {self.name}", shown, *([refused] if self.refusals else [])])

    def line(self, directory: Path) -> str:
        """What became of it; a figure that failed also says who was refused."""
        if self.error:
            return "\n  ".join([f"{self.name}: FAILED: {self.error}", *map(str, self.refusals)])
        refused = f", without {len(self.refusals)} refused (see {REPORT})" if self.refusals else ""
        return f"{self.name}: {directory / self.name}.png{refused}"


def make_figures(config: Mapping[str, Any], directory: Path, say: Callable[[str], None]) -> bool:
    """Write every figure of ``config["figures"]``, names or one name; any that fails leaves the others be.

    ``report.md`` in the directory has their texts. Returns whether all were made.

    Raises:
        ValueError: there is no figure of a name, or a workload or planner was asked for.
    """
    names = names_of(config["figures"])
    if config["workload"]["name"] in config["workloads"] or config["planner"]["name"] != "auto":
        raise ValueError(
            "mode=figures takes workloads and planners from its cases: leave workload and planner out"
        )
    directory.mkdir(parents=True, exist_ok=True)
    suite, started_s = Suite(config), time.monotonic()
    found: list[Made] = []
    for name in names:
        found.append(make(name, suite, directory))
        left_s = (time.monotonic() - started_s) / len(found) * (len(names) - len(found))
        say(f"[{len(found)}/{len(names)}, {left_s:.0f} s left] {found[-1].line(directory)}")
    cluster = config["cluster"]
    nodes = "one node" if cluster["island_size"] is None else f"nodes of {cluster['island_size']}"
    head = f"Figures of {date.today().isoformat()}, cluster {cluster['name']}, {nodes}"
    (directory / REPORT).write_text("\n\n".join([head, *map(str, found)]) + "\n")
    return not any(made.error for made in found)


def names_of(given: object) -> Sequence[str]:
    """The figures that were asked for.

    Raises:
        ValueError: there are none, or one of them there is not.
    """
    names: list[Any] = given if isinstance(given, list) else [given]
    known = f"there are {', '.join(FIGURES)}"
    if not names:
        raise ValueError(f"figures=[] asks for no figure; {known}")
    unknown = [str(name) for name in names if str(name) not in FIGURES]
    if unknown:
        raise ValueError(f"there is no figure {', '.join(unknown)}; {known}")
    return names


def make(name: str, suite: Suite, directory: Path) -> Made:
    """Write ``<name>.csv`` and ``<name>.png``; what goes wrong is told of, and leaves no older ones."""
    own = suite.of_one_figure()
    try:
        text = _make(FIGURES[name], own, directory / f"{name}.csv", directory / f"{name}.png")
    except Exception as failure:
        return Made(name, error=reason(failure), refusals=own.refusals)
    return Made(name, text, refusals=own.refusals)


def _make(module: ModuleType, suite: Suite, csv: Path, picture: Path) -> str:
    for path in (csv, picture):
        path.unlink(missing_ok=True)
    rows = module.rows(suite)
    if all(getattr(row, "error", "") for row in rows):  # some figures have rows of refused systems too
        raise ValueError("every system was refused" if suite.refusals else "there are no rows to show")
    for row in rows:
        append(csv, row)
    save(module.draw(rows), picture)
    kinds = [KINDS[mode] for mode in dict.fromkeys(row.mode for row in rows)]
    return "\n\n".join([*kinds, module.tell(rows)])
