"""Groups of nodes written as operators, values and pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from lightning_spindle.capture import patches
from lightning_spindle.capture.attributes import Attributes
from lightning_spindle.capture.classify import Info
from lightning_spindle.capture.errors import TraceError
from lightning_spindle.capture.grouping import Group, Grouping
from lightning_spindle.capture.guards import guard
from lightning_spindle.capture.measure import Measured
from lightning_spindle.capture.pieces import (
    BatchIndex,
    LeafRef,
    Piece,
    Returned,
    RowNumbers,
    Source,
    ValueRef,
)
from lightning_spindle.capture.step import Step, StepTrace
from lightning_spindle.graph import Layout, Operator, Reading, Reduction, Result, Value


@dataclass
class Parts:
    """A task's share of a capture. ``written``, ``read``: operator to the buffers that it writes and reads.

    ``returned`` is None where no hook sees it, and of what could not be taken apart.
    """

    operators: list[Operator] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    pieces: dict[str, Piece] = field(default_factory=dict)
    written: dict[str, set[str]] = field(default_factory=dict)
    read: dict[str, set[str]] = field(default_factory=dict)
    attributes: Attributes = field(default_factory=dict)
    returned: Returned | None = None


class Assembler:
    """Writes one task's groups as operators."""

    def __init__(
        self,
        step: Step,
        trace: StepTrace,
        grouping: Grouping,
        infos: dict[fx.Node, Info],
        measured: dict[fx.Node, Measured],
    ) -> None:
        self.step, self.trace, self.grouping = step, trace, grouping
        self.infos, self.measured = infos, measured
        self.paths = {m: path for path, m in step.module.named_modules()}
        names = {id(p): name for name, p in step.model.named_parameters()}
        self.canonical = {n: names[id(p)] for n, p in step.model.named_parameters(remove_duplicate=False)}
        self.buffers = {n for n, _ in step.model.named_buffers(remove_duplicate=False)}
        self.taken: dict[str, int] = {}

    def parts(self, returned: Returned | None) -> Parts:
        """Operators in an order in which they can run, with their pieces; ``returned`` is put in."""
        parts = Parts(attributes=self.trace.attributes, returned=returned)
        read_by = {g: self.grouping.needed(g) for g in self.grouping.groups}
        outputs: dict[Group, list[fx.Node]] = {g: [] for g in self.grouping.groups}
        wanted = {n for _, read in read_by.values() for n in read} | set(self.trace.results.values())
        for group in self.grouping.groups:
            outputs[group] = [n for n in group.owned if n in wanted]
        for group in self.grouping.groups:
            self._add(parts, group, *read_by[group], outputs[group])
        for key, node in self.trace.results.items():
            layout = self.grouping.owner[node].layout
            dtype = given_dtype(node, self.measured)
            name = None if dtype is None else str(dtype).removeprefix("torch.")
            reduction = self._reduction(node, layout)
            parts.results.append(Result(self.step.task, key, self.value_name(node), reduction, name))
        return parts

    def value_name(self, node: fx.Node) -> str:
        """The name of the value that ``node`` gives to other operators."""
        return f"{self.step.task}/{node.name}"

    def _reduction(self, node: fx.Node, layout: Layout) -> Reduction:
        if layout is not Layout.SPLIT:
            return Reduction.WHOLE
        return Reduction.SUM if self.infos[node].tags == {"sum"} else Reduction.MEAN

    # ------------------------------------------------------------------------------------- one operator
    def _add(
        self, parts: Parts, group: Group, inside: list[fx.Node], read: list[fx.Node], outputs: list[fx.Node]
    ) -> None:
        name = self._name(group)
        given = [n for n in group.owned if n.target is patches.given]
        sources: list[tuple[fx.Node, Source]] = []
        for node in inside:
            if node.op == "placeholder":
                is_index = node is self.trace.batch_idx
                sources.append((node, BatchIndex() if is_index else LeafRef(self.trace.leaves.index(node))))
            elif self.infos[node].counts:
                sources.append((node, RowNumbers()))
        sources += [(node, ValueRef(self.value_name(node))) for node in read]
        parameters = self._parameters(inside)
        saved: dict[int, int] = {}
        for node in inside:
            saved |= self.measured[node].saved
        parts.operators.append(
            Operator(
                name=name,
                task=self.step.task,
                signature=self._signature(group, inside, [n for n, _ in sources]),
                layout=group.layout,
                inputs=tuple(self.value_name(n) for n in read),
                outputs=tuple(self.value_name(n) for n in outputs),
                parameters=parameters,
                forward_flops=float(sum(self.measured[n].flops for n in inside)),
                activation_bytes=sum(saved.values()),
            )
        )
        parts.values += [self._value(n, group) for n in outputs]
        parts.pieces[name] = Piece(
            name,
            tuple(source for _, source in sources),
            tuple(self.value_name(n) for n in outputs),
            Builder(
                self.trace, inside, [n for n, _ in sources], given or outputs, group.layout is Layout.SPLIT
            ),
            bool(given),
        )
        parts.written[name] = {b for n in inside for b in self.infos[n].writes}
        parts.read[name] = self._read_buffers(inside)

    def _name(self, group: Group) -> str:
        if group.role == "tail":
            path = "loss" if group is self.grouping.tail else "logs"
        else:
            modules = [self.grouping.module(n) for n in group.owned if n.op == "call_module"]
            metrics = [n.args[0].target for n in group.owned if n.target is patches.update_metric]
            modules += [self.trace.holder.get_submodule(str(m)) for m in metrics]
            owning = [m for m in modules if any(True for _ in m.parameters())] or modules
            path = self.paths.get(owning[0], group.owned[0].name) if owning else group.owned[0].name
        name = f"{self.step.task}/{path}"
        self.taken[name] = self.taken.get(name, 0) + 1
        return name if self.taken[name] == 1 else f"{name}@{self.taken[name]}"

    def _value(self, node: fx.Node, group: Group) -> Value:
        measured, info = self.measured[node], self.infos[node]
        if measured.shape is None or len(info.kinds) != 1:
            raise TraceError(f"the value of {node.name}, no tensor, is used by several operators")
        kind = info.kinds[0]
        if info.reading is Reading.GATHERED:
            kind = self.infos[node.all_input_nodes[0]].kinds[0]  # as its producer has it
        return Value(
            self.value_name(node),
            kind.dim if kind.tag == "rows" else None,
            kind.per_row,
            measured.bytes,
            measured.differentiable,
            info.dynamic,
            measured.shape,
            info.reading,
        )

    def _parameters(self, inside: list[fx.Node]) -> tuple[str, ...]:
        names: list[str] = []
        for node in inside:
            if node.op == "call_module":
                names += [f"{node.target}.{n}" for n, _ in self.grouping.module(node).named_parameters()]
            elif node.op == "get_attr" and node.target in self.canonical:
                names.append(str(node.target))
        return tuple(dict.fromkeys(self.canonical[n] for n in names))

    def _read_buffers(self, inside: list[fx.Node]) -> set[str]:
        names = {str(n.target) for n in inside if n.op == "get_attr" and n.target in self.buffers}
        for node in inside:
            if node.op == "call_module" and not self.grouping.is_metric(node):
                names |= {f"{node.target}.{n}" for n, _ in self.grouping.module(node).named_buffers()}
        return names

    # ------------------------------------------------------------------------------------- signatures
    def _signature(self, group: Group, inside: list[fx.Node], sources: list[fx.Node]) -> str:
        place = {node: i for i, node in enumerate(inside)} | {n: -1 - i for i, n in enumerate(sources)}
        words = [str(group.layout)]
        kinds = []
        for node in sources:
            measured = self.measured[node]
            words.append(f"in {measured.shape} {measured.dtype}")
        for node in inside:
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{place[n]}")
            module = self.grouping.module(node)
            if module is not None:
                kinds.append(type(module).__name__)
                words.append(f"module {_configuration(module)} {arguments}")
            elif node.op == "get_attr":
                words.append(f"attribute {self.measured[node].shape}")
            elif node.op != "placeholder":
                words.append(f"{getattr(node.target, '__name__', node.target)} {arguments}")
        digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]
        return f"{'+'.join(kinds) or group.role}:{digest}"


