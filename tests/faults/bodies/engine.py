"""What faults in the engine, messages and batches put in place of functions."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tests.faults.bodies import Function


def leaves_gradients_hidden(original: Function) -> Function:
    """After the step only owners see gradients."""

    def faulty(self: Any, *args: Any) -> None:
        self._hidden.clear()
        original(self, *args)

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

    def faulty(model: Any, key: str, value: Any, options: Any, rows: int) -> None:
        original(model, key, value, options, 1)

    return faulty


def weighs_rows_always(original: Function) -> Function:
    """What a step gives as ``batch_size`` is not heeded."""

    def faulty(model: Any, key: str, value: Any, options: Any, rows: int) -> None:
        original(model, key, value, {k: v for k, v in options.items() if k != "batch_size"}, rows)

    return faulty


def weighs_rows_for_none(original: Function) -> Function:
    """A batch that is to weigh nothing weighs its rows."""

    def faulty(model: Any, key: str, value: Any, options: Any, rows: int) -> None:
        original(model, key, value, {**options, "batch_size": options.get("batch_size") or rows}, rows)

    return faulty


def counts_rows_from_zero(original: Function) -> Function:
    """A shard's row numbers are those of a batch of its own."""

    def faulty(engine: Any, source: Any, leaves: Any, env: Any, rows: Any, iteration: Any) -> Any:
        return original(engine, source, leaves, env, (0, rows[1] - rows[0]), iteration)

    return faulty


def joins_one_of_values_without_rows(original: Function) -> Function:
    """Of sums over parts of the rows the first is taken."""

    def faulty(parts: Any, value: Any) -> Any:
        return original(sorted(parts)[:1] if value.dim is None else parts, value)

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


def keeps_activations(original: Function) -> Function:
    """What runs gave is held until the iteration ends, as by one backward over the whole graph."""

    def faulty(self: Any, instruction: Any, iteration: Any, seeds: Any) -> None:
        state = iteration.runs.get(instruction.index)
        if state is not None:
            iteration.given[f"kept by run {instruction.index}"] = (dict(state.outputs),)
        original(self, instruction, iteration, seeds)

    return faulty


def tries_one_connection(original: Function) -> Function:
    """A receive that times out is tried with the next rank alone, which may be lost already."""

    def faulty(group: Any) -> None:
        import torch

        with suppress(RuntimeError):
            work = group.recv([torch.zeros(1)], (group.rank() + 1) % group.size(), 0)
            work.wait(timedelta(milliseconds=1))

    return faulty


def rounds_to_half(original: Function) -> Function:
    """Losses and logged values have the digits of bfloat16."""

    def faulty(value: Any, dtype: Any) -> Any:
        return original(value.bfloat16(), dtype)

    return faulty


def adds_in_single_precision(original: Function) -> Function:
    """The tasks' losses have one type when they are added."""

    def faulty(weights: Any, losses: Any) -> Any:
        return original(weights, {task: loss.float() for task, loss in losses.items()})

    return faulty
