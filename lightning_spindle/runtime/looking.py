"""Gradients as user code sees them, of which each rank has those of the parameters that it holds.

A norm, or a test for infinities, over the part that is here would give each rank another number. So where one
process has a gradient and this rank has none, there is a meta tensor, which raises when it is read, as the
parameter itself does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from lightning_spindle.runtime.objects import broadcast_tensors
from lightning_spindle.runtime.optimizers import before_step
from lightning_spindle.runtime.state import LocalisedModel, LocalisedOptimizer
from lightning_spindle.runtime.transport import Transport, everyone


class Gradients:
    """What of the gradients user code sees, from a backward that summed them to the next one.

    Until the optimizer steps its groups list all parameters, as in one process; where it does they are this
    rank's own again.

    Args:
        optimizers: those of the fit, as they were localised.
    """

    def __init__(
        self,
        state: LocalisedModel,
        optimizers: Sequence[LocalisedOptimizer],
        transport: Transport,
        device: torch.device,
    ) -> None:
        self._state, self._optimizers = state, optimizers
        self._transport, self._device = transport, device
        self._parameters = dict(state.named_parameters())
        self._groups = ExitStack()
        self._shown = False
        self._aside: dict[str, torch.Tensor] | None = None
        self._handles = [before_step(o.optimizer, self.own_groups) for o in optimizers]

    def show(self) -> None:
        """Gradients have been summed: shows those of all parameters (collective)."""
        self.own_groups()
        self._take_back()
        self._mark()
        self._shown = True
        for optimizer in self._optimizers:
            self._groups.enter_context(optimizer.completed())

    def own_groups(self) -> None:
        """The optimizers' groups list what is here, for it to be stepped."""
        self._groups.close()

    def hide(self) -> None:
        """Gradients are about to change: shows those that are here.

        Those that were summed before, and not set to None since, are set aside until the next are summed:
        they are the same on all holders, and would be summed again.
        """
        self.own_groups()
        self._shown = False
        for _, parameter in self._elsewhere():
            parameter.grad = None
        if self._aside is None:
            here = {n: p for n, p in self._parameters.items() if self._state.holds(n)}
            self._aside = {n: p.grad for n, p in here.items() if p.grad is not None}
            for name in self._aside:
                here[name].grad = None

    def _take_back(self) -> None:
        for name, before in (self._aside or {}).items():
            since = self._parameters[name].grad
            self._parameters[name].grad = before if since is None else since.add_(before)
        self._aside = None

    def end(self) -> None:
        """Leaves optimizers as they were."""
        self.hide()
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Inside, this rank has all parameters, and the gradients that are shown (collective)."""
        before = self._state.complete
        with self._state.completed():
            if self._shown and not before:
                self._complete()
            yield
        if self._shown and not before:
            self._mark()

    def _mark(self) -> list[str]:
        """Gives what is elsewhere gradients where there are any: meta ones, while the parameters are."""
        there = self._there()
        known = {*there}
        for name, parameter in self._elsewhere():
            parameter.grad = torch.empty_like(parameter) if name in known else None
        return there

    def _complete(self) -> None:
        there = self._mark()
        for owner in everyone(self._transport):
            own = [self._parameters[n].grad for n in there if self._state.owner(n) == owner]
            broadcast_tensors([g for g in own if g is not None], self._transport, owner)

    def _elsewhere(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(n, p) for n, p in self._parameters.items() if not self._state.holds(n)]

    def _there(self) -> list[str]:
        """Of the parameters that not all ranks hold, those that have a gradient on their holders."""
        rank = self._transport.rank
        parted = [name for name in self._parameters if not self._state.shared(name)]
        if not parted:
            return []
        owned = [self._state.owner(n) == rank and self._parameters[n].grad is not None for n in parted]
        table = torch.tensor(owned, dtype=torch.uint8, device=self._device)
        self._transport.all_reduce(table, everyone(self._transport)).wait()
        return [name for name, there in zip(parted, table.tolist(), strict=True) if there]
