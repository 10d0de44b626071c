"""Branches that a step takes by sizes: taken as on the example, and held against batches of other sizes.

A trace follows one side of ``if x.shape[1] > limit``. Each such condition is a node (``patches.expect``)
that raises where another batch would have gone the other way. Before it comes to that, the condition is
tried on variants of the example; where one takes the other side, and the user's step accepts it, the module
that branches is not traced through.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import TreeSpec

from lightning_spindle.capture import patches, untouched
from lightning_spindle.capture.errors import TraceError
from lightning_spindle.capture.evaluate import (
    filled,
    kept_generators,
    plain_state,
    run_node,
    with_tensors,
)
from lightning_spindle.capture.layout import pick_rows
from lightning_spindle.capture.pieces import BatchLayout
from lightning_spindle.capture.sizes import ancestors, read_from_batch
from lightning_spindle.capture.step import Step, StepTrace

Place = tuple[int, int]  # a leaf and one of its dimensions
Rows = Mapping[str, tuple[list[int], BatchLayout]]
"""For each task the indices of its leaves among all, and where they hold their rows."""


def settled(
    step: Step,
    leaves: Sequence[Any],
    spec: TreeSpec,
    rows: Rows,
    trace_without: Callable[[Mapping[str, str]], StepTrace],
) -> StepTrace:
    """The trace, without modules that branch on sizes as other batches would not.

    Sizes are read from the batch in it where the batch is of one task.

    Args:
        step: what is traced.
        leaves: an example batch.
        spec: its tree.
        rows: where each task's part of it holds its rows.
        trace_without: traces the step with some modules closed, each with the reason.

    Raises:
        TraceError: the step itself branches so.
    """
    own = next(path for path, m in step.model.named_modules() if m is step.module)
    closed: dict[str, str] = {}

    def trace_now() -> StepTrace:
        trace = trace_without(closed)
        own_leaves, layout = next(iter(rows.values()))
        if len(own_leaves) == len(leaves):
            read_from_batch(trace, leaves, layout)
        return trace

    while True:
        trace = trace_now()
        checks = _varying(trace.graph)
        turned = _turned_by_variants(step, trace, list(leaves), spec, rows, checks)
        if not turned:
            _forget_flags(step, trace, trace_now)
            return trace
        found = {c.meta["module"]: f"it branches on sizes ({c.meta['line']})" for c in turned}
        for path in {"", own} & found.keys():
            raise TraceError(found[path])
        closed |= found


def _turned_by_variants(
    step: Step,
    trace: StepTrace,
    leaves: list[Any],
    spec: TreeSpec,
    rows: Rows,
    checks: list[fx.Node],
) -> list[fx.Node]:
    """Checks that a legal variant of the batch fails."""
    found: list[fx.Node] = []
    checks = [c for c in checks if _depends_on_batch(c)]
    for together, *alone in _variants(leaves, rows) if checks else ():
        turned = _turned(trace, together, checks)
        if not turned or _is_legal(step, together, spec):
            found += turned
            continue
        for given in alone:  # the user's step refuses it too: one dimension by itself, then
            turned = _turned(trace, given, checks)
            found += turned if turned and _is_legal(step, given, spec) else []
    return found


def _depends_on_batch(check: fx.Node) -> bool:
    return any(n.op == "placeholder" for n in ancestors(check))


def _checks(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target is patches.expect]


def _varying(graph: fx.Graph) -> list[fx.Node]:
    """The checks that not all batches pass alike, each once; others are taken out of the trace."""
    seen: set[int] = set()
    numbers = _numbered(graph, {})
    for check in _checks(graph):
        varies = any(n.op == "placeholder" or n.target is patches.is_training for n in ancestors(check))
        if not varies or numbers[check] in seen:
            graph.erase_node(check)
        seen.add(numbers[check])
    return _checks(graph)


def _numbered(graph: fx.Graph, table: dict[str, int]) -> dict[fx.Node, int]:
    """A number for each node, the same for nodes that compute the same."""
    numbers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        arguments = node.args[:2] if node.target is patches.expect else (node.args, node.kwargs)
        words = fx.node.map_arg(arguments, lambda n: f"%{numbers[n]}")
        numbers[node] = table.setdefault(f"{node.op} {node.target} {words}", len(table))
    return numbers


def _forget_flags(step: Step, trace: StepTrace, trace_again: Callable[[], StepTrace]) -> None:
    """Take out checks of train flags that decide nothing, as in ``self.training and self.layerdrop > 0``."""
    for check in _checks(trace.graph):
        flags = {n.args[0].target for n in ancestors(check) if n.target is patches.is_training}
        for module in [step.model.get_submodule(str(path)) for path in flags]:
            own = module.training
            try:
                vars(module)["training"] = not own
                other = trace_again()
            except Exception:
                break
            finally:
                vars(module)["training"] = own
            if not _same_effects(trace, other):
                break
        else:
            if flags and not _depends_on_batch(check):
                trace.graph.erase_node(check)


def _same_effects(trace: StepTrace, other: StepTrace) -> bool:
    """Whether two traces give the same results and call the same modules."""
    table: dict[str, int] = {}
    found = []
    for one in (trace, other):
        numbers = _numbered(one.graph, table)
        effects = [
            n
            for n in one.graph.nodes
            if n.op == "call_module" or n.target in (patches.update_metric, patches.given)
        ]
        found.append([numbers[n] for n in [*effects, *one.results.values()]])
    return found[0] == found[1]


# ------------------------------------------------------------------------------------------ variants
def _variants(leaves: list[Any], rows: Rows) -> Iterator[list[list[Any]]]:
    """Batches of other rows and sizes.

    A list's first has the rows of all tasks, or all dimensions of one size, changed together; the
    rest one each.
    """
    for change in (_halves, _last, _fewer, _one, _twice):
        together = leaves
        for task in rows:
            together = _picked(together, rows, task, change)
        yield [together, *([_picked(leaves, rows, task, change) for task in rows] if len(rows) > 1 else [])]
    few = leaves
    for task in rows:
        few = _picked(few, rows, task, lambda count: range(min(count, 4)))
    for size, places in _places(few, rows).items():
        for other in {size - 1, 1, 2 * size} - {size, 0}:
            alone = [_resized(few, [place], other) for place in places] if len(places) > 1 else []
            yield [_resized(few, places, other), *alone]


def _halves(count: int) -> list[int]:
    return [row // 2 for row in range(count)]


def _last(count: int) -> list[int]:
    return [count - 1] * count


def _fewer(count: int) -> list[int]:
    return list(range(max(count - 1, 1)))


def _one(count: int) -> list[int]:
    return [0]


def _twice(count: int) -> list[int]:
    return [row % count for row in range(2 * count)]


def _picked(leaves: list[Any], rows: Rows, task: str, change: Callable[[int], Sequence[int]]) -> list[Any]:
    """The leaves with other rows of one task."""
    at, layout = rows[task]
    own = [leaves[i] for i in at]
    made = list(leaves)
    for i, leaf in zip(at, pick_rows(own, layout, change(layout.rows(own))), strict=True):
        made[i] = leaf
    return made


def _places(leaves: list[Any], rows: Rows) -> dict[int, list[Place]]:
    """Dimensions without rows, by their size: those of one size may be one length of the user's."""
    places: dict[int, list[Place]] = {}
    for at, layout in rows.values():
        for i, of in zip(at, layout.leaves, strict=True):
            if isinstance(leaves[i], torch.Tensor):
                for dim in range(leaves[i].dim()):
                    if dim != of.dim:
                        places.setdefault(leaves[i].shape[dim], []).append((i, dim))
    return places


