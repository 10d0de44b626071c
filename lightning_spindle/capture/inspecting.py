"""What a step does to the model in its real iterations, where it would be right on one rank only.

In capture a step is run with everything put back afterwards (``untouched``). One that needs the trainer
cannot be, and what another does may depend on what its code remembers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from lightning_spindle.capture import untouched
from lightning_spindle.capture.blocks import is_metric


@contextmanager
def inspected(model: nn.Module, thoroughly: bool) -> Iterator[untouched.Effects]:
    """What is yielded says afterwards which parameters and containers of ``model`` were changed inside.

    ``thoroughly``: writes that a parameter does not know of (to ``p.data``) are seen too, which takes a look
    at each operation.
    """
    effects = untouched.Effects()
    parameters = {name: (p, untouched.memory(p), p._version) for name, p in model.named_parameters()}
    containers = _containers(model)
    with untouched.kept_parameters(model) if thoroughly else nullcontext(effects.rewritten) as written:
        yield effects
    changed = [
        n for n, (p, memory, v) in parameters.items() if untouched.memory(p) != memory or p._version != v
    ]
    effects.rewritten[:] = dict.fromkeys([*written, *changed])
    effects.collected.extend(
        name for name, (value, entries) in containers.items() if not untouched.same_entries(value, entries)
    )


def _containers(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Lists, dicts and sets of the user's modules, with copies."""
    return {
        f"{path}.{name}": (value, copy.copy(value))
        for path, module in model.named_modules()
        if not is_metric(module) and not type(module).__module__.startswith("torch.")
        for name, value in vars(module).items()
        if name not in untouched.INTERNAL and isinstance(value, (list, dict, set))
    }
