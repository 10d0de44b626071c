"""What a step returns beside its loss, as hooks see it: ``on_train_batch_end``, ``on_validation_batch_end``.

In a trace, scalars that shards make of their rows go with the losses, through the exchange. Everything else
is read by one operator of each task that runs on every rank, ``patches.given``: what it is given is what the
step returned of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import TreeSpec

from lightning_spindle.capture import patches
from lightning_spindle.capture.classify import Info
from lightning_spindle.capture.errors import TraceError
from lightning_spindle.capture.measure import Measured
from lightning_spindle.capture.pieces import Constant, GivenRef, ResultRef, Returned
from lightning_spindle.capture.trees import flatten, unflatten

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def beside_loss(step: str, output: Any) -> Any:
    """What a step returns, with None in the place of the loss of a training step."""
    if step != "training_step":
        return output
    return {k: None if k == "loss" else v for k, v in output.items()} if isinstance(output, Mapping) else None


@dataclass
class TracedOutput:
    """The tree that a traced step returned; ``leaves`` are numbers of ``node``'s arguments, or constants.

    ``node`` reads them all, at the end of the step; None where it would read nothing. ``scalars`` are, by
    number, those that are scalars, as a result of the step has to be.
    """

    spec: TreeSpec
    leaves: list[int | Constant]
    node: fx.Node | None
    scalars: dict[int, fx.Node]

    def tree(self, values: Mapping[fx.Node, Any]) -> Any:
        """What the step returns where its nodes have these values."""
        own = [] if self.node is None else fx.node.map_arg(self.node.args, values.__getitem__)
        return unflatten([x.value if isinstance(x, Constant) else own[x] for x in self.leaves], self.spec)

    def text(self) -> str:
        """The part of it that nodes do not show."""
        return f"{self.spec} {self.leaves}"


def traced_output(tracer: fx.Tracer, step: str, output: Any) -> TracedOutput:
    """Adds the node that reads what the step returned.

    Raises:
        TraceError: an object that no trace can make anew in each step.
    """
    flat, spec = flatten(_opened(beside_loss(step, output)))
    leaves: list[int | Constant] = []
    read: list[Any] = []
    scalars: dict[int, fx.Node] = {}
    for leaf in flat:
        if not isinstance(leaf, (fx.Proxy, torch.Tensor)):
            leaves.append(_constant(step, leaf))
            continue
        leaves.append(len(read))
        if isinstance(leaf, fx.Proxy) and is_scalar(leaf):
            scalars[len(read)] = tracer.create_proxy("call_function", patches.as_scalar, (leaf,), {}).node
        read.append(leaf)
    node = tracer.create_proxy("call_function", patches.given, tuple(read), {}).node if read else None
    return TracedOutput(spec, leaves, node, scalars)


def _opened(output: Any) -> Any:
    """``output`` with tuples and lists that operators give as their entries."""
    leaves, spec = flatten(output)
    return unflatten([_entries(leaf) if isinstance(leaf, fx.Proxy) else leaf for leaf in leaves], spec)


def _entries(proxy: fx.Proxy) -> Any:
    shadow = proxy.node.meta.get("shadow")
    if type(shadow) in (tuple, list) and proxy.node.op != "placeholder":
        return type(shadow)(_entries(proxy[i]) for i in range(shadow.__len__()))
    return proxy


def _constant(step: str, value: Any) -> Constant:
    entries = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, _PLAIN) for entry in entries):
        raise TraceError(f"{step} returns a {type(value).__name__}, which is no tensor, number or string")
    return Constant(value)


def is_scalar(value: Any) -> bool:
    """Whether a value that a traced step returns can be a result (``patches.is_scalar``)."""
    if isinstance(value, fx.Proxy):
        return value.node.op != "placeholder" and bool(value.node.meta.get("scalar"))
    return isinstance(value, (bool, int, float))


def require_same(traced: Any, own: Any) -> None:
    """Returns where a traced step returned what the step itself does.

    Raises:
        TraceError: it did not.
    """
    (ours, spec), (theirs, own_spec) = flatten(traced), flatten(own)
    if spec != own_spec or not all(map(_alike, ours, theirs)):
        raise TraceError("the traced step returns something else than the step itself")


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not (a.is_floating_point() or a.is_complex()):
            return torch.equal(a, b)
        return torch.allclose(a.detach(), b.detach(), rtol=1e-4, atol=1e-5, equal_nan=True)
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-4 * abs(b) + 1e-5 or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)


def settle(
    output: TracedOutput,
    results: dict[str, fx.Node],
    infos: Mapping[fx.Node, Info],
    measured: Mapping[fx.Node, Measured],
    task: str,
) -> Returned:
    """Of what a task's step returned, scalars made of shards' rows become results; the rest stays given."""
    if output.node is None:
        return Returned(output.spec, tuple(x for x in output.leaves if isinstance(x, Constant)))
    refs: dict[int, ResultRef] = {}
    for at, node in output.scalars.items():
        if infos[node].tags <= {"mean", "sum"}:
            raw = output.node.args[at]
            assert isinstance(raw, fx.Node)
            results[f"out:{at}"] = node
            refs[at] = ResultRef(f"out:{at}", raw.meta.get("number"))
    left = [at for at in range(len(output.node.args)) if at not in refs]
    output.node.args = tuple(output.node.args[at] for at in left)
    place = {at: i for i, at in enumerate(left)}
    return Returned(
        output.spec,
        tuple(
            x if isinstance(x, Constant) else refs[x] if x in refs else GivenRef(task, place[x])
            for x in output.leaves
        ),
    )