def _resized(leaves: list[Any], places: list[Place], size: int) -> list[Any]:
    made = list(leaves)
    for i, dim in places:
        longer = torch.cat([made[i], made[i]], dim)
        made[i] = longer.narrow(dim, 0, size)
    return made


# ------------------------------------------------------------------------------------------ trying
def _turned(trace: StepTrace, leaves: list[Any], checks: list[fx.Node]) -> list[fx.Node]:
    """Checks that fail on these leaves; one whose condition cannot be computed on them does not count."""
    state = plain_state(trace.holder, requires_grad=False)
    with kept_generators(0), torch.no_grad():
        return with_tensors(trace.holder, state, partial(_failing, trace, leaves, checks))


def _failing(trace: StepTrace, leaves: list[Any], checks: list[fx.Node]) -> list[fx.Node]:
    wanted = set().union(*(ancestors(check) for check in checks))
    values: dict[fx.Node, Any] = dict(zip(trace.leaves, leaves, strict=True))
    values[trace.batch_idx] = 0
    for node in trace.graph.nodes:
        if node in wanted and node not in values and all(n in values for n in node.all_input_nodes):
            try:
                values[node] = run_node(trace.holder, node, *filled(node, values.__getitem__))
            except Exception:
                continue  # this layer does not take such sizes
    known = [c for c in checks if all(n in values for n in c.all_input_nodes)]
    return [c for c in known if bool(filled(c, values.__getitem__)[0][0]) != c.args[1]]


def _is_legal(step: Step, leaves: list[Any], spec: TreeSpec) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            untouched.run_step(step, leaves, spec, 0)
    except Exception:
        return False
    return True
