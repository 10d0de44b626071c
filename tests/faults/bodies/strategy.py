"""What faults in the strategy and its sessions put in place of functions."""

import os
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.faults.bodies import Function

KEPT: list[Any] = []
"""Contexts that must not be collected, which would leave them."""


def knows_own_parameters_only(original: Function) -> Function:
    """A step's program does not sum what other variants of the step use."""

    def faulty(self: Any, trainable: Any) -> Any:
        self._trained = {}
        return original(self, trainable)

    return faulty


def keeps_rank_zeros(original: Function) -> Function:
    """Of what ranks gathered, only rank 0's is used."""

    def faulty(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return None if found is None else [found[0], *([type(found[0])()] * (len(found) - 1))]

    return faulty


def differs_by_rank(original: Function) -> Function:
    """Every rank goes by a plan of its own."""

    def faulty(plan: Any, transport: Any, device: Any) -> Any:
        shared = original(plan, transport, device)
        return replace(shared, makespan_ms=shared.makespan_ms + transport.rank)

    return faulty


def drops_empty_groups(original: Function) -> Function:
    """Parameter groups that are empty on a rank are taken out of its optimizer."""

    def faulty(self: Any) -> None:
        original(self)
        self._optimizer.param_groups[:] = [g for g in self._optimizer.param_groups if g["params"]]

    return faulty


def leaves_out_loss_weights(original: Function) -> Function:
    """The merged optimizer does not get parameters without dimensions."""

    def faulty(*args: Any, **kwargs: Any) -> Any:
        groups = original(*args, **kwargs)
        return [{**g, "params": [p for p in g["params"] if p.dim()]} for g in groups]

    return faulty


def runs_operators_twice(original: Function) -> Function:
    """The engine's operators are computed twice and the first result dropped: no number changes."""

    def twice(call: Function) -> Function:
        def run(*args: Any) -> Any:
            call(*args)
            return call(*args)

        return run

    def faulty(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._callables = {name: twice(call) for name, call in self._callables.items()}

    return faulty


def does_not_shadow(name: str) -> Callable[[Function], Function]:
    """A method of the Trainer's is left as it is."""

    def unless_named(original: Function) -> Function:
        def faulty(owner: Any, shadowed: str, replacement: Any) -> Any:
            return nullcontext() if shadowed == name else original(owner, shadowed, replacement)

        return faulty

    return unless_named


def hears_rank_0_alone(original: Function) -> Function:
    """As Lightning does: signals that other ranks get are lost."""

    def faulty(self: Any, *args: Any) -> None:
        if self._transport.rank == 0:
            original(self, *args)

    return faulty


def hears_children(original: Function) -> Function:
    """A signal to a forked child is taken for one to its parent."""

    def faulty(self: Any, *args: Any) -> None:
        self._process = os.getpid()
        original(self, *args)

    return faulty


def hears_each_for_itself(original: Function) -> Function:
    """What comes after it was acted on is another event, however soon."""

    def faulty(self: Any, *args: Any) -> None:
        self._acted_at_s.clear()
        original(self, *args)

    return faulty


def ends_alone_by_a_handler(original: Function) -> Function:
    """A user's handler that exits is an error of its rank."""

    def faulty(self: Any) -> None:
        try:
            original(self)
        except SystemExit as e:
            self.ending = isinstance(e, SIGTERMException)
            raise

    return faulty


def enters_and_never_leaves(original: Function) -> Function:
    """What is different inside of a context stays so."""

    def faulty(*args: Any, **kwargs: Any) -> Any:
        context = original(*args, **kwargs)
        context.__enter__()
        KEPT.append(context)
        return nullcontext()

    return faulty


def loses_gradients(original: Function) -> Function:
    """Parameters that were lent their values come back without gradients."""

    @contextmanager
    def faulty(model: Any, missing: Any) -> Any:
        with original(model, missing):
            yield
        for parameter, _ in missing:
            parameter.grad = None

    return faulty
