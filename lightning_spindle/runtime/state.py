"""Localisation (paper, 3.6 step 1): each rank keeps the parameters that it uses.

The other parameters become meta tensors in place: the Parameter objects stay the same, so
that ties, optimizer groups and the user's own references hold, while reading a value that
is not here raises instead of giving a wrong number.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_spindle.graph import Parameter
from lightning_spindle.program import owners
from lightning_spindle.runtime.objects import broadcast_object, broadcast_tensors, gather_objects
from lightning_spindle.runtime.transport import Transport, everyone

_STATE_TAG = 0


class LocalisedModel:
    """A model of which each rank holds a part.

    Args:
        model: complete and equal on all ranks.
        held: parameter to the ranks that hold it; a parameter not named stays on all.
        written: buffer to the one rank whose operators write it.
    """

    def __init__(
        self,
        model: nn.Module,
        held: Mapping[str, tuple[int, ...]],
        written: Mapping[str, int],
        transport: Transport,
        device: torch.device,
    ) -> None:
        self._model = model
        self._transport = transport
        self._device = device
        self._written = dict(sorted(written.items()))
        self._held = {name: held.get(name, everyone(transport)) for name, _ in model.named_parameters()}
        self._owners: dict[str, int] = {}
        self._complete = True

    @property
    def complete(self) -> bool:
        """Whether this rank has every parameter."""
        return self._complete

    @property
    def held(self) -> Mapping[str, tuple[int, ...]]:
        """Parameter to the ranks that hold it."""
        return self._held

    def grow(
        self, held: Mapping[str, tuple[int, ...]], written: Mapping[str, int]
    ) -> dict[str, tuple[int, ...]]:
        """Adds holders of parameters, and buffers that are written; while the model is complete.

        Returns:
            The earlier holders of the parameters that got new ones.

        Raises:
            ValueError: a buffer that is written on another rank.
        """
        assert self._complete
        for name, rank in written.items():
            if self._written.get(name, rank) != rank:
                raise ValueError(
                    f"buffer {name} is written on rank {self._written[name]}, and would be on rank {rank} too"
                )
        grown = {n: tuple(sorted({*self._held[n], *ranks})) for n, ranks in held.items()}
        before = {n: self._held[n] for n, ranks in grown.items() if ranks != self._held[n]}
        if before:
            self._held = self._held | grown
        self._written = dict(sorted((self._written | dict(written)).items()))
        return before

    @property
    def owners(self) -> Mapping[str, int]:
        """Parameter to the only one of its holders that steps it; a parameter not named is stepped by all."""
        return self._owners

    def share_out(self, parameters: Iterable[Parameter]) -> None:
        """Gives each of ``parameters`` an owner, alike on every rank; who has one keeps it."""
        self._owners = owners(parameters, self._held, self._owners)

    def owner(self, name: str) -> int:
        """The rank whose copy of a parameter, and of its optimizer state, is saved."""
        return self._owners.get(name, self._held[name][0])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of the model, also those that are elsewhere."""
        return self._model.named_parameters()

    def holds(self, name: str) -> bool:
        return self._transport.rank in self._held[name]

    def shared(self, name: str) -> bool:
        """Whether all ranks hold a parameter."""
        return self._held[name] == everyone(self._transport)

    def steps(self, name: str) -> bool:
        """Whether this rank steps a parameter, and keeps its optimizer state."""
        rank = self._transport.rank
        return rank in self._held[name] and self._owners.get(name, rank) == rank

    def localise(self) -> None:
        """Drops what this rank does not hold; gradients go with it."""
        dropped = [p for name, p in self._model.named_parameters() if not self.holds(name)]
        for parameter in dropped:
            parameter.grad = None
        self._complete = False  # also if it ends half way
        _swap(self._model, ((p, _nothing_like(p)) for p in dropped))

    def consolidate(self) -> None:
        """Completes the model on every rank (collective)."""
        if self._complete:
            return
        parted = {n: p for n, p in self._model.named_parameters() if not self.shared(n)}
        full = {n: p.detach() if self.holds(n) else self._empty(p) for n, p in parted.items()}
        for owner in everyone(self._transport):
            tensors = [t for n, t in full.items() if self.owner(n) == owner]
            broadcast_tensors(tensors, self._transport, owner)
        _swap(self._model, ((p, full[name]) for name, p in parted.items() if not self.holds(name)))
        self.share_buffers()
        self._complete = True

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Inside, this rank has all parameters (collective); their holders keep changes made inside."""
        before = self._complete
        self.consolidate()
        try:
            yield
        finally:
            # Within another completed(), or after the fit, it stays complete.
            if not before:
                self.localise()

    def share_buffers(self) -> None:
        """Gives every rank the buffers that training wrote on one of them (collective)."""
        buffers = dict(self._model.named_buffers())
        for owner in sorted(set(self._written.values())):
            names = [name for name, rank in self._written.items() if rank == owner]
            broadcast_tensors([buffers[name] for name in names], self._transport, owner)

    def state_dict(self) -> dict[str, Any]:
        """The user's own ``state_dict()`` of the complete model on rank 0 (collective).

        Elsewhere its tensors are meta: hooks that edit a checkpoint run on every rank, and find its keys.
        """
        self.share_buffers()
        if self._complete:
            return self._shared_outline(self._model.state_dict() if self._transport.rank == 0 else {})
        missing: list[tuple[nn.Parameter, torch.Tensor]] = []
        for name, parameter in self._model.named_parameters():
            owner = self.owner(name)
            if 0 in self._held[name]:
                continue
            if self._transport.rank == owner:
                self._transport.send(parameter.detach().contiguous(), 0, _STATE_TAG).wait()
            elif self._transport.rank == 0:
                full = self._empty(parameter)
                self._transport.receive(full, owner, _STATE_TAG).wait()
                missing.append((parameter, full))
        if self._transport.rank != 0:
            return self._shared_outline({})
        with _lent(self._model, missing):
            return self._shared_outline(self._model.state_dict())

    def _shared_outline(self, state: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's state there; elsewhere its keys, with meta tensors for tensors and None for the rest."""
        outline = {
            k: (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else None for k, v in state.items()
        }
        shared = broadcast_object(outline, self._transport, self._device, 0)
        if self._transport.rank == 0:
            return state
        return {
            key: torch.empty(tensor[0], dtype=tensor[1], device="meta") if tensor else None
            for key, tensor in shared.items()
        }

    def _empty(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)


class LocalisedOptimizer:
    """An optimizer built on the complete model, of which each rank steps its part.

    The parameter groups stay, with the same options and in the same order, so that
    schedulers go on driving them; only parameters that are not here leave them.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: LocalisedModel, names: Mapping[int, str]
    ) -> None:
        self._optimizer = optimizer
        self._model = model
        self._names = names
        self._groups: list[list[str]] = []
        self._options: list[list[str] | None] = []
        self._complete: list[list[nn.Parameter]] = []
        self._adopt()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer itself."""
        return self._optimizer

    @property
    def groups(self) -> list[list[str]]:
        """The names of all parameters of each group, also of those that are elsewhere."""
        return self._groups

    def localise(self) -> None:
        """Takes the parameters that are elsewhere out of the groups, and the state of what others step."""
        for group, complete, options in zip(
            self._optimizer.param_groups, self._complete, self._options, strict=True
        ):
            for parameter in complete:
                if not self.steps(parameter):
                    self._optimizer.state.pop(parameter, None)
            group["params"][:] = [p for p in complete if self._holds(p)]
            if options is not None:
                group["param_names"] = [n for n, p in zip(options, complete, strict=True) if self._holds(p)]

    def follow(self) -> None:
        """Takes over groups that user code added.

        Raises:
            ValueError: a group that was there changed, or a new one has what is no parameter of the model.
        """
        self._require_unchanged([list(filter(self._holds, complete)) for complete in self._complete])
        if len(self._optimizer.param_groups) > len(self._complete):
            self._adopt()
            self.localise()

    def _require_unchanged(self, before: list[list[nn.Parameter]]) -> None:
        groups = [list(map(id, group["params"])) for group in self._optimizer.param_groups]
        if groups[: len(before)] != [list(map(id, parameters)) for parameters in before]:
            raise ValueError(
                "parameters were put into a group of the optimizer, or taken out of it, during the fit: "
                "SpindleStrategy only supports new groups, by optimizer.add_param_group(...)"
            )

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Inside, the groups list all their parameters; those that were added stay.

        Raises:
            ValueError: as ``follow`` does.
        """
        for group, complete, options in zip(
            self._optimizer.param_groups, self._complete, self._options, strict=True
        ):
            group["params"][:] = complete
            if options is not None:
                group["param_names"] = list(options)
        try:
            yield
            self._require_unchanged(self._complete)
        finally:
            self._adopt()
            self.localise()

    def _adopt(self) -> None:
        for group in self._optimizer.param_groups[len(self._groups) :]:
            foreign = [tuple(p.shape) for p in group["params"] if id(p) not in self._names]
            if foreign:
                raise ValueError(
                    f"an optimizer has parameters of shapes {foreign} that are not the model's; "
                    "SpindleStrategy trains parameters of the LightningModule only"
                )
            self._groups.append([self._names[id(p)] for p in group["params"]])
            self._options.append(copy.copy(group.get("param_names")))
            self._complete.append(list(group["params"]))

    def steps(self, parameter: nn.Parameter) -> bool:
        """Whether this rank steps a parameter, and keeps its state."""
        return self._model.steps(self._names[id(parameter)])

    def _holds(self, parameter: nn.Parameter) -> bool:
        return self._model.holds(self._names[id(parameter)])

    def grow(self, before: Mapping[str, tuple[int, ...]], transport: Transport, device: torch.device) -> None:
        """Steps what this rank has come to hold, from the earlier holders' state on (collective).

        Args:
            before: parameters that got new holders, with those that they had.
        """
        named = {self._names[id(p)]: p for complete in self._complete for p in complete}
        # One that has an owner keeps it, and with it its state.
        own = {name: p for name, p in named.items() if name not in self._model.owners}
        self.localise()
        for source in sorted({ranks[0] for name, ranks in before.items() if name in own}):
            names = [name for name, ranks in before.items() if ranks[0] == source and name in own]
            given = {
                name: self._optimizer.state[own[name]] for name in names if own[name] in self._optimizer.state
            }
            states = broadcast_object(given, transport, device, source)
            for name in names:
                if name in states and self._model.holds(name) and transport.rank not in before[name]:
                    self._optimizer.state[own[name]] = _like_parameters(states[name], own[name])

    def state_dict(self, transport: Transport, device: torch.device) -> dict[str, Any]:
        """The state as one process has it on rank 0; elsewhere without what others keep (collective)."""
        local = self._optimizer.state_dict()
        mine = {
            name: local["state"][index]
            for index, name in enumerate(self._listed())
            if index in local["state"] and self._model.owner(name) == transport.rank
        }
        parts = gather_objects(mine, transport, device) or [mine]
        by_name = {name: state for part in parts for name, state in part.items()}
        groups, state, at = [], {}, 0
        for group, names, named in zip(local["param_groups"], self._groups, self._options, strict=True):
            indices = list(range(at, at + len(names)))
            at += len(names)
            groups.append({**group, "params": indices} | ({} if named is None else {"param_names": named}))
            state.update(
                {i: by_name[name] for i, name in zip(indices, names, strict=True) if name in by_name}
            )
        return {**local, "state": state, "param_groups": groups}

    def _listed(self) -> list[str]:
        """The names of the parameters that the groups list now, in order."""
        return [self._names[id(p)] for group in self._optimizer.param_groups for p in group["params"]]


def _like_parameters(state: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """A parameter's optimizer state, that of its shape on its device; counts of steps stay on the CPU."""
    return {
        key: value.to(parameter.device)
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        else value
        for key, value in state.items()
    }


@contextmanager
def _lent(model: nn.Module, missing: list[tuple[nn.Parameter, torch.Tensor]]) -> Iterator[None]:
    """Inside, the parameters have the given values; afterwards they and their gradients are meta again."""
    gradients = [p.grad for p, _ in missing]
    _swap(model, missing)
    try:
        yield
    finally:
        _swap(model, ((p, _nothing_like(p)) for p, _ in missing))
        for (parameter, _), gradient in zip(missing, gradients, strict=True):
            parameter.grad = gradient


def _nothing_like(parameter: nn.Parameter) -> torch.Tensor:
    return torch.empty_like(parameter, device="meta")


def _swap(model: nn.Module, values: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Replaces what Parameter objects stand for, keeping the objects.

    Recurrent modules hold weak references to theirs, and weights computed from them, with which torch cannot
    swap; they make both anew.
    """
    recurrent = _recurrent(model)
    for module in recurrent:
        module._flat_weights, module._flat_weight_refs = [], []
    for parameter, value in values:
        replacement = nn.Parameter(value.detach(), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, replacement)
    for module in recurrent:
        module._init_flat_weights()


def _recurrent(model: nn.Module) -> list[nn.RNNBase]:
    return [m for m in model.modules() if isinstance(m, nn.RNNBase)]
