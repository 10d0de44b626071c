"""What faults in the strategy and its sessions put in place of functions."""

from dataclasses import replace
from typing import Any

from tests.faults.bodies import Function


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


def looks_for_no_signals(original: Function) -> Function:
    """Signals that have come by then are not seen in this call."""

    def faulty(self: Any, *args: Any) -> Any:
        self._look_for_signals = lambda: None
        try:
            return original(self, *args)
        finally:
            del self._look_for_signals

    return faulty


def hears_rank_0_alone(original: Function) -> Function:
    """As Lightning does: signals that other ranks get are lost."""

    def faulty(self: Any, *args: Any) -> None:
        if self._transport.rank == 0:
            original(self, *args)

    return faulty