def given_dtype(result: fx.Node, measured: Mapping[fx.Node, Measured]) -> torch.dtype | None:
    """Of what ``patches.as_scalar`` was given; None for a number."""
    given = result.args[0]
    return measured[given].dtype if isinstance(given, fx.Node) else None


def _configuration(module: nn.Module) -> str:
    """A module's class, parameter shapes and plain attributes (without those that number layers)."""
    words = []
    for path, m in module.named_modules():
        plain = {
            k: v
            for k, v in sorted(vars(m).items())
            if isinstance(v, (int, str, bool)) and not k.startswith("_") and k != "training"
            and not any(word in k for word in ("idx", "index", "layer_id"))
        }  # fmt: skip
        shapes = [tuple(p.shape) for p in m.parameters(recurse=False)]
        words.append(f"{path} {type(m).__qualname__} {m.extra_repr()} {shapes} {plain}")
    return "; ".join(words)


@dataclass(frozen=True)
class Builder:
    """Compiles one operator's nodes over the user's own modules."""

    trace: StepTrace
    inside: list[fx.Node]
    sources: list[fx.Node]
    outputs: list[fx.Node]
    split: bool

    def __call__(self) -> Callable[..., tuple[Any, ...]]:
        """A callable from the sources' tensors to the outputs'."""
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in self.sources}
        before: fx.Node | None = None  # the gradient mode around a part of the step under no_grad
        for node in self.inside:
            if node in copies:
                continue
            if not node.meta.get("grad", True) and before is None:
                before = graph.call_function(torch.is_grad_enabled)
                graph.call_function(_grad_mode, (False,))
            elif node.meta.get("grad", True) and before is not None and node.op != "get_attr":
                graph.call_function(_grad_mode, (before,))
                before = None
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if self.split:
                module = (
                    self.trace.holder.get_submodule(str(node.target)) if node.op == "call_module" else None
                )
                guard(graph, copies[node], module, self.trace.task)
        if before is not None:
            graph.call_function(_grad_mode, (before,))
        graph.output(tuple(copies[n] for n in self.outputs))
        return fx.GraphModule(self.trace.holder, graph, class_name="Piece")


def _grad_mode(enabled: bool) -> None:
    torch._C._set_grad_enabled(enabled)
