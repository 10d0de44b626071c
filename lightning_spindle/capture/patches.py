"""What a trace replaces for its duration, and the helpers that traced graphs call."""

from __future__ import annotations

import builtins
import linecache
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from lightning.fabric.utilities.apply_func import convert_to_tensors
from lightning.pytorch import LightningModule
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from lightning_spindle.capture.blocks import is_metric
from lightning_spindle.capture.errors import TraceError

if TYPE_CHECKING:
    from lightning_spindle.capture.tracer import StepTracer

operator_getitem = operator.getitem
_INNER = (str(Path(torch.__file__).parent), str(Path(__file__).parent))

_FACTORIES = (
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
    "tensor", "tril_indices", "triu_indices", "zeros", "range", "normal", "finfo", "iinfo",
)  # fmt: skip
_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__
_RANDOM = ("rand", "randint", "randn", "randperm", "normal", "bernoulli", "multinomial")
_TRAPPED = (
    "trainer", "fabric", "current_epoch", "global_step", "global_rank", "local_rank", "logger", "loggers",
)  # fmt: skip


def as_scalar(value: Any) -> torch.Tensor:
    """A result of a step as a tensor; a number with all of its digits."""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=torch.float64)


def given(*values: Any) -> tuple[Any, ...]:
    """What a step returns, as every rank is given it."""
    return values


def is_scalar(value: Any) -> bool:
    """Whether a value is a number, or a tensor without dimensions that float64 holds."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, (bool, int, float))


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


def reads_sizes(node: fx.Node) -> bool:
    """Whether a node asks for sizes or a train flag: a branch on it can be held against other batches."""
    if node.op == "call_method":
        return node.target in ("size", "numel", "nelement")
    return node.target in (length, is_training) or (node.target is getattr and node.args[1] == "shape")


def expect(condition: Any, taken: bool, message: str) -> None:
    """Raise where a traced branch would have gone the other way.

    Raises:
        RuntimeError: ``condition`` is not what it was on the example.
    """
    if bool(condition) != taken:
        raise RuntimeError(message)


def is_training(module: nn.Module) -> bool:
    """``module.training``, as a traced graph reads it."""
    return module.training


def line_of(frame: FrameType | None) -> str:
    """The innermost line below ``frame`` that is neither torch's nor capture's, ``file:line``."""
    while frame is not None and (
        frame.f_code.co_filename.startswith(_INNER) or frame.f_code.co_filename.startswith("<")
    ):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


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
        stack.enter_context(mock.patch.object(nn.Module, "training", _flag(tracer), create=True))
        for owner in {_defines_call(type(m)) for m in model.modules()} - {nn.Module}:
            stack.enter_context(mock.patch.object(owner, "__call__", _own_call(tracer, owner.__call__)))
        for metric in (m for m in model.modules() if is_metric(m)):
            stack.enter_context(_recorded(tracer, metric))
        stack.enter_context(_ModelTensors(tracer))
        yield


@contextmanager
def trapped_trainer() -> Iterator[None]:
    """Inside, reading trainer state from a LightningModule raises; ``all_gather`` has gathered already."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(LightningModule, "all_gather", _gathered))
        for name in _TRAPPED:
            stack.enter_context(mock.patch.object(LightningModule, name, _trap(name)))
        yield


def _gathered(module: LightningModule, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
    """As in one process: a step's rows are those of the whole batch."""
    return convert_to_tensors(data, device=module.device)


def _trap(name: str) -> property:
    def read(_: LightningModule) -> Any:
        raise TraceError(f"the step reads self.{name}, which changes from step to step")

    return property(read)


def _flag(tracer: StepTracer) -> property:
    """``module.training`` of a module that is traced through is a node, so that it stays live."""

    def read(module: nn.Module) -> Any:
        own = vars(module)["training"]
        return own if tracer.shadowing else tracer.flag(module, own)

    def write(module: nn.Module, value: bool) -> None:
        vars(module)["training"] = value

    return property(read, write)


def _defines_call(kind: type) -> Any:
    return next(c for c in kind.__mro__ if "__call__" in vars(c))


def _own_call(tracer: StepTracer, original: Callable[..., Any]) -> Callable[..., Any]:
    """A ``__call__`` of a module's own (checkpointing layers) belongs to the operator where there is one."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not tracer.shadowing and tracer.is_leaf_module(module, ""):
            return tracer.call_module(module, partial(original, module), args, kwargs)
        return original(module, *args, **kwargs)

    return call


def assigned(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """``tensor`` after ``tensor[index] = value``, which stays as it is."""
    changed = tensor.clone()
    changed[index] = value
    return changed


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
        _refuse_leaked((args, kwargs))
        name = getattr(func, "__name__", "")
        if name == "__get__" and func == _REQUIRES_GRAD and self.tracer.owns(args[0]):
            return self.tracer.is_trainable(self.tracer.name_of(args[0]))
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


def _refuse_leaked(tree: Any) -> None:
    """Values of shadow runs are for capture alone; only forward hooks let the user's code see them."""

    def look(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_inference():
            raise TraceError("a forward hook hands out values from inside an operator")
        return value

    fx.node.map_aggregate(tree, look)
