"""What the faults of tests/faults.py put in place of our functions.

Each takes the original function and returns the faulty one, which has the original's signature (for a method,
``self`` included). General ones come first; those written for one function are named after what they break.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

Function = Callable[..., Any]


def does_nothing(original: Function) -> Function:
    """The call is skipped: it returns None."""

    def faulty(*args: Any, **kwargs: Any) -> None:
        return None

    return faulty


def returns(value: Any) -> Callable[[Function], Function]:
    """The call is skipped and answers ``value``."""

    def replace(original: Function) -> Function:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            return value

        return faulty

    return replace


def passes_through(index: int = 0) -> Callable[[Function], Function]:
    """The call is skipped and answers its positional argument ``index`` (0 is ``self`` for a method)."""

    def replace(original: Function) -> Function:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            return args[index]

        return faulty

    return replace


def changes_result(change: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """The call is made and its result changed on the way out."""

    def replace(original: Function) -> Function:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            return change(original(*args, **kwargs))

        return faulty

    return replace


def replicates_parameters(original: Function) -> Function:
    """Every rank holds every parameter, as under data parallelism: gradients stay right, memory does not."""

    def faulty(placements: Any) -> Any:
        placements = list(placements)
        everywhere = {d for runs, _ in placements for run in runs for d in run.devices}
        return {name: tuple(sorted(everywhere)) for name in original(placements)}

    return faulty


def runs_operators_twice(original: Function) -> Function:
    """The engine's operators are computed twice and the first result dropped: no number changes."""

    def twice(call: Function) -> Function:
        def run(*args: Any) -> Any:
            call(*args)
            return call(*args)

        return run

    def faulty(*args: Any, **kwargs: Any) -> Any:
        engine = original(*args, **kwargs)
        engine._callables = {name: twice(call) for name, call in engine._callables.items()}
        return engine

    return faulty


def gives_all_rows(original: Function) -> Function:
    """A shard of a run sees all rows of the batch, so that the run's devices all do the same."""

    def faulty(self: Any, shard: int, rows: int) -> tuple[int, int]:
        return 0, rows

    return faulty


def leaves_out_the_number_of_ranks(original: Function) -> Function:
    """The shard's gradient as it is: the mean over ranks divides it once too often."""

    def faulty(gradient: Any, start: int, rows: int, ranks: int) -> Any:
        return gradient[start : start + rows]

    return faulty


def contrasts_own_rows(original: Function) -> Function:
    """Nothing is gathered: each process's rows are contrasted with themselves."""

    def faulty(self: Any, samples: Any, texts: Any, labels: Any) -> Any:
        return samples, texts, labels

    return faulty


def gives_own_environment(original: Function) -> Function:
    """A job starts with all variables of this process."""

    def faulty() -> dict[str, str]:
        return dict(os.environ)

    return faulty


def keeps_activations(original: Function) -> Function:
    """What runs gave is held until the iteration ends, as by one backward over the whole graph."""

    def faulty(self: Any, instruction: Any, iteration: Any, seeds: Any) -> None:
        state = iteration.runs.get(instruction.index)
        if state is not None:
            iteration.logs[f"kept by run {instruction.index}"] = [dict(state.outputs)]
        original(self, instruction, iteration, seeds)

    return faulty


def leaves_sync_on(original: Function) -> Function:
    """``block_backward_sync`` blocks nothing: gradients are summed in every step of a window."""
    return lambda self: nullcontext()
