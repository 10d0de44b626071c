"""Which module calls are operators."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torchmetrics import Metric, MetricCollection

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_ENTERED = (nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder)


def is_metric(module: nn.Module) -> bool:
    """A torchmetrics metric or collection, whose state must be the same on each rank."""
    return isinstance(module, (Metric, MetricCollection))


def find_blocks(model: nn.Module, operators: tuple[type[nn.Module], ...] = ()) -> frozenset[nn.Module]:
    """Modules that a user would call a layer: instances of ``operators``, and repeated children.

    Children of a ModuleList or Sequential repeat where at least two have the same class and
    parameters; a ModuleList of one composite module counts too, it is a stack of depth one. The
    outermost repetition counts, except that a torch container is entered where it repeats layers
    itself, as is a module that holds one of ``operators``.
    """
    blocks: set[nn.Module] = set()
    _walk(model, operators, blocks)
    return frozenset(blocks)


def _walk(module: nn.Module, operators: tuple[type[nn.Module], ...], blocks: set[nn.Module]) -> None:
    repeated = set(_repeated(module)) if isinstance(module, _CONTAINERS) else set()
    for child in module.children():
        if is_metric(child):
            continue
        if isinstance(child, operators) or (child in repeated and not _is_entered(child, operators)):
            blocks.add(child)
        else:
            _walk(child, operators, blocks)


def _repeated(container: nn.Module) -> list[nn.Module]:
    owning = [c for c in container.children() if any(True for _ in c.parameters())]
    counts = Counter(type(c) for c in owning)
    stack = isinstance(container, nn.ModuleList)
    return [c for c in owning if counts[type(c)] > 1 or (stack and any(True for _ in c.children()))]


def _is_entered(module: nn.Module, operators: tuple[type[nn.Module], ...]) -> bool:
    if operators and any(isinstance(m, operators) for m in module.modules()):
        return True
    if not isinstance(module, (*_CONTAINERS, *_ENTERED)):
        return False
    inner = [m for m in module.modules() if isinstance(m, _CONTAINERS)]
    return any(any(True for _ in layer.children()) for m in inner for layer in _repeated(m))


def is_leaf(module: nn.Module, blocks: frozenset[nn.Module]) -> bool:
    """Whether a call of ``module`` is one node of the trace."""
    if module in blocks or is_metric(module):
        return True
    if isinstance(module, _CONTAINERS + _ENTERED):
        return False
    if type(module).__module__.startswith("torch.nn"):
        return True
    return not any(True for _ in module.children()) and any(True for _ in module.parameters())
