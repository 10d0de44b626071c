"""Capture of one LightningModule whose step takes the batches of several tasks, or of one.

The step is traced over all batches at once and cut (``cut.py``): what depends on one task's batch becomes
that task's operators, and what joins the tasks' scalars (a weighted sum of losses) a total, run on every
rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.utils._pytree import TreeSpec

from lightning_spindle.capture.apart import Apart, take_apart, traced, verify, warn_of_opaque
from lightning_spindle.capture.arrangement import Arrangement, Form
from lightning_spindle.capture.assemble import Builder, Parts, given_dtype
from lightning_spindle.capture.attributes import Attributes
from lightning_spindle.capture.coarse import coarse_parts
from lightning_spindle.capture.cut import Cut
from lightning_spindle.capture.errors import StepOutputError, TraceError, reason_of
from lightning_spindle.capture.measure import measure
from lightning_spindle.capture.pieces import (
    BatchIndex,
    BatchLayout,
    GivenRef,
    LeafLayout,
    LogCall,
    PartRef,
    RowsRef,
    Total,
)
from lightning_spindle.capture.step import Step
from lightning_spindle.capture.trees import Lists, flatten

Active = frozenset[str]


class Joint:
    """The parts and totals of a module's step.

    Args:
        model: the user's module, on the device of the batches.
        step: "training_step", "validation_step" or "test_step".
        batches: an example batch for each task.
        layouts: where they hold their rows.
        arrangement: how the step gets them.
        operators: classes whose instances are operators.
        listened: hooks see what the step returns.
    """

    def __init__(
        self,
        model: nn.Module,
        step: str,
        batches: Mapping[str, Any],
        layouts: Mapping[str, BatchLayout],
        arrangement: Arrangement,
        operators: tuple[type[nn.Module], ...],
        listened: bool,
    ) -> None:
        self.model, self.step, self.operators, self.listened = model, step, operators, listened
        self.batches, self.layouts = dict(batches), dict(layouts)
        self.arrangement = arrangement
        self.parts: dict[str, Parts] = {}
        self.totals: dict[Active, Total] = {}
        self.coarse: dict[str, str] = {}
        self.refused: dict[Active, str] = {}
        self.attributes: Attributes = {}
        self._capture()

    def _capture(self) -> None:
        if self.arrangement.form is Form.SEQUENTIAL:
            for active in self.arrangement.sets:
                self._take_apart([active])
        else:
            self._take_apart(self.arrangement.sets)

    def _take_apart(self, sets: Sequence[Active]) -> None:
        """The fullest set decides the operators; the others must do the same on their tasks' batches."""
        fullest, *others = sets
        try:
            cuts = {fullest: self._cut(fullest)}
            for active in others:
                try:
                    cuts[active] = self._cut(active)
                    _require_alike(cuts[fullest], cuts[active])
                    _give_as(cuts[fullest], cuts[active])
                except Exception as error:
                    cuts.pop(active, None)
                    self.refused[active] = reason_of(error)
            keys = _keys(cuts)
            apart, copies = {}, {}
            for task in cuts[fullest].tasks:
                results = {key: node for node, (owner, key) in keys[fullest].items() if owner == task}
                trace, copies[task] = cuts[fullest].of_task(task, results)
                leaves, _ = flatten(self.batches[task], self.layouts[task].lists)
                apart[task] = take_apart(self._named(task), trace, leaves, self.layouts[task])
            _require_apart(cuts[fullest], apart, copies)
            totals = {a: self._total(cut, keys[a], apart) for a, cut in cuts.items()}
        except StepOutputError:
            raise
        except Exception as error:
            self._as_one(fullest, others, reason_of(error))
            return
        warn_of_opaque(" and ".join(cuts[fullest].tasks), cuts[fullest].trace)
        self.parts |= {task: found.parts for task, found in apart.items()}
        self.totals |= totals
        for cut in cuts.values():
            self.attributes |= cut.trace.attributes

    def _named(self, task: str, dataloader_idx: int | None = None) -> Step:
        return Step(self.model, self.model, task, self.step, self.operators, dataloader_idx, self.listened)

    def _whole(self, active: Active) -> tuple[Step, list[Any], TreeSpec, list[str]]:
        """The step for a set of tasks, with the leaves of the whole batch, and the task of each."""
        step = self._named(_title(self._tasks(active)), self.arrangement.dataloader_idx(active))
        leaves, spec = flatten(self.arrangement.joined(self.batches, active), self._lists(active))
        names = self.arrangement.names if self.arrangement.form in (Form.KEYED, Form.LISTED) else active
        owners: list[str] = []
        for name in names:
            owners += [name] * (len(self.layouts[name].leaves) if name in active else 1)
        return step, leaves, spec, owners

    def _lists(self, active: Active) -> Lists:
        """The row lists of the whole batch for a set of tasks."""
        if self.arrangement.form not in (Form.KEYED, Form.LISTED):
            (name,) = active
            return self.layouts[name].lists
        keys = {
            name: name if self.arrangement.form is Form.KEYED else i
            for i, name in enumerate(self.arrangement.names)
        }
        return frozenset(f"[{keys[name]!r}]{path}" for name in active for path in self.layouts[name].lists)

    def _tasks(self, active: Active) -> list[str]:
        return [name for name in self.arrangement.names if name in active]

    def _cut(self, active: Active) -> Cut:
        step, leaves, spec, owners = self._whole(active)
        at = {task: [i for i, own in enumerate(owners) if own == task] for task in active}
        trace = traced(step, leaves, spec, {task: (at[task], self.layouts[task]) for task in at})
        measured, run = measure(trace, leaves, self.step == "training_step")
        verify(step, leaves, spec, run)
        cut = Cut(trace, owners, self._tasks(active), self.layouts, measured)
        _require_scalars(cut)
        return cut

    def _as_one(self, active: Active, others: Sequence[Active], reason: str) -> None:
        """The whole step as one operator, of a task that has all the batches."""
        step, leaves, spec, owners = self._whole(active)
        if len(active) > 1:
            self.layouts[step.task] = self._common_layout(leaves, spec, owners)
            self.batches[step.task] = self.arrangement.joined(self.batches, active)
        parts = coarse_parts(step, leaves, spec, reason)
        self.parts[step.task] = parts
        self.coarse[parts.operators[0].name] = reason
        sources = tuple(PartRef(step.task, r.key, (), True) for r in parts.results)
        outputs = tuple(r.key for r in parts.results)
        self.totals[active] = Total(sources, outputs, (), (), None, lambda: _as_given)
        self.refused |= dict.fromkeys(others, f"the step runs as one operator, because {reason}")

    def _common_layout(self, leaves: list[Any], spec: TreeSpec, owners: Sequence[str]) -> BatchLayout:
        """The first task's rows stand for all; other leaves are passed whole, as they are to one operator."""
        first = owners[0]
        found: list[LeafLayout] = []
        for name in dict.fromkeys(owners):
            own = self.layouts[name].leaves
            found += own if name == first else [LeafLayout(None)] * len(own)
        names = tuple(f"[{n!r}]{leaf}" for n in dict.fromkeys(owners) for leaf in self.layouts[n].names)
        kinds = tuple(kind for n in dict.fromkeys(owners) for kind in self.layouts[n].kinds)
        return BatchLayout(spec, tuple(found), names, kinds, self._lists(frozenset(owners)))

    # ------------------------------------------------------------------------------------- the total
    def _total(self, cut: Cut, keys: Mapping[fx.Node, tuple[str, str]], apart: Mapping[str, Apart]) -> Total:
        outputs = cut.trace.results
        joint = set(cut.joint)
        read = {n for node in cut.joint for n in node.all_input_nodes} | set(outputs.values())
        read -= joint
        sources = sorted(read, key=list(cut.trace.graph.nodes).index)
        for buffer in {str(n.target) for n in cut.joint if n.op == "get_attr"}:
            if any(buffer in names for found in apart.values() for names in found.parts.written.values()):
                raise TraceError(f"the total of the tasks' losses reads {buffer}, which a task writes")
        return Total(
            tuple(self._source(cut, node, keys, apart) for node in sources),
            tuple(outputs),
            self._parameters(cut),
            tuple(self._logs(cut)),
            cut.returned(),
            Builder(cut.trace, list(cut.joint), sources, list(outputs.values()), split=False),
        )

    def _source(
        self, cut: Cut, node: fx.Node, keys: Mapping[fx.Node, tuple[str, str]], apart: Mapping[str, Apart]
    ) -> PartRef | RowsRef | BatchIndex:
        if node is cut.trace.batch_idx:
            return BatchIndex()
        if node in cut.rows and node not in keys:
            return cut.rows[node]
        task, key = keys[node]
        example = apart[task].results[key]
        result = next(r for r in apart[task].parts.results if r.key == key)
        differentiable = next(v.differentiable for v in apart[task].parts.values if v.name == result.value)
        return PartRef(
            task,
            key,
            tuple(example.shape),
            differentiable and example.is_floating_point(),
            (node.meta.get("number") or float) if result.dtype is None else None,
        )

    def _parameters(self, cut: Cut) -> tuple[str, ...]:
        own = {id(p): name for name, p in self.model.named_parameters()}
        used = dict[str, None]()
        for node in cut.joint:
            if node.op == "call_module":
                module = cut.trace.holder.get_submodule(str(node.target))
                used |= {own[id(p)]: None for p in module.parameters()}
            elif node.op == "get_attr":
                value: Any = cut.trace.holder
                for atom in str(node.target).split("."):
                    value = getattr(value, atom)
                used |= {own[id(value)]: None} if id(value) in own else {}
        return tuple(used)

    def _logs(self, cut: Cut) -> list[LogCall]:
        results = cut.trace.results
        numbers = {
            key
            for key in results
            if key.startswith("log:") and given_dtype(results[key], cut.measured) is None
        }
        return [replace(call, task="", number=f"log:{call.key}" in numbers) for call in cut.logs]


