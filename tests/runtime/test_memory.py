"""What an iteration keeps alive, and until when: each tensor that the engine makes is followed to its end."""

import gc
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarking import memory
from lightning_spindle import inspect
from lightning_spindle.program import Instruction, Kind
from lightning_spindle.runtime.engine import Engine, Iteration
from lightning_spindle.runtime.transport import ProcessGroupTransport
from tests.runtime.test_engine import PLACEMENTS, RAGGED, WEIGHTS, build_engine, on_ranks
from tests.support import handmade, toys
from tests.support.fitting import metagraph_of, random_plan, spindle_fit
from tests.support.ranks import run_ranks


class Followed(TorchDispatchMode):
    """Remembers the memory of every tensor made inside, under ``label``, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.label = ""
        self._refs: list[tuple[str, int, str, StorageWeakRef]] = []
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and self._key(tensor) not in given:
                storage = tensor.untyped_storage()
                known = self._known.get(storage._cdata)
                if known is None or known.expired():
                    ref = self._known[storage._cdata] = StorageWeakRef(storage)
                    self._refs.append((self.label, storage.nbytes(), str(func), ref))
        return result

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def alive(self, *excepted: Any) -> dict[str, list[str]]:
        """What made the memory that is still there, by label; ``excepted`` tensors aside."""
        known = {self._key(t) for t in tree_leaves(excepted) if isinstance(t, torch.Tensor)}
        found: dict[str, list[str]] = {}
        for label, size, func, ref in self._refs:
            if size and not ref.expired() and ref.cdata not in known:
                found.setdefault(label, []).append(func)
        return found

    def alive_soon(self, *excepted: Any) -> dict[str, list[str]]:
        """``alive``, once gloo's own threads have let go of a collective that they have just finished."""
        limit = time.monotonic() + 2.0
        while (found := self.alive(*excepted)) and time.monotonic() < limit:
            time.sleep(0.005)
        return found


class FollowedEngine(Engine):
    """Checks after each instruction that it has executed; what that made carries its text."""

    followed: Followed
    check: "Check | None" = None
    mine: Mapping[str, torch.nn.Parameter]

    def _execute(self, instruction: Instruction, iteration: Iteration, *args: Any) -> None:
        self.followed.label = str(instruction)
        super()._execute(instruction, iteration, *args)
        if self.check is not None:
            self.check.after(instruction, iteration, self)


def follow(placement: str, rows: list[Mapping[str, int]], check: "Check") -> None:
    def rank(transport: ProcessGroupTransport) -> None:
        engine, mine = build_engine(transport, PLACEMENTS[placement], FollowedEngine)
        assert isinstance(engine, FollowedEngine)
        engine.check, engine.mine = check, mine
        for step, row in enumerate(rows):
            for p in mine.values():
                p.grad = None
            batches = handmade.task_batches(handmade.batches(step, row))
            with Followed() as engine.followed:
                iteration = engine.forward(batches, index=step, batch_idx=step)
                check.between(iteration, engine)
                engine.backward(iteration, WEIGHTS, sync=True)
                check.end(iteration, engine)
                del iteration
            gradients = [p.grad for p in mine.values()]
            assert engine.followed.alive_soon(gradients) == {}, f"after step {step}"

    on_ranks(PLACEMENTS[placement][0], rank, blocking_sends=False)


class Check:
    """Which memory may be alive at each point of an iteration."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.freed_runs = 0
        self.waiting_runs = 0

    def after(self, i: Instruction, iteration: Iteration, engine: FollowedEngine) -> None:
        """Once a run's backward is done its activations are gone; those of the runs to come are there."""
        if i.kind is not Kind.BACKWARD or i.index not in iteration.runs:
            return
        # Its inputs stay until the next backward: their gradients are sent first.
        own = iteration.runs[i.index].inputs
        alive = engine.followed.alive(own)
        assert f"F{i.index}" not in alive, alive
        order = [b.index for b in engine.program.order if b.kind is Kind.BACKWARD]
        for index, state in iteration.runs.items():
            done = order.index(index) <= order.index(i.index)
            if done and index != i.index:
                kept = [*state.inputs, *state.outputs, *state.results, *state.gradients]
                assert not kept
                assert f"F{index}" not in alive, alive
            if not done and state.outputs:
                assert f"F{index}" in alive
                with self.lock:
                    self.waiting_runs += 1
        with self.lock:
            self.freed_runs += 1

    def between(self, iteration: Iteration, engine: FollowedEngine) -> None:
        """After all forwards, nothing that was received or sent is alive but as a run's input or output."""
        assert not iteration.received
        assert not engine._messenger.outgoing
        inputs = [state.inputs for state in iteration.runs.values()]
        alive = engine.followed.alive(inputs, iteration.results)
        assert not [label for label in alive if label.startswith("A")], alive

    def end(self, iteration: Iteration, engine: FollowedEngine) -> None:
        """While the iteration itself is still there: its results, and the parameters' gradients."""
        gradients = [p.grad for p in engine.mine.values()]
        assert engine.followed.alive_soon(gradients, iteration.results) == {}
        assert not engine._messenger.outgoing


