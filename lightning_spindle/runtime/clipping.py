"""Clipping by the norm of all gradients, of which each rank has those of the parameters that it holds.

Lightning leaves it to the precision plugin, whether the Trainer's ``gradient_clip_val`` asks for it or
``self.clip_gradients`` in a hook.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch import nn

from lightning_spindle.runtime.state import LocalisedModel
from lightning_spindle.runtime.transport import Transport, everyone

_METHOD = "clip_grad_by_norm"


@contextmanager
def clipping_together(
    plugin: Precision, state: LocalisedModel, transport: Transport, device: torch.device
) -> Iterator[None]:
    """Inside, where the plugin clips by norm, all ranks do together; afterwards it is as it was.

    Raises:
        ValueError: the plugin has a way of its own to clip by norm.
    """
    require_plain(plugin)
    own = vars(plugin).get(_METHOD)

    def clip(optimizer: Any, clip_val: float) -> None:
        held = held_of(plugin.main_params(optimizer), state)
        clip_by_norm(held, counted(held, state, transport.rank), clip_val, transport, device)

    setattr(plugin, _METHOD, clip)
    try:
        yield
    finally:
        delattr(plugin, _METHOD)
        if own is not None:
            setattr(plugin, _METHOD, own)


def require_plain(plugin: Precision) -> None:
    """Raises ValueError where a precision plugin's class has a way of its own to clip by norm."""
    if getattr(type(plugin), _METHOD) is not getattr(Precision, _METHOD):
        raise ValueError(
            f"the precision plugin {type(plugin).__name__} clips gradients by norm in its own way, which "
            "SpindleStrategy would replace on several ranks: leave clip_grad_by_norm to Lightning's Precision"
        )


def held_of(parameters: Iterable[nn.Parameter], state: LocalisedModel) -> dict[str, nn.Parameter]:
    """Those of ``parameters`` that this rank holds, by name."""
    listed = {id(p) for p in parameters}
    return {n: p for n, p in state.named_parameters() if id(p) in listed and state.holds(n)}


def counted(held: Mapping[str, nn.Parameter], state: LocalisedModel, rank: int) -> list[nn.Parameter]:
    """Those that ``rank`` counts: each is counted by one of its holders."""
    return [p for name, p in held.items() if state.owner(name) == rank]


def clip_by_norm(
    held: Mapping[str, nn.Parameter],
    counted: Iterable[nn.Parameter],
    clip_val: float,
    transport: Transport,
    device: torch.device,
) -> None:
    """Scales gradients so that the norm of those of all ranks is at most ``clip_val`` (collective).

    Guarantees: the numbers of ``torch.nn.utils.clip_grad_norm_`` in one process, up to rounding; every rank
    scales by the same number.

    Args:
        held: this rank's parameters, whose gradients are scaled.
        counted: those of them whose gradients this rank adds to the norm.

    Raises:
        ValueError: on every rank, where ranks clip to different norms.
    """
    own = torch.nn.utils.get_total_norm([p.grad for p in counted if p.grad is not None])
    table = torch.zeros(transport.size, 2, dtype=torch.float64, device=device)
    table[transport.rank] = torch.stack([own.double().square().to(device), table.new_tensor(clip_val)])
    transport.all_reduce(table, everyone(transport)).wait()
    require_same(table[:, 1].tolist())
    torch.nn.utils.clip_grads_with_norm_(held.values(), clip_val, table[:, 0].sum().sqrt())


def require_same(norms: Sequence[float]) -> None:
    """Raises ValueError where ``norms``, to which ranks clip, are not equal."""
    if len({*norms}) > 1:
        raise ValueError(
            f"ranks clip gradients to different norms (by rank: {list(norms)}). Every rank must clip in the "
            "same step to the same norm: let it not depend on the rank, or on what one rank alone has"
        )
