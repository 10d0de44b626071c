"""``SpindleTask``: a task made of modules that are connected by flows (paper, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn


@dataclass(frozen=True, slots=True)
class Flow:
    """What a module of a task gives on. ``flow["key"]`` and ``flow[0]`` are a part of it."""

    name: str
    path: tuple[str | int, ...] = ()

    def __getitem__(self, key: str | int) -> Flow:
        return Flow(self.name, (*self.path, key))


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    call: Callable[..., Any]
    sources: tuple[str | int | Flow, ...]
    named: tuple[tuple[str, str | int | Flow], ...]


class SpindleTask(LightningModule):
    """A task whose step is a graph of modules, each fed by fields of the batch and by other modules.

    Modules run in the order in which they were added; what the last one gives is the loss, which is
    logged as "loss". The task is a LightningModule: it trains alone, under any strategy, or in a
    ``MultiTaskModule``; modules that tasks share are the same Python object. ``state_dict`` keys are
    ``flows.<name>.…``.

    Args:
        optimizer: makes the optimizer of the parameters; or override ``configure_optimizers``.

    Example::

        task = SpindleTask(partial(torch.optim.AdamW, lr=1e-3))
        image = task.add_flow(vision, "image")
        words = task.add_flow(text, "tokens", mask="mask")
        task.add_flow(contrastive_loss, image, words["pooled"])
    """

    def __init__(
        self, optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    ) -> None:
        super().__init__()
        self.flows = nn.ModuleDict()
        self._calls: list[_Call] = []
        self._optimizer = optimizer

    def add_flow(
        self,
        module: Callable[..., Any],
        *sources: str | int | Flow,
        name: str | None = None,
        **named: str | int | Flow,
    ) -> Flow:
        """Add a module (or a function, such as a loss) that gets ``sources`` as its arguments.

        Args:
            module: called with the sources; the same module may be added several times.
            sources: a field of the batch by its key or position, or what ``add_flow`` returned.
            name: of the flow; by default the class's (a function's own) name in lower case, with a
                number from the second on.
            named: sources of keyword arguments.

        Returns:
            The flow of what the module gives, to be a source of others.

        Raises:
            ValueError: a source is a flow of another task; the name is taken or has a dot; there is
                no source.
        """
        given = (*sources, *named.values())
        if not given:
            raise ValueError("a flow needs a source: a field of the batch, or another flow")
        known = {call.name for call in self._calls}
        for source in given:
            if isinstance(source, Flow) and source.name not in known:
                raise ValueError(f"flow {source.name!r} is not of this task; its flows are {sorted(known)}")
        name = name or self._free_name(module, known)
        if "." in name or name in known or hasattr(nn.ModuleDict, name):
            raise ValueError(f"flow name {name!r}: names are unique, without dots, no method of ModuleDict")
        if isinstance(module, nn.Module):
            self.flows[name] = module
        self._calls.append(_Call(name, module, tuple(sources), tuple(named.items())))
        return Flow(name)

    def _free_name(self, module: Callable[..., Any], known: set[str]) -> str:
        base = getattr(module, "__name__", type(module).__name__).strip("<>").lower()
        return next(n for n in (base, *(f"{base}_{i}" for i in range(2, len(known) + 3))) if n not in known)

    def forward(self, batch: Any) -> dict[str, Any]:
        """What each flow gives, by name."""
        values: dict[str, Any] = {}

        def value_of(source: str | int | Flow) -> Any:
            if not isinstance(source, Flow):
                return batch[source]
            value = values[source.name]
            for key in source.path:
                value = value[key]
            return value

        for call in self._calls:
            arguments = [value_of(source) for source in call.sources]
            keywords = {key: value_of(source) for key, source in call.named}
            values[call.name] = call.call(*arguments, **keywords)
        return values

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Runs the flows; the last one's value is the loss."""
        if not self._calls:
            raise ValueError("the task has no flows; add them with add_flow")
        loss = self.forward(batch)[self._calls[-1].name]
        if isinstance(loss, Mapping):
            loss = loss["loss"]
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of all parameters that take part in training.

        Raises:
            ValueError: none was given.
        """
        if self._optimizer is None:
            raise ValueError("give SpindleTask(optimizer=...), or override configure_optimizers")
        return self._optimizer(p for p in self.parameters() if p.requires_grad)
