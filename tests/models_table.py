"""Writes docs/models.md: what Spindle makes of the models of real libraries.

python -m tests.models_table          the table on the standard output
python -m tests.models_table --write  into docs/models.md
"""

from __future__ import annotations

import datetime
import importlib.metadata
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from lightning_spindle.capture import Capture, CaptureWarning
from lightning_spindle.graph import Layout
from lightning_spindle.planner.contraction import contract
from tests.support.fitting import Fit, captured
from tests.support.library import MODELS, find_libraries
from tests.support.library_fits import both_fits, data_of, model_of

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
_TEXT = """\
# Models of real libraries

Written by `python -m tests.models_table --write` on {date}, on CPU, with
{versions}.

Each model has {layers} repeated layers (CLIP and T5Model that many in each tower), is made from a
configuration, and trains in a task of its own with a linear head. A task whose step is traced by torch.fx is
on the rung *fx*; *fx, n closed* has n modules that run as one operator each, *step* is one operator alone.
*Layers* says how the repeated layers run: over parts of the rows, or on whole batches. *Difference* is the
largest in any parameter, loss and logged value over three steps of AdamW in float64, on 2 processes with
operators spread over both, against one plain process; batches have 6, 5 and 3 rows and, for sequences,
unlike lengths.

| model | rung | operators | MetaOps | layers | difference |
| --- | --- | --- | --- | --- | --- |
{rows}

BatchNorm couples rows: such layers run on whole batches, on one device each, beside those of other tasks.
T5's layers hand on a table of positions that has no rows beside the hidden states; each part of the rows
computes it ([0021](decisions/0021-values-without-rows.md)). A key/value cache handed from layer to layer
(GPT-2 with its default `use_cache=True`) is no tensor: the model is one operator then.

What is traced is the model's own Python, on the first batch. Where it branches on sizes, the branch is
tried on batches of other rows and sizes before training ([0010](decisions/0010-branches-on-sizes.md)), and
checked during it.
"""


def main() -> None:
    """Print the page, or write it."""
    rows = [row(name) for name, of in MODELS.items() if find_libraries(*of.needs)]
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "lightning", "transformers", "timm")
        if find_libraries(name)
    )
    page = _TEXT.format(
        date=datetime.date.today().isoformat(), versions=versions, layers=3, rows="\n".join(rows)
    )
    if "--write" in sys.argv:
        PAGE.write_text(page)
    print(page)


def row(name: str) -> str:
    """The table's row for one model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        capture = captured(model_of(t=name), data_of(t=name))
    closed = len([w for w in caught if w.category is CaptureWarning])
    ours, reference = both_fits(t=name)
    operators, metaops = len(capture.graph.operators), len(contract(capture.graph).metaops)
    cells = (
        name,
        rung(capture, closed),
        operators,
        metaops,
        layers(capture),
        f"{difference(ours, reference):.0e}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def rung(capture: Capture, closed: int) -> str:
    """How far down the ladder the model is."""
    if capture.coarse:
        return "step"
    return f"fx, {closed} closed" if closed else "fx"


def layers(capture: Capture) -> str:
    """How the operators that share a signature run: they are the repeated layers."""
    kinds = {o.layout for o in capture.graph.operators if o.parameters}
    return "parts of the rows" if kinds == {Layout.SPLIT} else "whole batches"


def difference(ours: list[Fit], reference: Fit) -> float:
    """The largest of any parameter after any step, loss and logged value."""
    found = 0.0
    for fit in ours:
        for step, expected in zip(fit.steps, reference.steps, strict=True):
            pairs: list[tuple[Any, Any]] = [(step["loss"], expected["loss"])]
            pairs += [(step["logged"][k], v) for k, v in expected["logged"].items()]
            pairs += [(v, expected["parameters"][k]) for k, v in step["parameters"].items()]
            found = max(
                found, *(float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max()) for a, b in pairs)
            )
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
