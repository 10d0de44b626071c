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
from benchmarking.figures.suite import Suite
from benchmarking.measured import REPORT
from benchmarking.results import append

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


@dataclass(frozen=True, slots=True)
class Made:
    """A figure's text, or why there is none."""

    name: str
    text: str
    error: str = ""

    def __str__(self) -> str:
        heading = f"## {self.name}"
        if self.error:
            return f"{heading}\n\nFAILED: {self.error}"
        return f"{heading}\n\n![{self.name}]({self.name}.png)\n\n{self.text}"


def make_figures(config: Mapping[str, Any], directory: Path, say: Callable[[str], None]) -> bool:
    """Write every figure of ``config["figures"]``; one that fails is told of, and the others are made.

    ``report.md`` in the directory has their texts. Returns whether all were made.

    Raises:
        ValueError: there is no figure of a name, or a workload or planner was asked for.
    """
    names: Sequence[str] = config["figures"]
    unknown = [name for name in names if name not in FIGURES]
    if unknown or not names:
        raise ValueError(f"there is no figure {', '.join(unknown)}; there are {', '.join(FIGURES)}")
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
        outcome = f"FAILED: {found[-1].error}" if found[-1].error else str(directory / f"{name}.png")
        say(f"[{len(found)}/{len(names)}] {name}: {outcome} ({left_s:.0f} s left)")
    kind, island = config["cluster"]["kind"], config["cluster"]["island_size"]
    head = f"Simulated {date.today().isoformat()} on a cost model: {kind}, nodes of {island}"
    (directory / REPORT).write_text("\n\n".join([head, *map(str, found)]) + "\n")
    return not any(made.error for made in found)


def make(name: str, suite: Suite, directory: Path) -> Made:
    """Write ``<name>.csv`` and ``<name>.png``."""
    module = FIGURES[name]
    try:
        rows = module.rows(suite)
    except ValueError as refusal:
        return Made(name, "", str(refusal))
    table = directory / f"{name}.csv"
    table.unlink(missing_ok=True)
    for row in rows:
        append(table, row)
    save(module.draw(rows), directory / f"{name}.png")
    return Made(name, module.tell(rows))
