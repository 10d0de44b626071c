"""One task's step as a torch.fx graph over the whole model, operators as leaves.

The graph's placeholders are the leaves of the task's batch, its outputs the step's results.
Module and parameter names are those of the model (first of ``named_modules``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import TreeSpec

from lightning_spindle import tasklog
from lightning_spindle.capture import patches
from lightning_spindle.capture.attributes import Attributes, noted
from lightning_spindle.capture.blocks import find_blocks, is_leaf, is_metric
from lightning_spindle.capture.errors import TraceError, reason_of
from lightning_spindle.capture.evaluate import Holder, filled, plain_state, run_node, with_tensors
from lightning_spindle.capture.pieces import LogCall
from lightning_spindle.capture.returned import is_scalar, traced_output
from lightning_spindle.capture.stacks import LAYER_STACKS
from lightning_spindle.capture.step import Step, StepTrace, loss_of
from lightning_spindle.capture.trees import unflatten
from lightning_spindle.capture.watching import observe, unhooked


def trace_step(
    step: Step, leaves: Sequence[Any], spec: TreeSpec, closed: Mapping[str, str] | None = None
) -> StepTrace:
    """Trace ``step`` for batches with the tree ``spec``.

    ``closed``: modules that are not to be traced through, with the reason.

    Raises:
        TraceError: the step cannot be traced, or a trace would freeze what may change.
    """
    tracer = StepTracer(step, closed or {})
    return tracer.trace_step(leaves, spec)


class StepTracer(fx.Tracer):
    """A tracer whose operators are leaves and that refuses to freeze state."""

    proxy_buffer_attributes = True

    def __init__(self, step: Step, closed: Mapping[str, str]) -> None:
        super().__init__()
        self.closed, self.inside = closed, [""]
        self.step = step
        self.blocks = find_blocks(step.model, step.operators)
        self.opaque: dict[str, str] = {}
        self.logged: list[tuple[str, Any, dict[str, Any]]] = []
        self.sizes: dict[str, fx.Node] = {}
        self._names: dict[int, str] = {}
        self.shadowing = False
        self._fetched: dict[str, fx.Proxy] = {}
        self._autocast = _autocast_state()
        self.attributes: Attributes = {}
        self._trainable = {name: p.requires_grad for name, p in step.model.named_parameters()}

    # ------------------------------------------------------------------------------------- the step
    def trace_step(self, leaves: Sequence[Any], spec: TreeSpec) -> StepTrace:
        holder = Holder(self.step.model)
        found: dict[str, Any] = {}
        placeholders: list[fx.Node | None] = []

        def run(*proxies: Any) -> Any:
            batch_idx, own = proxies[-1], proxies[:-1]
            placeholders.extend(p.node if isinstance(p, fx.Proxy) else None for p in own)
            with tasklog.sink(
                lambda task, key, value, kwargs: self.logged.append((key, value, kwargs)), self.step.logging
            ):
                output = self.step(unflatten(own, spec), batch_idx)
            found["logs"], values = self._split_logs()
            loss = loss_of(self.step, output)
            if loss is not None and (self.step.name == "training_step" or is_scalar(loss)):
                values = {"loss": loss, **values}
            found["results"] = {key: self._result(key, value) for key, value in values.items()}
            if self.step.listened:
                found["output"] = traced_output(self, self.step.name, output)
            return tuple(found["results"].values())

        def trace() -> fx.Graph:
            named = [*self.step.model.named_buffers(), *self.step.model.named_parameters()]
            self._names = {id(tensor): name for name, tensor in named}
            active = lambda: not self.shadowing  # noqa: E731
            with noted(self.step.model, self.attributes, active), patches.tracing(self, self.step.model):
                return self.trace(holder)

        self._run = run
        with torch.inference_mode():
            self._leaves = [v.clone() if isinstance(v, torch.Tensor) else v for v in leaves]
        graph = with_tensors(holder, plain_state(holder, requires_grad=False), trace)
        for node in graph.nodes:
            node.meta.pop("shadow", None)
        found["results"] = {key: proxy.node for key, proxy in found["results"].items()}
        index = next(n for n in graph.nodes if n.op == "placeholder" and n.target == "batch_idx")
        return StepTrace(
            self.step.task,
            holder,
            graph,
            placeholders,
            index,
            found["results"],
            found["logs"],
            self.blocks,
            self.opaque,
            self.sizes,
            found.get("output"),
            self.attributes,
        )

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Leaves of the batch as placeholders; None stays None, so that ``is None`` tests hold."""
        args = [
            None if leaf is None else self.create_proxy("placeholder", f"leaf_{i}", (), {})
            for i, leaf in enumerate(self._leaves)
        ]
        args.append(self.create_proxy("placeholder", "batch_idx", (), {}))
        return self._run, args

    def _result(self, key: str, value: Any) -> fx.Proxy:
        if isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, nn.Parameter):
            raise TraceError(f"{key} was computed outside of the trace")
        name = "".join(c if c.isalnum() else "_" for c in key)
        return self.create_proxy("call_function", patches.as_scalar, (value,), {}, name=name)

    def _split_logs(self) -> tuple[list[LogCall], dict[str, Any]]:
        calls: list[LogCall] = []
        values: dict[str, Any] = {}
        for key, value, kwargs in self.logged:
            if any(call.key == key for call in calls):
                raise TraceError(f"the step logs {key!r} twice")
            if isinstance(kwargs.get("batch_size"), fx.Proxy):
                self.sizes[key] = kwargs.pop("batch_size").node
            if any(isinstance(v, fx.Proxy) for v in kwargs.values()):
                raise TraceError(f"an option of self.log({key!r}) is computed in the step")
            metric = None
            if isinstance(value, nn.Module):
                metric = self.path_of_module(value)
            else:
                values[f"log:{key}"] = value
            calls.append(LogCall(self.step.task, key, tuple(kwargs.items()), metric))
        return calls, values

    # ------------------------------------------------------------------------------------- modules
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """See ``blocks.is_leaf``."""
        return is_leaf(m, self.blocks)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """A node for an operator; else the call is traced through, or becomes a node where that fails."""
        if self.shadowing or m is self.step.model:
            return forward(*args, **kwargs)
        if not _has_state(m) and (m not in self.submodule_paths or not _has_proxies((args, kwargs))):
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return self._operator(m, path, args, kwargs)
        entered = LAYER_STACKS.get(type(m)) if not m._forward_hooks else None
        last, logs = next(iter(reversed(self.graph.nodes))), len(self.logged)
        self.inside.append(path)
        try:
            if path in self.closed:
                raise TraceError(self.closed[path])
            return entered(m, *args, **kwargs) if entered else forward(*args, **kwargs)
        except Exception as error:
            if m is self.step.module or len(self.logged) != logs:
                raise
            self._forget_after(last)
            self.opaque[path] = reason_of(error)
            return self._operator(m, path, args, kwargs)
        finally:
            self.inside.pop()

    def _operator(self, m: nn.Module, path: str, args: Any, kwargs: Any) -> fx.Proxy:
        proxy = self.create_proxy("call_module", path, args, kwargs)
        if not is_metric(m) and observe(m, args, kwargs, proxy):
            self._shadow(proxy.node, hooked=True)
        return proxy

    def flag(self, m: nn.Module, value: bool) -> Any:
        """``m.training``: read when the trace runs, where ``m`` is a part of the model."""
        if m not in self.submodule_paths:
            return value
        module = self.create_proxy("get_attr", self.path_of_module(m), (), {})
        return self.create_proxy("call_function", patches.is_training, (module,), {})

    def _forget_after(self, last: fx.Node) -> None:
        for node in reversed(self.graph.nodes):
            if node is last:
                break
            self._fetched = {k: p for k, p in self._fetched.items() if p.node is not node}
            self.opaque.pop(str(node.target), None)
            self.graph.erase_node(node)

    # ------------------------------------------------------------------------- tensors of the model
    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Parameters and buffers are fetched by a node each."""
        if not self.shadowing and isinstance(attr_val, torch.Tensor) and self.owns(attr_val):
            return self.fetch(attr_val)
        return attr_val

    def owns(self, tensor: Any) -> bool:
        """Whether ``tensor`` is a parameter or buffer of the model."""
        return id(tensor) in self._names

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of a parameter or buffer of the model."""
        return self._names[id(tensor)]

    def is_trainable(self, name: str) -> bool:
        """Whether the user lets a parameter (or buffer) train; the trace has the answer in it."""
        return bool(self.attributes.setdefault(f"{name}.requires_grad", self._trainable.get(name, False)))

    def fetch(self, tensor: torch.Tensor) -> fx.Proxy:
        """The proxy of a parameter or buffer of the model."""
        name = self._names[id(tensor)]
        if name not in self._fetched:
            self._fetched[name] = self.create_proxy("get_attr", name, (), {})
        return self._fetched[name]

    def create_arg(self, a: Any) -> Any:
        """Refuses tensors that carry a gradient: their values would be frozen."""
        if isinstance(a, torch.Tensor):
            if self.owns(a):
                return self.fetch(a).node
            if a.requires_grad:
                raise TraceError("the step uses a tensor computed from parameters outside of the trace")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Remembers the gradient mode; autocast inside a step would be lost."""
        if _autocast_state() != self._autocast:
            raise TraceError("the step uses torch.autocast itself")
        node = super().create_node(*args, **kwargs)
        node.meta["grad"] = torch.is_grad_enabled()
        self._shadow(node)
        return node

    # ------------------------------------------------------------------------------------- shadows
    def _shadow(self, node: fx.Node, hooked: bool = False) -> None:
        """Run ``node`` on the example, so that the structure of its value (never its sizes) is known.

        Hooks that watch an operator see its proxy instead (``patches.observe``); ``hooked`` if they
        change what it gives.
        """
        if node.op == "placeholder":
            index = str(node.target).removeprefix("leaf_")
            node.meta["shadow"] = self._leaves[int(index)] if index.isdigit() else 0
            return
        inputs = node.all_input_nodes
        if node.op == "output" or any("shadow" not in n.meta for n in inputs) or self._is_metric(node):
            return
        self.shadowing = True
        try:
            module = self.root.get_submodule(str(node.target)) if node.op == "call_module" else None
            # Inference tensors can be told from the trace's own, should they leak.
            with unhooked(None if hooked else module), torch.inference_mode():
                args, kwargs = filled(node, lambda n: n.meta["shadow"])
                shadow = node.meta["shadow"] = run_node(self.root, node, args, kwargs)
                node.meta["dtype"] = getattr(shadow, "dtype", None)
                node.meta["scalar"] = patches.is_scalar(shadow)
        except Exception:
            return  # the step itself will say so
        finally:
            self.shadowing = False
        node.meta["structural"] = patches.reads_structure(node) or (
            bool(inputs) and all(n.meta.get("structural", False) for n in inputs)
        )
        node.meta["sized"] = patches.reads_sizes(node) or (
            bool(inputs) and all(n.meta.get("sized") or n.meta.get("structural") for n in inputs)
        )

    def _is_metric(self, node: fx.Node) -> bool:
        module = self.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        return is_metric(module) or node.target is patches.update_metric

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Tuples know their length."""
        return StepProxy(node, self)

    def iter(self, obj: fx.Proxy) -> Any:
        """Tuples have the length that they have on the example; tensors are not iterated over."""
        shadow = obj.node.meta.get("shadow")
        if isinstance(shadow, (tuple, list)):
            return iter([obj[i] for i in range(shadow.__len__())])
        return super().iter(obj)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Number of dimensions, type and device may be asked for; values change.

        Sizes and train flags may, too: the branch is held against other batches (``branches``).
        What the user asserts holds on the example, else the user's own error ends the trace.
        """
        asserted = "shadow" in obj.node.meta and patches.is_asserted(sys._getframe(1))
        if not (asserted or obj.node.meta.get("structural") or obj.node.meta.get("sized")):
            return super().to_bool(obj)
        self.shadowing = True
        taken = bool(obj.node.meta["shadow"])
        self.shadowing = False
        if not asserted and not obj.node.meta.get("structural"):
            self._hold(obj, taken, patches.line_of(sys._getframe(1)))
        return taken

    def _hold(self, condition: fx.Proxy, taken: bool, line: str) -> None:
        """Have the condition checked on other batches."""
        message = (
            f"task {self.step.task!r}: the condition in {line} was {taken} when the step was taken apart, "
            f"and is {not taken} now: it depends on sizes of the batch, or on train and eval modes of modules"
        )
        check = self.create_proxy("call_function", patches.expect, (condition, taken, message), {})
        check.node.meta.update(module=self.inside[-1], line=line)


class StepProxy(fx.Proxy):
    """A proxy whose length is known where its value is a tuple, and whose entries can be assigned."""

    node: fx.Node

    def __len__(self) -> int:
        shadow = self.node.meta.get("shadow")
        if isinstance(shadow, (tuple, list)):
            return shadow.__len__()
        raise TypeError("len of a traced tensor")

    @property
    def requires_grad(self) -> Any:
        """Known of parameters and buffers."""
        if self.node.op == "get_attr":
            return self.tracer.is_trainable(str(self.node.target))
        return self.__getattr__("requires_grad")

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.node.op == "placeholder":
            raise TypeError("the step writes into its batch")
        args = (self, index, value)
        self.node = self.tracer.create_proxy("call_function", patches.assigned, args, {}).node


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _has_proxies(tree: Any) -> bool:
    found: list[fx.Proxy] = []
    fx.node.map_aggregate(tree, lambda a: found.append(a) if isinstance(a, fx.Proxy) else None)
    return bool(found)


def _autocast_state() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