def _title(tasks: Sequence[str]) -> str:
    return "+".join(tasks)


def _as_given(*values: Any) -> tuple[Any, ...]:
    return values


def _require_scalars(cut: Cut) -> None:
    """What tasks share must be scalars, unless the step itself gives it out (which has its own error).

    Raises:
        TraceError: names the node, its task and the others.
    """
    for node, task in cut.parts.items():
        shape = cut.measured[node].shape
        if shape is not None and math.prod(shape) != 1 and node not in cut.trace.results.values():
            others = " and ".join(t for t in cut.tasks if t != task) or "the loss"
            raise TraceError(
                f"{node.name} of task {task!r}, of shape {tuple(shape)}, meets {others}: only scalars can be "
                "joined"
            )


def _require_alike(fullest: Cut, other: Cut) -> None:
    """The tasks of ``other`` must do in it what they do where all tasks are there."""
    known = {fullest.names[node] for node in fullest.trace.graph.nodes}
    for node, task in other.parts.items():
        if other.names[node] not in known:
            raise TraceError(
                f"{node.name} of task {task!r} is computed in another way when "
                f"{', '.join(t for t in fullest.tasks if t not in other.tasks)} is absent"
            )
    for task in fullest.tasks:
        if fullest.effects(task) != other.effects(task) and (task in other.tasks or not other.belongs):
            raise TraceError(f"task {task!r} updates other metrics or buffers when other tasks are absent")


