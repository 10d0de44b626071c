"""The exchange between forward and backward: every rank learns the losses and logged values of all tasks."""

from __future__ import annotations

import torch

from lightning_spindle.capture.pieces import Capture
from lightning_spindle.graph import Layout, Reduction, Result
from lightning_spindle.program import Program, ProgramRun
from lightning_spindle.runtime.iteration import Iteration, TaskBatch
from lightning_spindle.runtime.rows import Rows
from lightning_spindle.runtime.telling import tell
from lightning_spindle.runtime.transport import Transport, everyone

_UNLIKE = (
    "ranks do not train the same parameters any more: freeze, unfreeze and add parameters to optimizers "
    "alike on every rank, not where the rank is 0"
)


def weight(result: Result, run: ProgramRun, rows: Rows, iteration: Iteration) -> float:
    """Of a shard's result in the step's: the shard's part of all rows for a mean, else one."""
    if result.reduction is not Reduction.MEAN:
        return 1.0
    return (rows[1] - rows[0]) / iteration.batches[run.task].rows


class Exchange:
    """One sum over all ranks for all results of a program's runs.

    Args:
        digest: tells what trains from anything else that could; ranks compare theirs.
    """

    def __init__(
        self, program: Program, capture: Capture, transport: Transport, device: torch.device, digest: int
    ) -> None:
        self._program, self._capture = program, capture
        self._transport, self._device = transport, device
        self._digest = digest
        self._results = capture.graph.results
        self._coarse = {o.task: o.name for o in capture.graph.operators if o.name in capture.coarse}
        self._readers = {run.task: run.devices[0] for run in reversed(program.runs)}

    def run(self, iteration: Iteration) -> None:
        """Fills in the iteration's results, the same on every rank; absent where their task was idle.

        Tensors have the type that the step gave them; what was a number in the step is one.

        Raises:
            ValueError: ranks do not train the same parameters.
        """
        table = self._table(iteration)
        self._transport.all_reduce(table, everyone(self._transport)).wait()
        *figures, digests = table.tolist()
        if digests != self._digest * self._transport.size:
            raise ValueError(_UNLIKE)
        self._take_rows(iteration, figures[2 * len(self._results) :])
        self._tell(iteration)
        for at, result in enumerate(self._results):
            if figures[2 * at + 1]:
                dtype = self._dtype(result, iteration)
                value = figures[2 * at] if dtype is None else _of_type(table[2 * at], dtype)
                iteration.results[result] = value

    def _dtype(self, result: Result, iteration: Iteration) -> torch.dtype | None:
        if result.task in self._coarse:
            return iteration.told[self._coarse[result.task]].dtype
        return None if result.dtype is None else getattr(torch, result.dtype)

    def _table(self, iteration: Iteration) -> torch.Tensor:
        """Two entries a result (its value here, whether it has one), the rows of each task, the digest."""
        results = self._results
        size = 2 * len(results) + len(self._readers) + 1
        table = torch.zeros(size, dtype=torch.float64, device=self._device)
        table[-1] = self._digest
        for at, (task, reader) in enumerate(self._readers.items(), 2 * len(results)):
            if reader == self._transport.rank and task in iteration.batches:
                table[at] = iteration.batches[task].rows
        for run in self._program.runs:
            state = iteration.runs.get(run.index)
            if state is None or not self._speaks(run):
                continue
            for at, result in enumerate(results):
                if (value := state.results.get(result.value)) is not None:
                    share = weight(result, run, state.rows, iteration)
                    table[2 * at] += torch.as_tensor(value, dtype=torch.float64).detach() * share
                    table[2 * at + 1] += 1
        return table

    def _speaks(self, run: ProgramRun) -> bool:
        """Of an operator that runs everywhere, one rank reports the results."""
        return run.layout is not Layout.EVERYWHERE or run.devices[0] == self._transport.rank

    def _take_rows(self, iteration: Iteration, rows: list[float]) -> None:
        """Readers tell how many rows there were: the user's collating may drop some, or the batch."""
        for task, count in zip(self._readers, rows, strict=True):
            own = iteration.batches.get(task)
            if own is None or own.leaves is not None:
                continue
            if count:
                iteration.batches[task] = TaskBatch(int(count), None)
            else:
                del iteration.batches[task]

    def _tell(self, iteration: Iteration) -> None:
        """What steps that run as one operator did beside their loss, from the rank that ran them."""
        for run in self._program.runs:
            for name in run.operators:
                if name in self._capture.coarse and iteration.batches.get(run.task) is not None:
                    did, source = iteration.coarse.pop(name, None), run.devices[0]
                    iteration.told[name] = tell(did, run.task, self._transport, self._device, source)


def _of_type(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A sum of shards' parts, which may be a digit too small to be the integer that it is."""
    return (value if dtype.is_floating_point else value.round()).to(dtype)
