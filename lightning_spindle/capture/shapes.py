"""``capture_shapes``: the operators of a model of which no tensor exists.

Legend: a *twin* is a model with the same layers and the same steps, as narrow as can be, on real tensors.
What a node does to rows is found on the twin, by number; how large it is on the model, by shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_spindle.capture.apart import Infos, mode, take_apart, traced, verify
from lightning_spindle.capture.api import LOCK, graph_of
from lightning_spindle.capture.assemble import Parts
from lightning_spindle.capture.branches import settled
from lightning_spindle.capture.classify import Info
from lightning_spindle.capture.errors import reason_of
from lightning_spindle.capture.inplace import protect_known
from lightning_spindle.capture.kinds import Kind
from lightning_spindle.capture.layout import batch_layout
from lightning_spindle.capture.pieces import BatchLayout
from lightning_spindle.capture.step import Step, StepTrace
from lightning_spindle.capture.tracer import trace_step
from lightning_spindle.capture.trees import flatten
from lightning_spindle.graph import OperatorGraph


def capture_shapes(
    make: Callable[[], tuple[nn.Module, Mapping[str, Any]]],
    twin: nn.Module,
    twin_batches: Mapping[str, Any],
    *,
    operators: tuple[type[nn.Module], ...] = (),
) -> OperatorGraph:
    """The operators of the tasks' training steps; shapes, bytes and FLOPs of a model that is not computed.

    Guaranteed: the operators are those of ``capture`` on the twin, whose trace has the same nodes as the
    model's own; their sizes are the model's. Neither memory nor time depends on the widths.

    Args:
        make: gives a ``MultiTaskModule`` and a batch for each task. It is called where tensors have shapes
            and no values; all tensors of a batch hold the rows in the leading dimension.
        twin: a ``MultiTaskModule`` with the same tasks, modules and steps, on real tensors.
        twin_batches: for the twin, of any rows and sizes.
        operators: classes whose instances are operators, beside repeated layers.

    Raises:
        ValueError: the twin's step cannot be traced, or the model's step is another; names the task and the
            first node that differs.
    """
    name = "training_step"
    with LOCK, mode(twin, name), torch.inference_mode(False), torch.enable_grad():
        known = {
            task: _known(Step(_Alone(task, module), module, task, name, operators), twin_batches[task])
            for task, module in twin.tasks.items()
        }
    with LOCK, _shapes_only(), torch.inference_mode(False), torch.enable_grad():
        model, batches = make()
        if list(model.tasks) != list(known):
            raise ValueError(f"the model's tasks are {list(model.tasks)}, the twin's {list(known)}")
        layouts = {task: batch_layout(batches[task]) for task in known}
        names = _first_names(model)
        parts = {}
        for task, module in model.tasks.items():
            step = Step(_Alone(task, module), module, task, name, operators)
            parts[task] = _renamed(_parts(step, batches[task], layouts[task], known[task]), names)
        return graph_of(model, layouts, batches, parts)


@contextmanager
def _shapes_only() -> Iterator[None]:
    """Inside, tensors have no values. Sizes are tried that layers refuse; torch would log each refusal."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode():
            yield
    finally:
        log.disabled = before


class _Alone(nn.Module):
    """One task of a model, under its names there: work on a step is no longer for tasks that it is not of."""

    def __init__(self, task: str, module: nn.Module) -> None:
        super().__init__()
        self.tasks = nn.ModuleDict({task: module})


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer → its first one, by which all tasks know it."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _renamed(parts: Parts, names: Mapping[str, str]) -> Parts:
    operators = [replace(o, parameters=tuple(names[n] for n in o.parameters)) for o in parts.operators]
    written, read = (
        {o: {names[n] for n in own} for o, own in buffers.items()} for buffers in (parts.written, parts.read)
    )
    return replace(parts, operators=operators, written=written, read=read)


@dataclass(frozen=True)
class _Known:
    """A twin's step, traced, and what its nodes do to rows."""

    trace: StepTrace
    infos: Infos


def _known(step: Step, batch: Any) -> _Known:
    layout = batch_layout(batch)
    leaves, spec = flatten(batch, layout.lists)
    try:
        trace = traced(step, leaves, spec, {step.task: (list(range(len(leaves))), layout)})
        apart = take_apart(step, trace, leaves, layout, partial(verify, step, leaves, spec))
    except Exception as error:
        raise ValueError(
            f"task {step.task!r}: the twin's step cannot be traced: {reason_of(error)}"
        ) from error
    return _Known(trace, apart.infos)


def _parts(step: Step, batch: Any, layout: BatchLayout, known: _Known) -> Parts:
    leaves, spec = flatten(batch, layout.lists)
    rows = {step.task: (list(range(len(leaves))), layout)}
    # The twin's trace was held against others; this one is held against the twin's.
    trace = settled(
        step,
        leaves,
        spec,
        rows,
        lambda closed: trace_step(step, leaves, spec, {**known.trace.opaque, **closed}),
    )
    protect_known(trace.graph, lambda node: trace.holder.get_submodule(str(node.target)))
    return take_apart(step, trace, leaves, layout, kinds=partial(_as_twin, known)).parts


def _as_twin(known: _Known, trace: StepTrace, leaves: Sequence[Any], layout: BatchLayout) -> Infos:
    """The kinds that the twin's nodes have, for the same nodes of ``trace``.

    Raises:
        ValueError: the nodes are not the same.
    """
    rows = layout.rows(list(leaves))
    ours, theirs = _described(trace), _described(known.trace)
    infos: Infos = {}
    for (node, text), (twin, other) in zip_longest(ours, theirs, fillvalue=(None, "nothing")):
        if text != other:
            raise ValueError(
                f"task {trace.task!r}: the model's step does {text} where the twin's does {other}: a twin "
                "has the same layers, modules and branches; only widths and lengths may be others"
            )
        assert node is not None
        assert twin is not None
        if node.op != "output":
            infos[node] = _scaled(known.infos[twin], node.meta.get("shape"), rows)
    return infos


def _scaled(info: Info, shape: tuple[int, ...] | None, rows: int) -> Info:
    """What is known of a node whose value has another shape: more entries may belong to a row."""
    kinds = info.kinds
    if shape is not None:
        kinds = [_of_shape(kind, shape, rows) for kind in kinds]
    return replace(info, kinds=kinds)


def _of_shape(kind: Kind, shape: tuple[int, ...], rows: int) -> Kind:
    if kind.dim is None:
        return kind
    assert shape[kind.dim] % rows == 0, f"{shape[kind.dim]} entries of {rows} rows"
    return replace(kind, per_row=shape[kind.dim] // rows)


def _described(trace: StepTrace) -> list[tuple[fx.Node, str]]:
    """Each node in words that are the same in a trace of other widths: numbers are left out."""
    names: dict[fx.Node, str] = {}
    for place, node in enumerate(trace.graph.nodes):
        names[node] = f"%{place}"
    return [(node, _in_words(trace, node, names)) for node in trace.graph.nodes]


def _in_words(trace: StepTrace, node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    target = getattr(node.target, "__name__", str(node.target))
    if node.op == "call_module":
        target += f" ({type(trace.holder.get_submodule(str(node.target))).__name__})"
    arguments = fx.node.map_aggregate((node.args, node.kwargs), partial(_argument, names))
    return f"{node.op} {target} {arguments}"


def _argument(names: Mapping[fx.Node, str], value: Any) -> Any:
    if isinstance(value, fx.Node):
        return names[value]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "number" if is_number else value
