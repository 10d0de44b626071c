"""What a trace replaces for its duration, and the helpers that traced graphs call."""

from __future__ import annotations

import builtins
import linecache
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from lightning.pytorch import LightningModule
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from lightning_spindle.capture.blocks import is_metric
from lightning_spindle.capture.errors import TraceError

if TYPE_CHECKING:
    from lightning_spindle.capture.tracer import StepTracer

operator_getitem = operator.getitem

_FACTORIES = (
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
    "tensor", "tril_indices", "triu_indices", "zeros", "range", "normal",
)  # fmt: skip
_RANDOM = ("rand", "randint", "randn", "randperm", "normal", "bernoulli", "multinomial")
_TRAPPED = (
    "trainer", "fabric", "current_epoch", "global_step", "global_rank", "local_rank", "logger", "loggers",
)  # fmt: skip


def as_scalar(value: Any) -> torch.Tensor:
    """A result of a step as a tensor."""
    return (
        value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=torch.get_default_dtype())
    )


def length(value: Any) -> int:
    """``len``, as a traced graph calls it."""
    return len(value)


def reads_structure(node: fx.Node) -> bool:
    """Whether a node asks for what all batches have in common: type, device, number of dimensions."""
    if node.op == "call_method":
        return node.target in ("dim", "ndimension", "is_floating_point", "is_complex")
    return node.target is getattr and node.args[1] in (
        "ndim", "dtype", "device", "is_cuda", "is_nested", "layout", "is_sparse", "is_quantized",
    )  # fmt: skip


def is_asserted(frame: FrameType | None) -> bool:
    """Whether the innermost user's line below ``frame`` is an assert statement."""
    while frame is not None and "/torch/fx/" in frame.f_code.co_filename.replace("\\", "/"):
        frame = frame.f_back
    if frame is None:
        return False
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("assert ")


def update_metric(metric: Any, *args: Any, **kwargs: Any) -> None:
    """``metric.update(...)``, as a traced graph calls it."""
    metric.update(*args, **kwargs)


@contextmanager
def tracing(tracer: StepTracer, model: nn.Module) -> Iterator[None]:
    """Inside, what plain Python would compute on the spot becomes nodes, and trainer state is trapped."""
    with ExitStack() as stack:
        for name in _FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, _factory(getattr(torch, name))))
        stack.enter_context(mock.patch.object(builtins, "len", _len(builtins.len)))
        stack.enter_context(trapped_trainer())
        for metric in (m for m in model.modules() if is_metric(m)):
            stack.enter_context(_recorded(tracer, metric))
        stack.enter_context(_ModelTensors(tracer))
        yield


@contextmanager
def trapped_trainer() -> Iterator[None]:
    """Inside, reading trainer state from a LightningModule raises."""
    with ExitStack() as stack:
        for name in _TRAPPED:
            stack.enter_context(mock.patch.object(LightningModule, name, _trap(name)))
        yield


def _trap(name: str) -> property:
    def read(_: LightningModule) -> Any:
        raise TraceError(f"the step reads self.{name}, which changes from step to step")

    return property(read)


def _proxy_in(tree: Any) -> fx.Proxy | None:
    if isinstance(tree, fx.Proxy):
        return tree
    if isinstance(tree, (tuple, list)):
        return next((p for p in map(_proxy_in, tree) if p is not None), None)
    if isinstance(tree, dict):
        return _proxy_in(tuple(tree.values()))
    return None


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        proxy = _proxy_in((args, kwargs))
        if proxy is None:
            return original(*args, **kwargs)
        return proxy.tracer.create_proxy("call_function", original, args, kwargs)

    return make


def _len(original: Callable[[Any], int]) -> Callable[[Any], Any]:
    def len_or_node(value: Any) -> Any:
        if isinstance(value, fx.Proxy) and not isinstance(value.node.meta.get("shadow"), (tuple, list)):
            return value.tracer.create_proxy("call_function", length, (value,), {})
        return original(value)

    return len_or_node


@contextmanager
def _recorded(tracer: StepTracer, metric: nn.Module) -> Iterator[None]:
    """Inside, ``metric.update`` becomes a node and reading the state raises."""

    def update(*args: Any, **kwargs: Any) -> None:
        target = tracer.create_proxy("get_attr", tracer.path_of_module(metric), (), {})
        tracer.create_proxy("call_function", update_metric, (target, *args), kwargs)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise TraceError(f"the step computes or resets the metric {type(metric).__name__} itself")

    own = metric.__dict__
    replaced = {"update": update, "compute": refuse, "reset": refuse}
    before = {name: own[name] for name in replaced if name in own}
    own.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del own[name]
        own.update(before)


class _ModelTensors(TorchFunctionMode):
    """Parameters reached by ``self.parameters()`` and random factories become nodes too."""

    def __init__(self, tracer: StepTracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.random = {getattr(torch, name) for name in _RANDOM}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.tracer.shadowing:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "size", "dim", "numel", "__set__", "stride", "__hash__", "__repr__"):
            return func(*args, **kwargs)
        owned: list[Any] = []

        def swap(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and self.tracer.owns(value):
                owned.append(value)
                return self.tracer.fetch(value)
            return value

        args, kwargs = fx.node.map_aggregate(args, swap), fx.node.map_aggregate(kwargs, swap)
        if owned or (func in self.random and _proxy_in((args, kwargs)) is None):
            if isinstance(getattr(torch.Tensor, name, None), type(torch.Tensor.add)) and not hasattr(
                torch, name
            ):
                return self.tracer.create_proxy("call_method", name, args, kwargs)
            return self.tracer.create_proxy("call_function", func, args, kwargs)
        return func(*args, **kwargs)


def _encoder_layers(
    stack: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    """``nn.TransformerEncoder.forward`` layer by layer (its own looks for a nested-tensor path)."""
    for layer in stack.layers:
        src = layer(src, src_mask=mask, is_causal=bool(is_causal), src_key_padding_mask=src_key_padding_mask)
    return src if stack.norm is None else stack.norm(src)


def _decoder_layers(
    stack: nn.TransformerDecoder,
    tgt: Any,
    memory: Any,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> Any:
    """``nn.TransformerDecoder.forward`` layer by layer."""
    for layer in stack.layers:
        tgt = layer(
            tgt,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=bool(tgt_is_causal),
            memory_is_causal=memory_is_causal,
        )
    return tgt if stack.norm is None else stack.norm(tgt)


LAYER_STACKS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.TransformerEncoder: _encoder_layers,
    nn.TransformerDecoder: _decoder_layers,
}
