"""Rewrites of a trace: in-place operations made safe, tuples handed over entry by entry."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lightning_spindle.capture.errors import TraceError


def protect_known(graph: fx.Graph, module_of: object) -> None:
    """Clone the first argument of operations that say by name or option that they work in place."""
    for node in list(graph.nodes):
        if _works_in_place(node, module_of) and node.args and isinstance(node.args[0], fx.Node):
            protect(graph, node, node.args[0])


def protect(graph: fx.Graph, node: fx.Node, changed: fx.Node) -> None:
    """Let ``node`` change a clone of ``changed``; what reads ``changed`` later reads ``node``'s value."""
    if changed.op == "get_attr" or changed.target is torch.clone:
        return
    with graph.inserting_before(node):
        cloned = graph.call_function(torch.clone, (changed,))
    cloned.meta.update(grad=node.meta.get("grad", True), protects=True)
    order = {n: i for i, n in enumerate(graph.nodes)}
    for user in list(changed.users):
        if user is node:
            user.replace_input_with(changed, cloned)
        elif order[user] > order[node]:
            user.replace_input_with(changed, node)


def protect_measured(graph: fx.Graph) -> bool:
    """Clone what nodes turned out to change when they ran; whether there was any.

    Raises:
        TraceError: the changed tensor is read afterwards, and only the trace's author knows how.
    """
    found = False
    for node in list(graph.nodes):
        if not node.meta.pop("mutates", None) or node.op != "call_module":
            continue
        for changed in node.all_input_nodes:
            if changed.op == "get_attr" or changed.target is torch.clone:
                continue
            if len(changed.users) > 1 or changed.op == "placeholder":
                raise TraceError(f"{node.target} changes its input in place")
            protect(graph, node, changed)
            found = True
    return found


def spread_tuples(graph: fx.Graph) -> bool:
    """Hand a node's tuple to others as its entries (operators give tensors); whether there was any."""
    found = False
    for node in list(graph.nodes):
        entries = node.meta.get("entries")
        users = [u for u in node.users if u.target not in (operator.getitem, getattr) and u.op != "output"]
        if not isinstance(entries, (tuple, list)) or not users or not _all_known(entries):
            continue
        with graph.inserting_after(node):
            tree = _entry(graph, node, entries)
        for user in users:
            user.args, user.kwargs = replaced((user.args, user.kwargs), node, tree)
        found = True
    return found


def replaced(arguments: Any, node: fx.Node, value: Any) -> Any:
    """A node's arguments with ``value`` in the place of ``node``."""
    return fx.node.map_aggregate(arguments, lambda a: value if a is node else a)


def _all_known(entries: Any) -> bool:
    if isinstance(entries, (tuple, list)):
        return all(_all_known(entry) for entry in entries)
    return entries is None or entries is True


def _entry(graph: fx.Graph, node: fx.Node, entries: Any) -> Any:
    """``node``'s value as a tree of nodes that take out its tensors."""
    if not isinstance(entries, (tuple, list)):
        return None if entries is None else node
    made: list[Any] = []
    for i, entry in enumerate(entries):
        if entry is None:
            made.append(None)
            continue
        taken = graph.call_function(operator.getitem, (node, i))
        taken.meta["grad"] = node.meta.get("grad", True)
        with graph.inserting_after(taken):
            made.append(_entry(graph, taken, entry))
    return type(entries)(made)


def _works_in_place(node: fx.Node, module_of: object) -> bool:
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        if node.kwargs.get("out") is not None:
            raise TraceError(f"the step calls {name} with out=")
        return node.kwargs.get("inplace") is True or (name.endswith("_") and not name.endswith("__"))
    if node.op == "call_module":
        module = module_of(node)  # type: ignore[operator]
        return getattr(module, "inplace", False) is True
    return False
