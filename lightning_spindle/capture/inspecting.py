"""What a step does to the model in its real iterations.

In capture a step is run with everything put back afterwards (``untouched``). One that needs the trainer
cannot be, and what another does may depend on what its code remembers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_spindle.capture import untouched
from lightning_spindle.capture.contents import INTERNAL, Contents
from lightning_spindle.capture.writes import memory

_REGISTRIES = ("_modules", "_parameters", "_buffers")
_LIGHTNING = frozenset(vars(LightningModule()))


@contextmanager
def inspected(model: nn.Module, thoroughly: bool) -> Iterator[untouched.Effects]:
    """What is yielded says afterwards what was changed inside: parameters, attributes, what is registered.

    ``thoroughly``: writes that a tensor does not know of (through ``.data``) are seen too, which takes a look
    at each operation.
    """
    effects = untouched.Effects()
    parameters = {name: (p, memory(p), p._version) for name, p in model.named_parameters()}
    registered = _registered(model)
    effects.contents = contents = Contents(model, clones=False, skipped=_skipped)
    kept = untouched.kept_parameters(model) if thoroughly else nullcontext(effects.rewritten)
    with kept as written, contents.watched(thoroughly):
        yield effects
    changed = [n for n, (p, where, v) in parameters.items() if memory(p) != where or p._version != v]
    effects.rewritten[:] = dict.fromkeys([*written, *changed])
    effects.registered += _different(registered, _registered(model))
    effects.changes += contents.changes()


def _skipped(module: nn.Module) -> Collection[str]:
    """Lightning keeps its own attributes; weights with a norm are made anew from their parts in each call.

    The train flag may be changed by a step.
    """
    own = INTERNAL | _LIGHTNING if isinstance(module, LightningModule) else INTERNAL
    normed = {name[: name.rindex("_")] for name in module._parameters if name.endswith(("_g", "_orig"))}
    return (own | normed) - {"training"}


def _registered(model: nn.Module) -> dict[str, Any]:
    """Children by name; names of parameters and buffers, whose values are looked at elsewhere."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for registry in _REGISTRIES:
            for name, value in vars(module)[registry].items():
                found[f"{path}.{name}".lstrip(".")] = value if registry == "_modules" else registry
    return found


def _different(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **now} if before.get(name) is not now.get(name)]
