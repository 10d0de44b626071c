"""Running single nodes of a trace with other tensors than the model's own.

Nothing of the user's is touched: parameters and buffers are replaced by copies
(``replaced_tensors``), metrics are deep copies, generators are restored (``kept_generators``).
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from lightning_spindle.capture import patches
from lightning_spindle.capture.blocks import is_metric

State = dict[str, torch.Tensor]


class Holder(nn.Module):
    """Stands for the model in a trace: its own modules and parameters, and room for constants."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._modules = model._modules
        self._parameters = model._parameters
        self._buffers = model._buffers


class NoisyParameters:
    """Copies of parameters with noise, made for one node at a time: a model's size more is much.

    Noise, because zero-initialised layers must not make all rows alike; the same for a parameter each time.
    """

    def __init__(self, holder: Holder, dtype: torch.dtype | None) -> None:
        self._holder, self._dtype = holder, dtype
        self._seeds = {id(p): seed for seed, p in enumerate(holder.parameters())}

    @contextmanager
    def of(self, node: fx.Node) -> Iterator[None]:
        """Inside, the parameters that ``node`` itself uses are their copies."""
        modules, tables = self._used(node)
        before = [dict(table) for table in tables]
        copies: dict[int, torch.Tensor] = {}
        try:
            for table in tables:
                for name, p in table.items():
                    if p is not None:
                        table[name] = copies.setdefault(id(p), self._noisy(p))
            with flat_weights(modules):
                yield
        finally:
            for table, own in zip(tables, before, strict=True):
                table.update(own)

    def _used(self, node: fx.Node) -> tuple[list[nn.Module], list[dict[str, Any]]]:
        if node.op == "call_module":
            modules = list(self._holder.get_submodule(str(node.target)).modules())
            return modules, [m._parameters for m in modules]
        if node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            owner = self._holder.get_submodule(path)
            return [], [owner._parameters] if name in owner._parameters else []
        return [], []

    def _noisy(self, parameter: torch.Tensor) -> torch.Tensor:
        value = _copied(parameter, self._dtype)
        if value.is_floating_point():
            draw = torch.Generator().manual_seed(self._seeds[id(parameter)])
            value += 0.05 * torch.randn(value.shape, generator=draw, dtype=torch.float32).to(value)
        return value


def copied_buffers(holder: Holder, dtype: torch.dtype | None) -> State:
    """Copies of all buffers, floats as ``dtype``."""
    return {name: _copied(buffer, dtype) for name, buffer in holder.named_buffers()}


