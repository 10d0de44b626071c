"""One pass of a task at a number of rows: every operator's forward, then every backward, timed.

Legend: B rows of the example batch; r rows of a pass. A pass sees the first r rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_spindle.capture.layout import take_rows
from lightning_spindle.capture.pieces import Capture, LeafRef, RowNumbers, Source, ValueRef
from lightning_spindle.estimate.devices import synchronize
from lightning_spindle.graph import Layout, Operator
from lightning_spindle.runtime.randomness import operator_randomness
from lightning_spindle.runtime.rows import cut

Callables = Mapping[str, Callable[..., tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Milliseconds of one operator in one pass."""

    operator: str
    forward_ms: float
    backward_ms: float


@dataclass(slots=True)
class _Done:
    """An operator whose forward ran: what its backward needs."""

    operator: Operator
    inputs: list[torch.Tensor]
    outputs: dict[str, torch.Tensor]


class TaskPasses:
    """Runs passes of one task, as the engine would run its operators one by one.

    Operators that see the whole batch run where r = B; at fewer rows their consumers read
    rows of what the last whole pass gave. What is read from the whole batch (``Value.meets``)
    is what the last whole pass gave, too. Operators that run everywhere (metrics) are never
    executed, and neither is what depends on them. No gradient is accumulated anywhere.

    Args:
        parameters: those of the module by canonical name; frozen ones get no backward.
        leaves: the example batch, which must not be used elsewhere while passes run.
    """

    def __init__(
        self,
        task: str,
        capture: Capture,
        callables: Callables,
        parameters: Mapping[str, torch.nn.Parameter],
        leaves: Sequence[Any],
        device: torch.device,
    ) -> None:
        self.task = task
        self.layout = capture.layouts[task]
        self.batch = self.layout.rows(list(leaves))
        self._capture = capture
        self._callables = callables
        self._parameters = parameters
        self._leaves = leaves
        self._device = device
        self._values = capture.graph.value_map()
        self._whole: dict[str, Any] = {}
        graph = capture.graph
        carrying = graph.gradient_values(n for n, p in parameters.items() if p.requires_grad)
        leading = graph.loss_operators()
        self._roots = carrying.intersection(v for o in graph.operators if o.name in leading for v in o.inputs)
        self._roots |= {r.value for r in graph.results if r.is_loss}
        self._carrying = carrying
        self.operators = self._runnable()

    def at(self, rows: int) -> tuple[Operator, ...]:
        """The operators that a pass of so many rows runs, in order."""
        return tuple(o for o in self.operators if rows == self.batch or o.layout is Layout.SPLIT)

    def run(self, rows: int) -> list[OperatorTime]:
        """One pass. The first of a task must be over all B rows.

        Raises:
            RuntimeError: an operator failed; names it, its task and the rows.
        """
        watch = _Watch(self._device)
        leaves = self._leaves if rows == self.batch else take_rows(self._leaves, self.layout, 0, rows)
        env = {
            name: v if self._values[name].meets else cut(v, self._values[name], (0, self.batch), (0, rows))
            for name, v in self._whole.items()
        }
        done: list[_Done] = []
        backwards: dict[str, int] = {}
        operators = self.at(rows)
        name = ""
        try:
            for operator in operators:
                name = operator.name
                done.append(self._forward(operator, leaves, rows, env, watch))
            while done:
                name = done[-1].operator.name
                at = self._backward(done[-1], watch)
                if at is not None:
                    backwards[name] = at
                done.pop()
        except Exception as e:
            where = f"measuring operator {name} of task {self.task} at {rows} of {self.batch} rows"
            raise RuntimeError(f"{where}: {type(e).__name__}: {e}") from e
        times = watch.read_ms()
        return [
            OperatorTime(o.name, times[i], times[backwards[o.name]] if o.name in backwards else 0.0)
            for i, o in enumerate(operators)
        ]

    def _runnable(self) -> tuple[Operator, ...]:
        """Operators of the task but for those that run everywhere and what needs their values."""
        missing: set[str] = set()
        found = []
        for o in self._capture.graph.operators:
            if o.task != self.task:
                continue
            if o.layout is Layout.EVERYWHERE or missing.intersection(o.inputs):
                missing.update(o.outputs)
            else:
                found.append(o)
        return tuple(found)

    def _forward(
        self, operator: Operator, leaves: Sequence[Any], rows: int, env: dict[str, Any], watch: _Watch
    ) -> _Done:
        piece = self._capture.pieces[operator.name]
        given = {v: self._detached(v, env[v]) for v in operator.inputs}
        arguments = [self._argument(source, leaves, rows, given) for source in piece.sources]
        start = watch.mark()
        with operator_randomness(self._device, 0, 0, operator.name, 0):
            outputs = self._callables[operator.name](*arguments)
        watch.interval(start)
        if operator.name in self._capture.coarse:
            outputs = outputs[: len(piece.outputs)]  # what it logs comes after its loss
        named = dict(zip(piece.outputs, outputs, strict=True))
        env.update((n, v) for n, v in named.items() if rows == self.batch or not self._values[n].meets)
        if rows == self.batch:
            self._whole.update(
                (n, v.detach() if isinstance(v, torch.Tensor) else v)
                for n, v in named.items()
                if operator.layout is Layout.WHOLE or self._values[n].meets
            )
        tensors = [t for t in given.values() if isinstance(t, torch.Tensor) and t.requires_grad]
        roots = {
            n: v
            for n, v in named.items()
            if n in self._roots and isinstance(v, torch.Tensor) and v.requires_grad
        }
        return _Done(operator, tensors, roots)

    def _argument(self, source: Source, leaves: Sequence[Any], rows: int, given: Mapping[str, Any]) -> Any:
        match source:
            case LeafRef(index):
                return leaves[index]
            case ValueRef(name):
                return given[name]
            case RowNumbers():
                return torch.arange(rows, device=self._device)
        return 0

    def _detached(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        leaf = value.detach()
        return leaf.requires_grad_() if name in self._carrying else leaf

    def _backward(self, done: _Done, watch: _Watch) -> int | None:
        """Times the gradients of the operator's parameters and inputs; None where there are none."""
        parameters = [p for n in done.operator.parameters if (p := self._parameters[n]).requires_grad]
        wanted = parameters + done.inputs
        if not done.outputs or not wanted:
            return None
        roots = list(done.outputs.values())
        seeds = [torch.ones_like(root) for root in roots]
        start = watch.mark()
        torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        return watch.interval(start)


class _Watch:
    """Intervals on the device's own clock: read once, when all work of a pass is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self._intervals: list[tuple[int, int]] = []

    def mark(self) -> int:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        return len(self._marks) - 1

    def interval(self, start: int) -> int:
        """Closes an interval; gives its number."""
        self._intervals.append((start, self.mark()))
        return len(self._intervals) - 1

    def read_ms(self) -> list[float]:
        synchronize(self._device)
        if self._device.type == "cuda":
            return [self._marks[a].elapsed_time(self._marks[b]) for a, b in self._intervals]
        return [(self._marks[b] - self._marks[a]) * 1e3 for a, b in self._intervals]
