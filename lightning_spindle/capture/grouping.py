"""Nodes of a trace joined to operators.

Words: an *anchor* is a node that calls a module with parameters; a *block* one that calls a repeated
layer. Other anchors are *light*: a run of them is one operator. *Glue* is what lies between. A node is
*owned* by one operator, or *copied* into each that uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from lightning_spindle.capture import patches
from lightning_spindle.capture.blocks import is_metric
from lightning_spindle.capture.classify import Info
from lightning_spindle.capture.errors import TraceError
from lightning_spindle.capture.step import StepTrace
from lightning_spindle.graph import Layout, Reading


@dataclass(eq=False)
class Group:
    """Nodes that make one operator. ``role``: block, light, couple, glue, sums, metric, given or tail."""

    role: str
    owned: list[fx.Node] = field(default_factory=list)
    whole: bool = False

    @property
    def layout(self) -> Layout:
        if self.role in ("metric", "given"):
            return Layout.EVERYWHERE
        return Layout.WHOLE if self.whole else Layout.SPLIT


class Grouping:
    """The operators of one task's step.

    Guaranteed: every node that a result, a metric or a written buffer needs is in at least one
    group; random nodes, nodes that couple samples and anchors with rows are in exactly one;
    groups are in an order in which they can run. What reads a value from the whole batch is in another
    group than the one that gives it, unless that one runs whole.
    """

    def __init__(self, trace: StepTrace, infos: dict[fx.Node, Info]) -> None:
        self.trace, self.infos = trace, infos
        self.owner: dict[fx.Node, Group] = {}
        self.groups: list[Group] = []
        self.tail = Group("tail")
        self.after_metrics = Group("tail", whole=True)
        self.results = set(trace.results.values())
        self.summands = self._summands()
        self.live = self._live()
        self.shown = self.live - self._live(but=patches.given)
        self.leads_on = self._leads_to_anchors()
        for node in trace.graph.nodes:
            if (
                node in self.live
                and node.op not in ("placeholder", "get_attr", "output")
                and not _checks(node)
            ):
                self._assign(node)
        self.groups += [g for g in (self.tail, self.after_metrics) if g.owned]
        self._finish_tail()
        self._place_checks()
        self.groups = self._ordered()

    # ------------------------------------------------------------------------------------- questions
    def module(self, node: fx.Node) -> Any:
        """The module that ``node`` calls, None where it calls none."""
        return self.trace.holder.get_submodule(str(node.target)) if node.op == "call_module" else None

    def is_metric(self, node: fx.Node) -> bool:
        """Whether ``node`` runs a torchmetrics metric."""
        return node.target is patches.update_metric or is_metric(self.module(node))

    def runs_everywhere(self, node: fx.Node) -> bool:
        """Whether every rank runs ``node``: it updates a metric, or is what hooks see."""
        return self.is_metric(node) or (node.target is patches.given and bool(node.args))

    def is_anchor(self, node: fx.Node) -> bool:
        """Whether ``node`` calls a module with parameters."""
        module = self.module(node)
        return module is not None and not is_metric(module) and any(True for _ in module.parameters())

    def is_block(self, node: fx.Node) -> bool:
        """Whether ``node`` calls a repeated layer, or a module that could not be traced through."""
        return node.op == "call_module" and (
            self.module(node) in self.trace.blocks or node.target in self.trace.opaque
        )

    def needed(self, group: Group) -> tuple[list[fx.Node], list[fx.Node]]:
        """All nodes that ``group`` runs, in order, and the other groups' nodes that it reads."""
        inside, read = set(group.owned), []
        stack = [n for node in group.owned for n in self._needs(node)]
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in seen or node in inside:
                continue
            seen.add(node)
            if self.owner.get(node) is not None:
                read.append(node)
            else:
                inside.add(node)
                stack.extend(self._needs(node))
        order = {node: i for i, node in enumerate(self.trace.graph.nodes)}
        return sorted(inside, key=order.__getitem__), sorted(read, key=order.__getitem__)

    def producers(self, node: fx.Node) -> set[Group]:
        """Groups whose values ``node`` needs, through nodes that are copied."""
        return {self.owner[n] for n in self._owned_inputs(node)}

    def _owned_inputs(self, node: fx.Node) -> set[fx.Node]:
        """Nodes of groups that ``node`` needs, through nodes that are copied."""
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        stack = self._needs(node)
        while stack:
            at = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            if self.owner.get(at) is None:
                stack.extend(self._needs(at))
            else:
                found.add(at)
        return found

    def _needs(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that must be computed for ``node``; the numbers of rows are known without any."""
        return [] if node in self.infos and self.infos[node].counts else list(node.all_input_nodes)

    def _meets(self, node: fx.Node) -> bool:
        """Whether each device needs of ``node``'s value what all of its group's devices have."""
        return node in self.infos and self.infos[node].reading is not Reading.OWN

    def _reads_whole_batch(self, node: fx.Node) -> bool:
        """Whether ``node`` cannot be in the group that gives its inputs."""
        return any(self._meets(n) for n in self._owned_inputs(node))

    def upstream(self, group: Group) -> set[Group]:
        """Groups that must run before ``group``."""
        found: set[Group] = set()
        stack = [group]
        while stack:
            at = stack.pop()
            for node in at.owned:
                for other in self.producers(node) - found - {at}:
                    found.add(other)
                    stack.append(other)
        return found

    # ------------------------------------------------------------------------------------- preparation
    def _live(self, but: Callable[..., Any] | None = None) -> set[fx.Node]:
        """The nodes that matter; without those that only ``but`` reads."""
        stack = [
            n
            for n in self.trace.graph.nodes
            if (n in self.results or self.runs_everywhere(n) or self._writes(n) or _checks(n))
            and (but is None or n.target is not but)
        ]
        live: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node not in live:
                live.add(node)
                stack.extend(node.all_input_nodes)
        return live

    def _summands(self) -> set[fx.Node]:
        """Sums over a part's rows that lead to a sum over all: each who needs one computes it."""
        stack = [n for s in self.trace.graph.nodes if self._meets_as_sum(s) for n in s.all_input_nodes]
        found: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack.extend(n for n in node.all_input_nodes if self.infos[n].tags & {"mean", "sum"})
        return found

    def _meets_as_sum(self, node: fx.Node) -> bool:
        return node in self.infos and self.infos[node].reading is Reading.SUMMED

    def _writes(self, node: fx.Node) -> bool:
        return node in self.infos and bool(self.infos[node].writes)

    def _leads_to_anchors(self) -> set[fx.Node]:
        """Nodes with an anchor (that gives rows or is a block) downstream."""
        found: set[fx.Node] = set()
        for node in reversed(self.trace.graph.nodes):
            if any(u in self.live and (u in found or self._is_layer(u)) for u in node.users):
                found.add(node)
        return found

    def _is_layer(self, node: fx.Node) -> bool:
        return self.is_anchor(node) and (
            self.is_block(node)
            or (not self.infos[node].tags & {"mean", "sum"} and "rows" in self.infos[node].tags)
        )

    # ------------------------------------------------------------------------------------- assignment
    def _assign(self, node: fx.Node) -> None:
        info, producers = self.infos[node], self.producers(node)
        if node.meta.get("protects"):
            pass  # a clone belongs to the operation that changes it, wherever that is
        elif info.counts or node in self.summands:
            pass  # copied
        elif self.runs_everywhere(node):
            self._new("metric" if self.is_metric(node) else "given", node)
        elif producers & {self.tail, self.after_metrics} or self._is_result(node, producers):
            self._to_tail(node, producers)
        elif node in self.shown and not (info.draws or self.is_anchor(node) or self.is_block(node)):
            pass  # copied: the ranks that hooks run on have all rows
        elif info.reading is Reading.GATHERED:
            self._assign_gathered(node)
        elif info.reading is Reading.SUMMED:
            self._assign_sum(node, producers)
        elif self._extracts(node):
            self._join(self.owner[node.all_input_nodes[0]], node)
        elif self.is_block(node) and (info.tags != {"static"}):
            self._new("block", node)
        elif info.tags <= {"static", "size"} and not info.draws and not info.writes:
            pass  # copied
        elif self._is_reduction(info) and not self.is_block(node):
            self._assign_coupling(node, producers)
        elif self.is_anchor(node):
            self._assign_light(node, producers)
        else:
            self._assign_glue(node, producers)

    def _is_result(self, node: fx.Node, producers: set[Group]) -> bool:
        return node in self.results and not (len(producers) == 1 and next(iter(producers)).role == "metric")

    def _extracts(self, node: fx.Node) -> bool:
        """Takes one part out of an operator's value that is no tensor."""
        inputs = node.all_input_nodes
        if len(inputs) != 1 or inputs[0] not in self.owner or self.owner[inputs[0]].role == "tail":
            return False
        return node.target in (patches.operator_getitem, getattr) and inputs[0].meta.get("structured", False)

    def _is_reduction(self, info: Info) -> bool:
        return info.coupling or bool(info.writes) or bool(info.tags & {"mean", "sum"})

    def _new(self, role: str, node: fx.Node, whole: bool = False) -> Group:
        group = Group(role, whole=whole)
        self.groups.append(group)
        self._join(group, node)
        return group

    def _join(self, group: Group, node: fx.Node) -> None:
        group.owned.append(node)
        self.owner[node] = group
        info = self.infos[node]
        group.whole |= info.coupling or bool(info.writes)
        alone = info.tags & {"mean", "sum", "whole", "gathered"} and not info.tags & {"rows"}
        if group.role != "tail" and alone:
            group.whole |= self.is_anchor(node) or bool(info.tags & {"mean", "sum"})

    def _to_tail(self, node: fx.Node, producers: set[Group]) -> None:
        metrics = self.after_metrics in producers or any(
            g.role == "metric" or any(u.role == "metric" for u in self.upstream(g)) for g in producers
        )
        group = self.after_metrics if metrics else self.tail
        self._join(group, node)
        group.whole |= self._meets(node)

    def _assign_gathered(self, node: fx.Node) -> None:
        """With the operator that gives its rows, or as one: only they travel, not what they are made of."""
        (rows,) = node.all_input_nodes
        group = self.owner.get(rows)
        if group is None and rows.op != "placeholder" and not self.infos[rows].counts:
            group = self._new("glue", rows)
        if group is None or group.role == "block":
            self._new("glue", node)
        else:
            self._join(group, node)

    def _assign_sum(self, node: fx.Node, producers: set[Group]) -> None:
        """Sums that do not wait for each other are one operator."""
        for group in [g for g in self.groups if g.role == "sums"]:
            if not any(group is other or group in self.upstream(other) for other in producers):
                self._join(group, node)
                return
        self._new("sums", node)

    def _assign_coupling(self, node: fx.Node, producers: set[Group]) -> None:
        if node not in self.leads_on and not self.infos[node].writes:
            self._to_tail(node, producers)
            return
        if self.is_anchor(node) or self.infos[node].writes:
            self._new("light", node, whole=True)
            return
        for group in [g for g in producers if g.role == "couple"]:
            if not any(group in self.upstream(other) for other in producers - {group}):
                self._join(group, node)
                return
        self._new("couple", node, whole=True)

    def _assign_light(self, node: fx.Node, producers: set[Group]) -> None:
        whole = not self.infos[node].tags & {"rows"}
        self._meet(node, producers)
        producers = self.producers(node)
        if len(producers) == 1 and not self._reads_whole_batch(node):
            (group,) = producers
            written = any(self.infos[n].coupling or self.infos[n].writes for n in group.owned)
            if group.role == "light" and group.whole == whole and not written:
                self._join(group, node)
                return
        self._new("light", node, whole=whole)

    def _assign_glue(self, node: fx.Node, producers: set[Group]) -> None:
        if node in self.leads_on:
            self._meet(node, producers)
            producers = self.producers(node)
        if len(producers) == 1 and not self._reads_whole_batch(node):
            (group,) = producers
            if group.role in ("light", "couple", "glue") or (group.role == "metric" and node in self.results):
                self._join(group, node)
                return
        if self.infos[node].draws:
            self._new("glue", node, whole="rows" not in self.infos[node].tags)
        # else copied into its users

    def _meet(self, node: fx.Node, producers: set[Group]) -> None:
        """Light operators that read the batch alone become one where they meet: a stem."""
        if len(producers) < 2 or (node not in self.leads_on and not self.is_anchor(node)):
            return
        if any(g.role != "light" or g.whole or self.upstream(g) for g in producers):
            return
        if self._reads_whole_batch(node):
            return
        first, *rest = [g for g in self.groups if g in producers]
        for group in rest:
            for owned in group.owned:
                self._join(first, owned)
            self.groups.remove(group)

    # ------------------------------------------------------------------------------------- the tail
    def _finish_tail(self) -> None:
        tail = self.tail
        if not tail.owned:
            return
        inside, read = self.needed(tail)
        has_rows = any("rows" in self.infos[n].tags for n in [*inside, *read])
        kinds = set().union(*(self.infos[n].tags for n in tail.owned))
        foreign = set().union(*(self.infos[n].tags for n in read)) if read else set()
        used = any(
            u not in tail.owned and self.owner.get(u, tail) is not tail
            for n in tail.owned
            for u in n.users
            if u in self.live and u.op != "output"
        )
        sizes = any("size" in self.infos[n].tags for n in self.results if self.owner.get(n) is tail)
        tail.whole |= not has_rows or used or "whole" in kinds or bool(foreign & {"mean", "sum"}) or sizes
        tail.whole |= "gathered" in kinds and not kinds & {"mean", "sum"}
        producers = self.producers_of(tail)
        if not tail.whole and len(producers) == 1 and not any(self._meets(n) for n in read):
            (group,) = producers
            if group.role == "light" and not group.whole:
                self.groups.remove(tail)
                for node in tail.owned:
                    self._join_split(group, node)

    def _place_checks(self) -> None:
        """Conditions on sizes are checked where the sizes are known; by the first stem where the batch tells.

        Raises:
            TraceError: a condition needs sizes from several operators, or of gathered rows.
        """
        for node in [n for n in self.trace.graph.nodes if _checks(n)]:
            producers = self.producers(node)
            if len(producers) > 1 or self._reads_whole_batch(node):
                raise TraceError(f"a condition depends on sizes of several operators ({node.meta['line']})")
            stems = [g for g in self.groups if g.role not in ("block", "metric", "given")]
            group = next(iter([*producers, *stems, *self.groups]), None)
            if group is not None:
                self._join_split(group, node)

    def producers_of(self, group: Group) -> set[Group]:
        """Groups that ``group`` reads from."""
        return set().union(*(self.producers(n) for n in group.owned)) - {group}

    def _join_split(self, group: Group, node: fx.Node) -> None:
        group.owned.append(node)
        self.owner[node] = group

    def _ordered(self) -> list[Group]:
        order = {node: i for i, node in enumerate(self.trace.graph.nodes)}
        first = {g: min(order[n] for n in g.owned) for g in self.groups}
        waits = {g: self.producers_of(g) for g in self.groups}
        done: list[Group] = []
        left = sorted(self.groups, key=first.__getitem__)
        while left:
            ready = next(g for g in left if waits[g] <= set(done))
            done.append(ready)
            left.remove(ready)
        for group in done:
            group.owned.sort(key=order.__getitem__)
        return done


def _checks(node: fx.Node) -> bool:
    return node.target is patches.expect
