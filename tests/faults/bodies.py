"""What the faults of the table of faults put in place of our functions.

Each takes the original function and returns the faulty one, which has the original's signature (for a method,
``self`` included). General ones come first; those written for one function are named after what they break.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
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


def changes_arguments(change: Callable[..., tuple[Any, ...]]) -> Callable[[Function], Function]:
    """The call is made with ``change(*args)`` for its positional arguments."""

    def replace(original: Function) -> Function:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            return original(*change(*args), **kwargs)

        return faulty

    return replace


def forgets_keyword(name: str) -> Callable[[Function], Function]:
    """The call is made without a keyword argument."""

    def replace(original: Function) -> Function:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **{key: value for key, value in kwargs.items() if key != name})

        return faulty

    return replace


def knows_own_parameters_only(original: Function) -> Function:
    """A step's program does not sum what other variants of the step use."""

    def faulty(self: Any, trainable: Any) -> Any:
        self._trained = {}
        return original(self, trainable)

    return faulty


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


def leaves_gradients_hidden(original: Function) -> Function:
    """After the step only owners see gradients."""

    def faulty(self: Any, *args: Any) -> None:
        self._hidden.clear()
        original(self, *args)

    return faulty


def counts_all_as_stepped(original: Function) -> Function:
    """A device is thought to keep the optimizer state of all that it holds."""

    def faulty(self: Any, parameters: Any, stepped: Any) -> Any:
        return original(self, parameters, parameters)

    return faulty


def gives_zero_for_none(original: Function) -> Function:
    """A step that runs as one operator and gives no loss gives zero times its parameters."""

    def faulty(self: Any) -> Function:
        run = original(self)

        def changed(*given: Any) -> Any:
            loss, logs = run(*given)
            if loss is None:
                loss = 0.0 * sum(p.sum() for p in self.step.module.parameters())
            return loss, logs

        return changed

    return faulty


def counts_the_first_leaf(original: Function) -> Function:
    """Other leaves may have another number of rows."""

    def faulty(self: Any, leaves: list[Any]) -> int:
        first = next(i for i, leaf in enumerate(self.leaves) if leaf.dim is not None)
        return original(replace(self, leaves=self.leaves[first : first + 1]), leaves[first : first + 1])

    return faulty


def divides_by_two(original: Function) -> Function:
    """A bucket's sum becomes a mean over two holders, however many there are."""

    def faulty(self: Any) -> None:
        original(self)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad /= 2

    return faulty


def fills_missing_gradients(original: Function) -> Function:
    """A gradient that no holder has becomes zeros."""

    def faulty(self: Any) -> None:
        original(self)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = parameter.detach() * 0

    return faulty


def forgets_received_gradients(original: Function) -> Function:
    """Gradients come in from other ranks and are dropped."""

    def faulty(self: Any, instruction: Any, iteration: Any) -> None:
        original(self, instruction, iteration)
        edge = self.program.edges[instruction.index]
        state = iteration.runs.get(edge.source)
        for _, gradient in state.gradients.pop(edge.value, []) if state is not None else []:
            if hasattr(gradient, "tensor"):
                gradient.tensor()

    return faulty


def leaves_results_local(original: Function) -> Function:
    """Losses and logged values are not added up over the ranks."""

    class Alone:
        def __init__(self, transport: Any) -> None:
            self._transport = transport

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transport, name)

        def all_reduce(self, tensor: Any, ranks: Any) -> Any:
            return self._transport.all_reduce(tensor, (self._transport.rank,))

    def faulty(self: Any, iteration: Any) -> Any:
        kept, self._transport = self._transport, Alone(self._transport)
        try:
            return original(self, iteration)
        finally:
            self._transport = kept

    return faulty


def weighs_one_row(original: Function) -> Function:
    """Epoch means forget how many rows a step had."""

    def faulty(model: Any, iteration: Any, task: str, key: str, value: Any, options: Any) -> None:
        original(model, iteration, task, key, value, {**options, "batch_size": 1})

    return faulty


def shifts_rows(original: Function) -> Function:
    """A shard reads the rows before its own."""

    def faulty(leaves: Any, layout: Any, first: int, last: int) -> Any:
        return original(leaves, layout, max(0, first - 1), max(0, first - 1) + last - first)

    return faulty


def overlaps_rows(original: Function) -> Function:
    """A shard has the next one's first row too."""

    def faulty(shard: int, shards: int, rows: int) -> tuple[int, int]:
        first, last = original(shard, shards, rows)
        return first, min(last + 1, rows)

    return faulty


def counts_rows_from_zero(original: Function) -> Function:
    """A shard's row numbers are those of a batch of its own."""

    def faulty(engine: Any, source: Any, leaves: Any, env: Any, rows: Any, iteration: Any) -> Any:
        return original(engine, source, leaves, env, (0, rows[1] - rows[0]), iteration)

    return faulty