def _give_as(fullest: Cut, other: Cut) -> None:
    """What hooks see of ``other`` is found among what the tasks give in the fullest set."""
    for at, ref in other.refs.items():
        if isinstance(ref, GivenRef):
            names = [fullest.names[node] for node in fullest.given.get(ref.task, ())]
            name = other.names[other.given[ref.task][ref.index]]
            if name not in names:
                raise TraceError(f"task {ref.task!r} returns something else when other tasks are absent")
            other.refs[at] = GivenRef(ref.task, names.index(name))


def _keys(cuts: Mapping[Active, Cut]) -> dict[Active, dict[fx.Node, tuple[str, str]]]:
    """For each set the parts' tasks and result keys, the same for the same part; the fullest set has all."""
    fullest, *_ = cuts.values()
    found: dict[str, tuple[str, str]] = {}
    for cut in cuts.values():
        leading = _leading_to_loss(cut)
        for node, task in cut.parts.items():
            known = found.get(cut.names[node])
            if known is None or (node in leading and not known[1].startswith("loss:")):
                kind = "loss" if node in leading else "part"
                found[cut.names[node]] = (task, f"{kind}:{len(found)}")
    keys = {a: {node: found[cut.names[node]] for node in cut.parts} for a, cut in cuts.items()}
    for node in fullest.trace.graph.nodes:
        if fullest.names[node] in found:
            keys[next(iter(cuts))][node] = found[fullest.names[node]]
    return keys


def _leading_to_loss(cut: Cut) -> set[fx.Node]:
    if "loss" not in cut.trace.results:
        return set()
    stack = [cut.trace.results["loss"]]
    found = set(stack)
    while stack:
        node = stack.pop()
        if node in cut.parts:
            continue
        for n in node.all_input_nodes:
            if n not in found:
                found.add(n)
                stack.append(n)
    return found & cut.parts.keys()


def _require_apart(
    cut: Cut, apart: Mapping[str, Apart], copies: Mapping[str, Mapping[fx.Node, fx.Node]]
) -> None:
    """Nodes that draw random numbers or write buffers must run once.

    Raises:
        TraceError: one of them is needed by several tasks, or by a task and the total.
    """
    joint = set(cut.joint)
    for node in cut.trace.graph.nodes:
        if cut.belongs[node]:
            continue
        infos = {t: apart[t].infos[own[node]] for t, own in copies.items() if own.get(node) in apart[t].infos}
        users = [t for t, info in infos.items() if info.writes or (info.draws and node in cut.needs(t))]
        if users and len(users) + (node in joint) > 1:
            raise TraceError(f"{node.name} draws random numbers or writes a buffer for several tasks")
    _require_untouched(cut)


def _require_untouched(cut: Cut) -> None:
    """No joint node may change in place what a task goes on using."""
    order = {node: i for i, node in enumerate(cut.trace.graph.nodes)}
    joint = set(cut.joint)
    for node in cut.joint:
        for at in node.meta.get("mutates", ()):
            given = node.all_input_nodes[at] if at < len(node.all_input_nodes) else None
            if given is None or given in joint:
                continue
            if any(order[user] > order[node] and user not in joint for user in given.users):
                raise TraceError(f"{node.name} changes {given.name} in place, which a task goes on using")
