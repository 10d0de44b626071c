"""What faults in programs and data put in place of functions."""

from typing import Any

from tests.faults.bodies import Function


def leaves_runs_whole(original: Function) -> Function:
    """A plan's runs go back as they are planned."""

    def faulty(plan: Any, *args: Any) -> Any:
        return iter(plan.runs)

    return faulty


def gives_all_to_the_first(original: Function) -> Function:
    """Every parameter's optimizer state is on the first of its holders."""

    def faulty(parameters: Any, held: Any, known: Any = None) -> Any:
        return {name: held[name][0] for name in original(parameters, held, known)}

    return faulty


def shares_out_anew(original: Function) -> Function:
    """Who stepped a parameter before is forgotten."""

    def faulty(parameters: Any, held: Any, known: Any = None) -> Any:
        return original(parameters, held)

    return faulty


def overlaps_rows(original: Function) -> Function:
    """A shard has the next one's first row too."""

    def faulty(shard: int, shards: int, rows: int) -> tuple[int, int]:
        first, last = original(shard, shards, rows)
        return first, min(last + 1, rows)

    return faulty


def replicates_parameters(original: Function) -> Function:
    """Every rank holds every parameter, as under data parallelism: gradients stay right, memory does not."""

    def faulty(placements: Any) -> Any:
        placements = list(placements)
        everywhere = {d for runs, _ in placements for run in runs for d in run.devices}
        return {name: tuple(sorted(everywhere)) for name in original(placements)}

    return faulty


def gives_all_rows(original: Function) -> Function:
    """A shard of a run sees all rows of the batch, so that the run's devices all do the same."""

    def faulty(self: Any, shard: int, rows: int) -> tuple[int, int]:
        return 0, rows

    return faulty


def needs_no_messages(original: Function) -> Function:
    """Simulated operators start without waiting for what others send them."""

    def faulty(program: Any, costs: Any, rows: Any, step: Any, ready: Any) -> Any:
        found = original(program, costs, rows, step, ready)
        step.feeds = None
        ready.missing.clear()
        return found

    return faulty


def gives_no_gradients(original: Function) -> Function:
    """A stub's backward passes nothing on, and takes no time."""

    def faulty(ctx: Any, *gradients: Any) -> Any:
        return (None,) * (4 + len(ctx.reads))

    return faulty
