"""What trains, as user code changes it during a fit.

Callbacks freeze and unfreeze modules and give optimizers further parameter groups. Which gradients go
between ranks and are summed follows from it, so each set of trainable parameters has a program of its own.
The forwards of all of them send the same messages: that all ranks changed the same is checked in the exchange
of the iteration, before anything depends on it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from lightning_spindle.graph import OperatorGraph, Parameter
from lightning_spindle.program import Program, ProgramRun, lower
from lightning_spindle.runtime.state import LocalisedModel, LocalisedOptimizer
from lightning_spindle.simulate import check_deadlock


class Programs:
    """The programs of a placed step, one for each set of parameters that trains, lowered when it is needed.

    Args:
        runs: the placed step, with its ``graph``.
        state: knows who holds which parameter.
        trained: parameters that any training step uses. Their gradients are summed by each, because one
            iteration of an accumulation window sums those of all.
    """

    def __init__(
        self,
        runs: Sequence[ProgramRun],
        graph: OperatorGraph,
        devices: int,
        state: LocalisedModel,
        trained: Mapping[str, Parameter],
    ) -> None:
        self._runs, self._graph, self._devices = runs, graph, devices
        self._state, self._trained = state, trained
        self._programs: dict[frozenset[str] | None, Program] = {}
        self._basis: tuple[Mapping[str, tuple[int, ...]], int] = ({}, 0)

    def of(self, trainable: frozenset[str] | None) -> Program:
        """The program in which these parameters get gradients; None for one without backward.

        Raises:
            ValueError: gradients would flow through an operator that runs on every rank.
        """
        held = self._state.held
        if self._basis[0] is not held or self._basis[1] != len(self._trained):
            self._basis = held, len(self._trained)
            self._programs.clear()
        if trainable not in self._programs:
            own = self._graph.parameter_map()
            graph = replace(self._graph, parameters=tuple((dict(self._trained) | own).values()))
            program = lower(
                self._runs, graph, self._devices, held, trainable=trainable, owners=self._state.owners
            )
            check_deadlock(program)
            self._programs[trainable] = program
        return self._programs[trainable]


class Training:
    """The parameters that train now, and the groups of the optimizers.

    Args:
        model: the whole model; parameters that are elsewhere count too.
        optimizers: by id, as they were localised.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[int, LocalisedOptimizer]) -> None:
        self._parameters = dict(model.named_parameters())
        self._optimizers = optimizers
        self._seen: tuple[list[bool], list[int]] = [], []
        self.trainable: frozenset[str] = frozenset()
        self.digest = 0

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Takes over what user code changed since the last step; no communication.

        Raises:
            ValueError: an optimizer was exchanged, or its groups changed in another way than by new ones.
        """
        if {id(o) for o in optimizers} != self._optimizers.keys():
            raise ValueError(
                "the Trainer's optimizers were exchanged during the fit, which SpindleStrategy does not "
                "support: add parameters to the one that there is by optimizer.add_param_group(...)"
            )
        for optimizer in self._optimizers.values():
            optimizer.follow()
        if (seen := self._look()) != self._seen:
            self._seen = seen
            self.trainable = frozenset(n for n, p in self._parameters.items() if p.requires_grad)
            groups = [optimizer.groups for optimizer in self._optimizers.values()]
            self.digest = zlib.crc32(repr((sorted(self.trainable), groups)).encode())

    def _look(self) -> tuple[list[bool], list[int]]:
        """What is frozen, and how many groups there are, also of those that were taken over before."""
        flags = [p.requires_grad for p in self._parameters.values()]
        return flags, [len(optimizer.groups) for optimizer in self._optimizers.values()]
