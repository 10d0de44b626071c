"""What faults in what capture does put in place of functions."""

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.faults.bodies import Function


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


def shifts_rows(original: Function) -> Function:
    """A shard reads the rows before its own."""

    def faulty(leaves: Any, layout: Any, first: int, last: int) -> Any:
        return original(leaves, layout, max(0, first - 1), max(0, first - 1) + last - first)

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


def leaves_eval_mode(original: Function) -> Function:
    """Capture of an evaluation step leaves the modules in evaluation mode."""

    @contextmanager
    def faulty(model: Any, step: str) -> Any:
        if step != "training_step":
            model.eval()
        yield

    return faulty


def holds_on_to_parameters(original: Function) -> Function:
    """What capture ran keeps the parameters' memory."""
    held: list[Any] = []

    def measure(trace: Any, *args: Any, **kwargs: Any) -> Any:
        held.extend(p.detach() for p in trace.holder.parameters())
        return original(trace, *args, **kwargs)

    return measure


def splits_everything(original: Function) -> Function:
    """Group.layout: also what couples samples."""

    def faulty(group: Any) -> Any:
        from lightning_spindle.graph import Layout

        return Layout.SPLIT

    return faulty


def takes_every_size_for_rows(original: Function) -> Function:
    """Whatever a step reads of its batch's sizes is the number of its rows."""

    def faulty(node: Any, leaves: Any) -> Any:
        from lightning_spindle.capture.pieces import RowsRef

        return original(node, leaves) or RowsRef("a", 1)

    return faulty


def makes_tensors_of_the_default_type(original: Function) -> Function:
    """A number that a step gives has as many digits as the model's parameters."""

    def faulty(value: Any) -> Any:
        import torch

        return torch.as_tensor(value)

    return faulty
