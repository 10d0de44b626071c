"""The engine: one rank's part of a program, iteration by iteration (paper, section 3.6).

Forward runs operators on this rank's rows and posts messages; backward goes through the
runs in reverse, each from detached inputs, so that a run's activations are freed as soon as
it is done. Nothing here knows Lightning, and all communication goes through a transport.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lightning_spindle.capture.pieces import BatchIndex, Capture, LeafRef, Source, ValueRef
from lightning_spindle.program import Edge, Instruction, Kind, Program, ProgramRun
from lightning_spindle.runtime.exchange import Exchange, weight
from lightning_spindle.runtime.gradients import reduce_bucket
from lightning_spindle.runtime.iteration import Iteration, Mark, RunState, TaskBatch
from lightning_spindle.runtime.messages import Messenger, Received
from lightning_spindle.runtime.randomness import operator_randomness
from lightning_spindle.runtime.rowneeds import Needs, no_rows, reads_batch, rows_needed
from lightning_spindle.runtime.rows import Rows, cut, join, meeting, summed
from lightning_spindle.runtime.sharding import broadcast_values
from lightning_spindle.runtime.transport import Transport
from lightning_spindle.timeline import Category

Callables = Mapping[str, Callable[..., tuple[Any, ...]]]


_CATEGORY = {
    Kind.FORWARD: Category.FORWARD,
    Kind.ACTIVATION: Category.TRANSFER,
    Kind.EXCHANGE: Category.SYNC,
    Kind.BACKWARD: Category.BACKWARD,
    Kind.GRADIENT: Category.TRANSFER,
    Kind.REDUCE: Category.SYNC,
    Kind.BROADCAST: Category.SYNC,
}


class InstructionError(RuntimeError):
    """An instruction failed; says which, where, and why."""


class Engine:
    """Executes a program's instructions of one rank.

    Args:
        program: the same on every rank.
        capture: the step that the program was lowered from.
        callables: built pieces of the operators that this rank runs.
        parameters: those that this rank holds, by canonical name.
        transport: to the other ranks.
        device: where this rank's tensors are.
        seed: of the operators' random numbers.
    """

    def __init__(
        self,
        program: Program,
        capture: Capture,
        callables: Callables,
        parameters: Mapping[str, torch.nn.Parameter],
        transport: Transport,
        device: torch.device,
        *,
        seed: int = 0,
    ) -> None:
        self.marks: list[Mark] = []
        self._clock_s = 0.0
        self._capture = capture
        self._callables = callables
        self._parameters = parameters
        self._transport = transport
        self._device = device
        self.seed = seed
        self._values = capture.graph.value_map()
        self._messenger = Messenger(transport, device)
        self._result_values = {r.value for r in capture.graph.results}
        self._losses = {r.value: r for r in capture.graph.results if r.is_loss}
        self.use(program)

    def use(self, program: Program, digest: int = 0) -> None:
        """Goes on with another program of the same runs, from the next iteration on.

        ``digest`` tells what trains from anything else that could; ranks compare theirs in each iteration.
        """
        self.program, self.digest = program, digest
        order = program.rank(self._transport.rank)
        backward = (Kind.BACKWARD, Kind.GRADIENT, Kind.REDUCE)
        self._backwards = tuple(i for i in order if i.kind in backward)
        self._broadcasts = tuple(i for i in order if i.kind is Kind.BROADCAST)
        self._forwards = tuple(i for i in order if i.kind not in (*backward, Kind.BROADCAST))
        self._entering = _by(program.edges, lambda e: e.target)
        self._leaving = _by(program.edges, lambda e: e.source)
        self._exchange = Exchange(program, self._capture, self._transport, self._device, digest)
        self._reading = {run.index for run in program.runs if reads_batch(self._capture, run)}
        self._needs = {
            task: rows_needed(program, self._capture, task, self._transport.rank)
            for task in {run.task for run in program.runs}
        }

    @property
    def rank(self) -> int:
        """This rank."""
        return self._transport.rank

    @property
    def tasks(self) -> frozenset[str]:
        """Tasks whose batches this rank must load."""
        return frozenset(r.task for r in self.program.runs if self._transport.rank in r.devices)

    def needs(self, task: str) -> Needs:
        """The rows of a task's batches that this rank must read, none where it runs nothing of it."""
        return self._needs.get(task, no_rows)

    def forward(self, batches: Mapping[str, TaskBatch], *, index: int, batch_idx: int) -> Iteration:
        """All forwards of an iteration; afterwards every rank knows all results.

        Args:
            batches: every task's batch; a task that is missing or has no rows is idle.
            index: number of the iteration, for the operators' random numbers.
        """
        self.marks.clear()
        signatures = {
            task: batch.signature(self._capture.layouts[task])
            for task, batch in batches.items()
            if batch.leaves is not None
        }
        iteration = Iteration(index, batch_idx, dict(batches), signatures)
        for instruction in self._forwards:
            self._execute(instruction, iteration)
        # All ranks were in the exchange, so that everything sent before it has arrived.
        self._messenger.finish()
        return iteration

    def backward(
        self, iteration: Iteration, seeds: Mapping[str, float | torch.Tensor], *, sync: bool
    ) -> None:
        """All backwards; gradients are added to the parameters' ``grad``.

        Args:
            seeds: derivative of what is minimised by each loss: by the name of the loss's value, or
                by task for all losses of the task.
            sync: sum gradients over their holders; False inside an accumulation window.
        """
        for instruction in self._backwards:
            if instruction.kind is not Kind.REDUCE or sync:
                self._execute(instruction, iteration, seeds)
        self._clock_s = time.perf_counter()
        self._messenger.finish()
        for bucket in iteration.buckets:
            bucket.finish()
        self._lap(None, Category.SYNC)
        iteration.buckets.clear()
        iteration.runs.clear()
        iteration.received.clear()

    def share(self) -> None:
        """Owners give the new values of parameters to their other holders; after the optimizer's step."""
        self._lap(None, Category.OPTIMIZER)
        pending = []
        for instruction in self._broadcasts:
            with self._executing(instruction):
                broadcast = self.program.broadcasts[instruction.index]
                pending.append(broadcast_values(broadcast, self._parameters, self._transport, self._device))
        for values in pending:
            values.finish()
        self._lap(None, Category.SYNC)

    def _execute(
        self,
        instruction: Instruction,
        iteration: Iteration,
        seeds: Mapping[str, float | torch.Tensor] | None = None,
    ) -> None:
        with self._executing(instruction):
            match instruction.kind:
                case Kind.FORWARD:
                    self._forward(instruction, iteration)
                case Kind.ACTIVATION:
                    self._activation(instruction, iteration)
                case Kind.EXCHANGE:
                    self._exchange.run(iteration)
                case Kind.BACKWARD:
                    self._backward(instruction, iteration, seeds or {})
                case Kind.GRADIENT:
                    self._gradient(instruction, iteration)
                case Kind.REDUCE:
                    bucket = self.program.buckets[instruction.index]
                    pending = reduce_bucket(bucket, self._parameters, self._transport, self._device)
                    iteration.buckets.append(pending)

    @contextmanager
    def _executing(self, instruction: Instruction) -> Iterator[None]:
        """Inside, an instruction is timed, and named by what it raises."""
        self._clock_s = time.perf_counter()
        try:
            yield
        except Exception as e:
            where = self.program.describe(instruction)
            raise InstructionError(f"rank {self._transport.rank}, {where}: {type(e).__name__}: {e}") from e
        self._lap(instruction, _CATEGORY[instruction.kind])

    def _lap(self, instruction: Instruction | None, category: Category) -> None:
        """Marks the time since the last lap."""
        now_s = time.perf_counter()
        self.marks.append(Mark(instruction, category, self._clock_s, now_s))
        self._clock_s = now_s

    def _rows(self, run: ProgramRun, iteration: Iteration, rank: int | None = None) -> Rows:
        """Rows of a run's shard on ``rank`` (default: this one); empty where the task is idle."""
        shard = run.shard_of(self._transport.rank if rank is None else rank)
        batch = iteration.batches.get(run.task)
        if shard is None or batch is None:
            return (0, 0)
        return run.rows(shard, batch.rows)

    def _forward(self, instruction: Instruction, iteration: Iteration) -> None:
        run = self.program.runs[instruction.index]
        rows = self._rows(run, iteration)
        if rows[0] >= rows[1]:
            return
        inputs = self._gather_inputs(run, rows, iteration)
        self._lap(instruction, Category.WAIT)
        env: dict[str, Any] = dict(inputs)
        batch, layout = iteration.batches[run.task], self._capture.layouts[run.task]
        leaves = batch.taken(layout, rows) if run.index in self._reading else []
        for name in run.operators:
            piece = self._capture.pieces[name]
            arguments = [self._argument(source, leaves, env, rows, iteration) for source in piece.sources]
            with operator_randomness(self._device, self.seed, iteration.index, name, rows[0]):
                outputs = self._callables[name](*arguments)
            if name in self._capture.coarse:
                loss, iteration.coarse[name] = outputs
                outputs = (loss,) if piece.outputs else ()
            if piece.gives:
                (iteration.given[run.task],), outputs = outputs, ()
            env.update(zip(piece.outputs, outputs, strict=True))
        leaving = [e.value for e in self._leaving.get(run.index, ())]
        given = [v for name in run.operators for v in self._capture.pieces[name].outputs]
        iteration.runs[run.index] = RunState(
            rows,
            inputs,
            {v: env[v] for v in leaving},
            {v: env[v] for v in given if v in self._result_values},
        )

    def _argument(
        self, source: Source, leaves: list[Any], env: Mapping[str, Any], rows: Rows, iteration: Iteration
    ) -> Any:
        """What a piece that sees ``rows`` is given for one of its sources."""
        match source:
            case LeafRef(index):
                return leaves[index]
            case ValueRef(name):
                return env[name]
            case BatchIndex():
                return iteration.batch_idx
        return torch.arange(*rows, device=self._device)

    def _gather_inputs(self, run: ProgramRun, rows: Rows, iteration: Iteration) -> dict[str, torch.Tensor]:
        """This shard's inputs as leaves: local rows and received rows joined."""
        inputs: dict[str, torch.Tensor] = {}
        for edge in self._entering.get(run.index, ()):
            value = self._values[edge.value]
            parts: list[tuple[Rows, torch.Tensor]] = []
            source = iteration.runs.get(edge.source)
            if source is not None:
                shared = meeting(source.rows, self._read(edge, rows, iteration))
                if shared is not None:
                    parts.append((shared, cut(source.outputs[edge.value], value, source.rows, shared)))
            for message in iteration.received.pop(edge.index, ()):
                parts.append((message.rows, _awaited(message, edge)))
            joined = join(parts, value)
            if not isinstance(joined, torch.Tensor):
                inputs[edge.value] = joined
                continue
            inputs[edge.value] = joined.detach()
            if edge.gradient and torch.is_grad_enabled():
                inputs[edge.value].requires_grad_()
        return inputs

    def _read(self, edge: Edge, rows: Rows, iteration: Iteration) -> Rows:
        """The rows of an edge's value that a shard with ``rows`` of the batch reads."""
        return edge.reads(rows, iteration.batches[self.program.runs[edge.target].task].rows)

    def _message(self, instruction: Instruction, iteration: Iteration) -> tuple[Edge, Rows, int, bool] | None:
        """Edge, rows, peer and whether this rank sends; None where no rows meet."""
        edge = self.program.edges[instruction.index]
        batch = iteration.batches.get(self.program.runs[edge.source].task)
        if batch is None or batch.rows == 0:
            return None
        rows = self.program.shared_rows(edge, instruction.source, instruction.target, batch.rows)
        if rows[0] >= rows[1]:
            return None
        sender, receiver = self.program.participants(instruction)
        sends = sender == self._transport.rank
        return edge, rows, receiver if sends else sender, sends

    def _activation(self, instruction: Instruction, iteration: Iteration) -> None:
        message = self._message(instruction, iteration)
        if message is None:
            return
        edge, rows, peer, sends = message
        value = self._values[edge.value]
        task = self.program.runs[edge.source].task
        signature = iteration.signatures[task]
        if value.dim is None:
            # All of its shape may depend on the number of rows (similarities of all pairs).
            signature = (*signature, iteration.batches[task].rows)
        if sends:
            state = iteration.runs[edge.source]
            tensor = cut(state.outputs[edge.value], value, state.rows, rows)
            self._messenger.send_value(instruction, edge, value, tensor, rows, peer, signature)
        else:
            received = self._messenger.receive_value(instruction, value, rows, peer, signature)
            iteration.received.setdefault(edge.index, []).append(received)

    def _backward(
        self, instruction: Instruction, iteration: Iteration, seeds: Mapping[str, float | torch.Tensor]
    ) -> None:
        run = self.program.runs[instruction.index]
        while iteration.passed:
            iteration.runs[iteration.passed.pop()].inputs.clear()
        state = iteration.runs.get(run.index)
        if state is None:
            return
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for name, output in state.outputs.items():
            parts = _arrived(state.gradients.pop(name, []))
            if parts and output.requires_grad:
                roots.append(output)
                gradients.append(summed(output, self._values[name], state.rows, parts))
        for name, output in state.results.items():
            if name in self._losses and output is not None and output.requires_grad:
                seed = seeds.get(name, seeds.get(run.task))
                if seed is not None:
                    share = weight(self._losses[name], run, state.rows, iteration)
                    roots.append(output)
                    gradients.append(torch.ones_like(output) * (seed * share))
        self._lap(instruction, Category.WAIT)
        if roots:
            torch.autograd.backward(roots, gradients)
        for edge in self._entering.get(run.index, ()):
            source = iteration.runs.get(edge.source)
            if edge.gradient and source is not None:
                self._pass_back(edge, state, source, self._read(edge, state.rows, iteration))
        state.outputs.clear()
        state.results.clear()
        iteration.passed.append(run.index)

    def _pass_back(self, edge: Edge, state: RunState, source: RunState, read: Rows) -> None:
        """Gives the gradient of a value, whose rows ``read`` were read, to its producer on this same rank."""
        gradient = state.inputs[edge.value].grad
        shared = meeting(source.rows, read)
        if gradient is None or shared is None:
            return
        part = cut(gradient, self._values[edge.value], read, shared)
        source.gradients.setdefault(edge.value, []).append((shared, part))

    def _gradient(self, instruction: Instruction, iteration: Iteration) -> None:
        message = self._message(instruction, iteration)
        if message is None:
            return
        edge, rows, peer, sends = message
        value = self._values[edge.value]
        state = iteration.runs[edge.target if sends else edge.source]
        if sends:
            leaf, read = state.inputs[edge.value], self._read(edge, state.rows, iteration)
            gradient = None if leaf.grad is None else cut(leaf.grad, value, read, rows)
            self._messenger.send_gradient(instruction, gradient, cut(leaf.detach(), value, read, rows), peer)
        else:
            like = cut(state.outputs[edge.value].detach(), value, state.rows, rows)
            received = self._messenger.receive_gradient(instruction, like, rows, peer)
            state.gradients.setdefault(edge.value, []).append((rows, received))


def _arrived(parts: Iterable[tuple[Rows, Received | torch.Tensor]]) -> list[tuple[Rows, torch.Tensor]]:
    """Waits for gradient parts; those that say "unused" fall away."""
    tensors = [(rows, p.tensor() if isinstance(p, Received) else p) for rows, p in parts]
    return [(rows, tensor) for rows, tensor in tensors if tensor is not None]


def _awaited(message: Received, edge: Edge) -> torch.Tensor:
    """A value's rows that another rank sends; says which did not come."""
    try:
        tensor = message.tensor()
    except Exception as e:
        raise RuntimeError(f"edge {edge.index}, value {edge.value} did not arrive: {e}") from e
    assert tensor is not None
    return tensor


def _by(edges: Iterable[Edge], key: Callable[[Edge], int]) -> dict[int, list[Edge]]:
    found: dict[int, list[Edge]] = {}
    for edge in edges:
        found.setdefault(key(edge), []).append(edge)
    return found
