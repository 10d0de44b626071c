"""The trace of a step over several tasks' batches, cut into each task's own nodes and what joins them.

Words: a node *belongs* to the tasks whose leaves it depends on. Nodes of one task are that task's; nodes of
several are *joint*, and run on every rank alike, from scalars. So is arithmetic on the scalars of one task
that only the step's results need: a root of a mean, or a sum divided by a count, can be computed from the
whole batch's scalars, not from a shard's. A *part* is a task's scalar that a joint node reads. Nodes of no
task (parameters, constants) are copied to whoever needs them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.utils._pytree import tree_structure

from lightning_spindle.capture import patches
from lightning_spindle.capture.blocks import is_metric
from lightning_spindle.capture.counting import rows_read, weighed
from lightning_spindle.capture.errors import TraceError
from lightning_spindle.capture.measure import Measured
from lightning_spindle.capture.pieces import (
    BatchLayout,
    Constant,
    GivenRef,
    LeafLayout,
    LogCall,
    ResultRef,
    Returned,
    RowsRef,
)
from lightning_spindle.capture.returned import TracedOutput
from lightning_spindle.capture.step import StepTrace

_LIGHT = 4096  # parameters of so many elements are held by every rank for the sake of a joint node
_ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.neg,
    operator.iadd, operator.imul, operator.isub, max, min, int, float,
}  # fmt: skip


@dataclass
class Cut:
    """A trace that is cut.

    Args:
        trace: over the leaves of all tasks.
        owners: the task of each leaf.
        tasks: the tasks that are there, in order.
        layouts: of the tasks' batches.
        measured: the nodes on the whole example.

    Raises:
        TraceError: the batch size of a logged value is no number of rows.
    """

    trace: StepTrace
    owners: Sequence[str]
    tasks: Sequence[str]
    layouts: Mapping[str, BatchLayout]
    measured: Mapping[fx.Node, Measured]
    belongs: dict[fx.Node, frozenset[str]] = field(default_factory=dict)
    names: dict[fx.Node, str] = field(default_factory=dict)
    """What a node computes, equal in traces of the same step for other sets of tasks."""
    rows: dict[fx.Node, RowsRef] = field(default_factory=dict)
    """Nodes that ask for a task's number of rows."""
    joint: list[fx.Node] = field(default_factory=list)
    """Nodes that run on every rank, in order; with copies of what belongs to no task."""
    parts: dict[fx.Node, str] = field(default_factory=dict)
    """Parts, with their tasks."""
    logs: list[LogCall] = field(default_factory=list)
    given: dict[str, list[fx.Node]] = field(default_factory=dict)
    """What each task's ranks give to all others, of what the step returns."""
    refs: dict[int, ResultRef | GivenRef] = field(default_factory=dict)
    """Where hooks find each of the step's outputs."""

    def __post_init__(self) -> None:
        self._place = {leaf: i for i, leaf in enumerate(self.trace.leaves) if leaf is not None}
        self._first = {task: list(self.owners).index(task) for task in self.tasks}
        self._named = {n for n, _ in self.trace.holder.named_parameters(remove_duplicate=False)}
        self._weights: dict[fx.Node, frozenset[str]] = {}
        read = {leaf: (self.owners[i], self._layout(i)) for leaf, i in self._place.items()}
        seen: dict[str, int] = {}
        for node in self.trace.graph.nodes:
            inputs = node.all_input_nodes
            own = [self.owners[self._place[node]]] if node in self._place else []
            self.belongs[node] = frozenset(own).union(*(self.belongs[n] for n in inputs))
            self._weights[node] = frozenset(self._parameters(node)).union(*(self._weights[n] for n in inputs))
            name = self._name(node)
            seen[name] = seen.get(name, 0) + 1
            self.names[node] = f"{name}#{seen[name]}"
            rows = rows_read(node, read)
            if rows is not None:
                self.rows[node] = rows
        self._part_output()
        self._collect()
        self.logs = weighed(self.trace.logs, self.trace.sizes, self.rows.get)

    def _layout(self, place: int) -> LeafLayout:
        task = self.owners[place]
        return self.layouts[task].leaves[place - self._first[task]]

    # ------------------------------------------------------------------------------------- what hooks see
    def _part_output(self) -> None:
        """Scalars, and what is joint anyway, are results of the step; a task gives what else is its own."""
        if self.trace.output is None or self.trace.output.node is None:
            return
        node, scalars = self.trace.output.node, self.trace.output.scalars
        for at, read in enumerate(node.args):
            if not isinstance(read, fx.Node):
                raise TraceError("the step returns a tuple that an operator gives")
            scalar = at in scalars and not read.meta.get("sized")  # sizes are known to whoever has the rows
            if scalar or len(self.belongs[read]) > 1 or read is self.trace.batch_idx:
                key = f"out:{at}"
                self.trace.results[key] = read
                self.refs[at] = ResultRef(key)
            else:
                own = self.given.setdefault(self._task(read), [])
                self.refs[at] = GivenRef(self._task(read), len(own))
                own.append(read)
        self.trace.graph.erase_node(node)
        self.trace.output.node = None

    def returned(self) -> Returned | None:
        """What hooks see; None where there is none that would."""
        output = self.trace.output
        if output is None:
            return None
        return Returned(
            output.spec, tuple(x if isinstance(x, Constant) else self.refs[x] for x in output.leaves)
        )

    # ------------------------------------------------------------------------------------- what joins
    def _collect(self) -> None:
        outputs = list(self.trace.results.values())
        wanted = {n for n in self.trace.graph.nodes if len(self.belongs[n]) > 1 and n.op != "output"}
        wanted |= {n for n in outputs if not self.belongs[n] or self._is_glue(n)}
        known = wanted | self.rows.keys() | {self.trace.batch_idx}
        self.parts = {n: self._task(n) for n in outputs if n not in known}
        stack, joint = list(wanted), set(wanted)
        while stack:
            for node in stack.pop().all_input_nodes:
                if node in joint or node in self.rows or node is self.trace.batch_idx:
                    continue
                if self._is_part(node):
                    self.parts[node] = self._task(node)
                else:
                    joint.add(node)
                    stack.append(node)
        self.joint = [n for n in self.trace.graph.nodes if n in joint]
        self.parts = {n: self.parts[n] for n in self.trace.graph.nodes if n in self.parts}

    def _is_part(self, node: fx.Node) -> bool:
        if len(self.belongs[node]) == 1:
            return not self._counts(node) and not self._is_glue(node)
        return not self.belongs[node] and node.op != "get_attr" and self._is_heavy(node)

    def _is_glue(self, node: fx.Node) -> bool:
        """Arithmetic on scalars of one task."""
        scalars = [n for n in node.all_input_nodes if self.belongs[n]]
        return (
            node.op in ("call_function", "call_method")
            and node.target is not patches.update_metric
            and self._is_scalar(node)
            and bool(scalars)
            and all(self._is_scalar(n) and n.op != "placeholder" for n in scalars)
        )

    def _is_scalar(self, node: fx.Node) -> bool:
        measured = self.measured[node]
        return measured.shape in ((), None) and not measured.structured

    def _task(self, node: fx.Node) -> str:
        return next(iter(self.belongs[node]), self.tasks[0])

    def _is_heavy(self, node: fx.Node) -> bool:
        holder = self.trace.holder
        return sum(holder.get_parameter(name).numel() for name in self._weights[node]) > _LIGHT

    def _counts(self, node: fx.Node) -> bool:
        """Arithmetic on numbers of rows."""
        inputs = node.all_input_nodes
        return (
            node.target in _ARITHMETIC
            and bool(inputs)
            and all(n in self.rows or self._counts(n) for n in inputs)
        )

    # ------------------------------------------------------------------------------------- names
    def _name(self, node: fx.Node) -> str:
        if node in self._place:
            task = self.owners[self._place[node]]
            return f"leaf {task} {self._place[node] - self._first[task]}"
        if node.op == "get_attr":
            value: object = self.trace.holder
            for atom in str(node.target).split("."):
                value = getattr(value, atom)
            if "." not in str(node.target) and isinstance(value, torch.Tensor) and self._is_constant(node):
                return f"constant {value.tolist()}"
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: _Name(self.names[n]))
        target = node.target if isinstance(node.target, str) else _function(node.target)
        return str(hash((node.op, target, repr(arguments), node.meta.get("grad", True))))

    def _is_constant(self, node: fx.Node) -> bool:
        holder = self.trace.holder
        return node.target not in holder._parameters and node.target not in holder._buffers

    def _parameters(self, node: fx.Node) -> list[str]:
        if node.op == "call_module":
            module = self.module(node)
            assert module is not None
            return [f"{node.target}.{name}" for name, _ in module.named_parameters()]
        return [str(node.target)] if node.op == "get_attr" and node.target in self._named else []

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that ``node`` calls."""
        return self.trace.holder.get_submodule(str(node.target)) if node.op == "call_module" else None

    def effects(self, task: str) -> set[str]:
        """Names of nodes of a task that may change the model: metrics, and modules with buffers."""
        found = set()
        for node in self.trace.graph.nodes:
            module = self.module(node)
            if (
                self._task(node) == task
                and len(self.belongs[node]) < 2
                and (
                    node.target is patches.update_metric
                    or (
                        module is not None and (is_metric(module) or next(module.buffers(), None) is not None)
                    )
                )
            ):
                found.add(self.names[node])
        return found

    # ------------------------------------------------------------------------------------- a task's trace
    def of_task(self, task: str, results: Mapping[str, fx.Node]) -> tuple[StepTrace, dict[fx.Node, fx.Node]]:
        """The trace of a task alone, which gives ``results``, and the copy of each node in it.

        The first task has the nodes of no task that change the model.
        """
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        outputs = {*results.values(), *self.given.get(task, ())}
        wanted = self._wanted(task, outputs, spare=task == self.tasks[0])
        for node in self.trace.graph.nodes:
            if node in wanted:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        given = {}
        for key, node in results.items():
            if node.target is patches.as_scalar:
                given[key] = copies[node]
            else:
                given[key] = graph.call_function(patches.as_scalar, (copies[node],))
        output = None
        if own := self.given.get(task):
            read = tuple(copies[node] for node in own)
            node = graph.call_function(patches.given, read)
            output = TracedOutput(tree_structure(()), [], node, {})
        graph.output(tuple(given.values()))
        trace = StepTrace(
            task,
            self.trace.holder,
            graph,
            [
                None if leaf is None else copies[leaf]
                for leaf, owner in zip(self.trace.leaves, self.owners, strict=True)
                if owner == task
            ],
            copies[self.trace.batch_idx],
            given,
            [],
            self.trace.blocks,
            {p: why for p, why in self.trace.opaque.items() if any(n.target == p for n in copies.values())},
            output=output,
        )
        return trace, copies

    def needs(self, task: str) -> set[fx.Node]:
        """A task's nodes, and what they need."""
        return self._wanted(task, set(), spare=False)

    def _wanted(self, task: str, results: set[fx.Node], spare: bool) -> set[fx.Node]:
        glue = {n for n in self.joint if self.belongs[n]}
        wanted = {self.trace.batch_idx} | results
        for node in self.trace.graph.nodes:
            own = self.belongs[node] == frozenset([task])
            alone = not self.belongs[node] and node.op != "placeholder" and spare
            if node.op != "output" and (own or alone) and node not in glue:
                wanted.add(node)
        stack = list(wanted)
        while stack:
            for node in stack.pop().all_input_nodes:
                if node not in wanted:
                    wanted.add(node)
                    stack.append(node)
        return wanted


class _Name(str):
    """A node's name, in the text of arguments."""

    def __repr__(self) -> str:
        return str(self)


def _function(target: object) -> str:
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