def _copied(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    copied = tensor.detach().clone()
    return copied.to(dtype) if dtype is not None and copied.is_floating_point() else copied


def plain_state(model: nn.Module, requires_grad: bool) -> State:
    """The parameters' own values (shared memory, gradients apart) and copies of buffers."""
    state = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        state[name] = value.requires_grad_(requires_grad and value.is_floating_point())
    return state


def written_buffers(holder: nn.Module, before: State, versions: Mapping[str, int]) -> State:
    """The buffers that are other tensors than those of ``before``, or were changed since ``versions``."""
    now = dict(holder.named_buffers())
    found = {n: now[n] for n in versions if n in now and now[n] is not before[n]}
    return found | {
        n: before[n] for n, v in versions.items() if now.get(n) is before[n] and before[n]._version != v
    }


def versions_of_buffers(holder: nn.Module, state: State) -> dict[str, int]:
    """For ``written_buffers``."""
    return {name: state[name]._version for name, _ in holder.named_buffers()}


def with_tensors(holder: Holder, state: State, call: Callable[[], Any]) -> Any:
    """``call()`` while the model's parameters and buffers are those of ``state``, where it has them.

    ``torch.func.functional_call`` does not put modules back that have two names.
    """
    names = {id(t): n for n, t in [*holder.named_buffers(), *holder.named_parameters()]}
    tables = [t for m in holder.modules() for t in (m._parameters, m._buffers)]
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            own_names = {k: names[id(t)] for k, t in table.items() if t is not None}
            table.update({k: state[name] for k, name in own_names.items() if name in state})
        with flat_weights(holder.modules()):
            return call()
    finally:
        for table, own in zip(tables, before, strict=True):
            table.clear()
            table.update(own)


@contextmanager
def flat_weights(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Recurrent modules keep lists of their weights, which they renew when the weights were exchanged."""
    recurrent = [m for m in modules if isinstance(m, nn.RNNBase)]
    kept = [{k: v for k, v in vars(m).items() if k.startswith("_flat_weight")} for m in recurrent]
    try:
        yield
    finally:
        for m, lists in zip(recurrent, kept, strict=True):
            vars(m).update(lists)


@contextmanager
def kept_generators(seed: int) -> Iterator[None]:
    """Inside, all generators start from ``seed``; afterwards they are as before."""
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(
        devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    ):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, factories make ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def run_node(
    holder: Holder, node: fx.Node, args: Any, kwargs: Any, constants: torch.dtype | None = None
) -> Any:
    """One node's value. Metrics are run on copies; float constants are read as ``constants``."""
    if node.op == "get_attr":
        value: Any = holder
        for atom in str(node.target).split("."):
            value = getattr(value, atom)
        if constants is not None and isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.to(constants)
        return value
    if node.op == "call_function":
        if node.target is patches.update_metric:
            args = (copy.deepcopy(args[0]), *args[1:])
        return node.target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    module = holder.get_submodule(str(node.target))
    if is_metric(module):
        module = copy.deepcopy(module)
    return module(*args, **kwargs)


def filled(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> tuple[Any, Any]:
    """A node's arguments with values in the place of nodes."""
    return fx.node.map_arg(node.args, value_of), fx.node.map_arg(node.kwargs, value_of)


_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout,
}  # fmt: skip
_DRAWS: dict[Any, str] = {
    torch.rand: "new", torch.randn: "new", torch.rand_like: "like", torch.randn_like: "like",
    torch.bernoulli: "like", torch.normal: "like", torch.randperm: "flip", torch.randint: "low",
    torch.Tensor.bernoulli_: "fill", torch.Tensor.normal_: "fill", torch.Tensor.uniform_: "fill",
    torch.Tensor.bernoulli: "like", torch.Tensor.exponential_: "fill", torch.Tensor.random_: "zero",
    torch.randint_like: "zeros", torch.nn.init.normal_: "fill", torch.nn.init.uniform_: "fill",
}  # fmt: skip


class Deterministic(TorchFunctionMode):
    """Makes random draws equal for each row (dropout the identity), and notes that there were some.

    A mean cross-entropy that could meet ignored labels or class weights is given one ignored
    label in each part, so that it shows itself as what it is: no mean over rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drew = False
        self.rows = 0
        self._suspended = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, functions do what they always do."""
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._suspended:
            return func(*args, **kwargs)
        if func in _DROPOUTS:
            rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
            self.drew |= bool(training and rate)
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
            self.drew |= rate > 0
            args, kwargs = args[:4], {**kwargs, "dropout_p": 0.0} if len(args) < 5 else kwargs
            return func(*args, **kwargs)
        if func in (F.cross_entropy, F.nll_loss):
            args, kwargs = _with_an_ignored_label(args, kwargs, self.rows)
            return func(*args, **kwargs)
        kind = _DRAWS.get(func)
        if kind is None:
            return func(*args, **kwargs)
        self.drew = True
        return _same_for_each_row(kind, func, args, kwargs)


def _same_for_each_row(kind: str, func: Any, args: Any, kwargs: Any) -> Any:
    if kind == "flip":
        return func(*args, **kwargs).sort().values.flip(0)
    if kind == "low":
        return torch.zeros_like(func(*args, **kwargs))
    if kind in ("zero", "zeros"):
        return args[0].zero_() if kind == "zero" else torch.zeros_like(args[0])
    result = args[0] if kind == "fill" else func(*args, **kwargs)
    if result.dim() < 2:
        return result.fill_(0.5) if kind == "fill" else torch.full_like(result, 0.5)
    last = torch.arange(result.shape[-1], device=result.device) * 0.7 + 0.3
    pattern = last.sin().abs().to(result.dtype).expand(result.shape)
    return result.copy_(pattern) if kind == "fill" else pattern.clone()


def _with_an_ignored_label(args: Any, kwargs: Any, rows: int) -> tuple[Any, Any]:
    named = dict(zip(("input", "target", "weight"), args, strict=False)) | kwargs
    if len(args) > 3:
        return args, kwargs
    target, ignored = named["target"], named.get("ignore_index", -100)
    plain = ignored == -100 and named.get("weight") is None and target.numel() == rows
    if named.get("reduction", "mean") != "mean" or target.is_floating_point() or plain or target.numel() < 2:
        return args, kwargs
    target = target.clone()
    target.reshape(-1)[:1] = ignored
    return (), {**named, "target": target}


@contextmanager
def classification(mode: Deterministic, dtype: torch.dtype | None) -> Iterator[None]:
    """The setting in which nodes are run to be classified."""
    with ExitStack() as stack:
        stack.enter_context(kept_generators(0))
        stack.enter_context(default_dtype(dtype))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(mode)
        yield


def perturbed(leaves: Sequence[Any], dtype: torch.dtype | None) -> list[Any]:
    """The batch with its coincidences removed: alike floats, full masks, equal lengths.

    Floats shrink by up to 5 % (they keep their sign and stay within [0, 1] where they were). A
    mask of ones alone, or integers that are all equal and above zero, change in some rows.
    """
    generator = torch.Generator().manual_seed(1)
    return [_perturb(leaf, dtype, generator) for leaf in leaves]


def _perturb(leaf: Any, dtype: torch.dtype | None, generator: torch.Generator) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return (
            leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and dtype else leaf
        )
    if leaf.is_floating_point():
        leaf = leaf.to(dtype) if dtype is not None else leaf
        return leaf * (1 - 0.05 * torch.rand(leaf.shape, generator=generator).to(leaf))
    if leaf.numel() < 2 or leaf.is_complex() or not bool((leaf == leaf.reshape(-1)[0]).all()):
        return leaf
    if not bool(leaf.reshape(-1)[0] > 0):
        return leaf
    changed = torch.rand(leaf.shape, generator=generator).to(leaf.device) < 0.4
    if leaf.dim() > 1:
        changed[..., 0] = False
    else:
        changed[-1], changed[0] = True, False
    return torch.where(changed, torch.zeros_like(leaf) if leaf.dtype is torch.bool else leaf - 1, leaf)