def reads_ones_own(original: Function) -> Function:
    """What is marked to be gathered or summed is not."""

    def faulty(*args: Any) -> Any:
        from lightning_spindle.graph import Reading

        return Reading.OWN

    return faulty


def calls_as_if_unwatched(original: Function) -> Function:
    """A torch function mode looks at nothing."""

    def faulty(self: Any, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    return faulty


def joins_one_of_values_without_rows(original: Function) -> Function:
    """Of sums over parts of the rows the first is taken."""

    def faulty(parts: Any, value: Any) -> Any:
        return original(sorted(parts)[:1] if value.dim is None else parts, value)

    return faulty


def keeps_rank_zeros(original: Function) -> Function:
    """Of what ranks gathered, only rank 0's is used."""

    def faulty(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return None if found is None else [found[0], *([type(found[0])()] * (len(found) - 1))]

    return faulty


def leaves_seed_behind(original: Function) -> Function:
    """Operators seed the rank's own generator, which loaders draw from."""

    @contextmanager
    def faulty(*args: Any) -> Iterator[None]:
        import torch

        with original(*args):
            inside = torch.get_rng_state()
            yield
        torch.set_rng_state(inside)

    return faulty


def takes_back_draws(original: Function) -> Function:
    """What the call drew from the default generator is drawn again."""

    def faulty(*args: Any, **kwargs: Any) -> Any:
        import torch

        before = torch.get_rng_state()
        result = original(*args, **kwargs)
        torch.set_rng_state(before)
        return result

    return faulty


def needs_all_rows(original: Function) -> Function:
    """A rank that runs anything of a task reads whole batches."""

    def faulty(*args: Any) -> Any:
        needs = original(*args)
        return lambda rows: ((0, rows),) if needs(rows) else ()

    return faulty


def holds_everything(original: Function) -> Function:
    """Rows are cut out of a batch as if it held all of them."""

    def faulty(batch: Any, layout: Any, rows: Any) -> Any:
        return original(replace(batch, held=None), layout, rows)

    return faulty


def joins_as_given(original: Function) -> Function:
    """Parts of a value are joined in the order in which they came."""

    def faulty(parts: Any, value: Any) -> Any:
        import torch

        return (
            original(parts, value) if value.dim is None else torch.cat([p for _, p in parts], dim=value.dim)
        )

    return faulty


def differs_by_rank(original: Function) -> Function:
    """Every rank goes by a plan of its own."""

    def faulty(plan: Any, transport: Any, device: Any) -> Any:
        shared = original(plan, transport, device)
        return replace(shared, makespan_ms=shared.makespan_ms + transport.rank)

    return faulty


def replicates_parameters(original: Function) -> Function:
    """Every rank holds every parameter, as under data parallelism: gradients stay right, memory does not."""

    def faulty(placements: Any) -> Any:
        placements = list(placements)
        everywhere = {d for runs, _ in placements for run in runs for d in run.devices}
        return {name: tuple(sorted(everywhere)) for name in original(placements)}

    return faulty


def leaves_eval_mode(original: Function) -> Function:
    """Capture of an evaluation step leaves the modules in evaluation mode."""

    @contextmanager
    def faulty(model: Any, step: str) -> Any:
        if step != "training_step":
            model.eval()
        yield

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


def holds_on_to_parameters(original: Function) -> Function:
    """What capture ran keeps the parameters' memory."""
    held: list[Any] = []

    def measure(trace: Any, *args: Any, **kwargs: Any) -> Any:
        held.extend(p.detach() for p in trace.holder.parameters())
        return original(trace, *args, **kwargs)

    return measure


def gives_a_null_context(original: Function) -> Function:
    """Nothing is different inside."""
    return lambda *args, **kwargs: nullcontext()


def stops_bisecting(original: Function) -> Function:
    """The bisection for C* ends before its first step: an end of the interval is its answer."""

    def faulty(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "tolerance": 1e9})

    return faulty


def places_sequentially(original: Function) -> Function:
    """Runs get the next devices in line, whatever their data and memory."""

    def faulty(runs: Any, problem: Any, policy: Any = None) -> Any:
        from lightning_spindle.planner.placement import Policy

        return original(runs, problem, Policy.SEQUENTIAL)

    return faulty


def computes_at_half_peak(original: Function) -> Function:
    """Every call reaches half of the device's peak, however little work it is."""

    def faulty(flops: float, kind: Any) -> float:
        return 2.0 * flops / kind.flops_per_s

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


def splits_everything(original: Function) -> Function:
    """Group.layout: also what couples samples."""

    def faulty(group: Any) -> Any:
        from lightning_spindle.graph import Layout

        return Layout.SPLIT

    return faulty