@pytest.mark.parametrize(
    "placement",
    [
        "one device",
        "data parallel 3",
        "towers apart",
        "shrinking, crossing groups",
        "layers of one MetaOp apart",
        "an idle device",
    ],
)
def test_activations_are_freed_run_by_run(placement: str) -> None:
    check = Check()
    follow(placement, RAGGED, check)
    assert check.freed_runs > len(RAGGED)
    assert check.waiting_runs > len(RAGGED)


def test_forward_only_keeps_nothing() -> None:
    """Validation: without autograd an iteration is its results, and what was sent has left."""

    def rank(transport: ProcessGroupTransport) -> None:
        engine, _ = build_engine(transport, PLACEMENTS["towers apart"], FollowedEngine)
        assert isinstance(engine, FollowedEngine)
        for step in range(2):
            batches = handmade.task_batches(handmade.batches(step))
            with torch.no_grad(), Followed() as engine.followed:
                iteration = engine.forward(batches, index=step, batch_idx=step)
                assert not engine._messenger.outgoing
                results = iteration.results
                del iteration
                assert engine.followed.alive_soon(results) == {}

    on_ranks(2, rank, blocking_sends=False)


class NoIteration(Callback):
    """Counts the iterations that are alive when a batch has ended, without help of the garbage collector."""

    def __init__(self) -> None:
        self.before_backward: list[int] = []
        self.after: list[int] = []

    @staticmethod
    def alive() -> int:
        return sum(type(o) is Iteration for o in gc.get_objects())

    def on_before_backward(self, *args: Any) -> None:
        self.before_backward.append(self.alive())

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.after.append(self.alive())
        trainer.callback_metrics["before_backward"] = torch.tensor(float(min(self.before_backward)))
        trainer.callback_metrics["after"] = torch.tensor(float(max(self.after)))
        trainer.callback_metrics["batches"] = torch.tensor(float(len(self.after)))

    on_validation_batch_end = on_train_batch_end

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        gc.collect()
        gc.disable()

    def on_fit_end(self, *args: Any) -> None:
        gc.enable()


def test_a_fit_drops_each_iteration() -> None:
    """Neither the strategy nor what it gives to Lightning holds on to one: training and validation."""
    plan = random_plan(metagraph_of(toys.model(), toys.data()), 2, seed=1)
    fits = spindle_fit(
        toys.model,
        toys.data,
        2,
        strategy={"plan": plan},
        max_steps=2,
        accumulate_grad_batches=2,
        val_check_interval=2,
        limit_val_batches=1,
        callbacks=[NoIteration()],
    )
    for fit in fits:
        assert fit.metrics["batches"] == 3 + 1  # an epoch of training, a batch of validation
        assert fit.metrics["before_backward"] == 1
        assert fit.metrics["after"] == 0


def test_a_rank_with_half_a_model_needs_half_of_its_memory() -> None:
    """From before the model is built until after the fit: resident memory, with activations and messages.

    Against parameters, gradients and optimizer state of one process. ``python -m benchmarking.memory`` is the
    same at 100 M parameters.
    """
    width = 1400
    state_bytes = memory.STATE_BYTES * memory.parameters_of(width)
    for peaks in run_ranks(lambda rank, size: memory.measured_fit(width, size), 2):
        shares = {phase: peak / state_bytes for phase, peak in peaks.items()}
        assert list(shares) == ["build", "prepare", "train", "end"]
        assert shares["train"] > 0.45, shares  # what is measured is there
        assert max(shares.values()) <= 0.6, shares


def test_capture_holds_on_to_no_parameter() -> None:
    """Nor to any activation: what autograd keeps of the example is let go of, tanh's own result too."""
    model, data = memory.model(16), memory.data(16)
    weights = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    found = inspect(model, data)
    for p in model.parameters():
        p.data = torch.empty(0)
    gc.collect()
    assert not found.reasons
    assert sum(not ref.expired() for ref in weights) == 0
