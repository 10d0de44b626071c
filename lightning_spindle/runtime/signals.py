"""Signals that Lightning acts on, acted on by all ranks at the same call.

Lightning's handlers of SIGTERM and of SLURM's requeue signal save checkpoints, broadcast, and end the
training of the rank that they run on. Inside a step that is the wrong place: other ranks wait there for
this one's values. So a signal is only noted when it comes, on whichever rank, and the handlers run on
every rank between steps (decision 0025).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_spindle.runtime.transport import Transport, everyone

_ONE_EVENT_S = 5.0
"""Within this time signals are one event: a scheduler sends them to all processes, not all at once."""

_runs = count()


class Signals:
    """Lightning's signal handlers during one run of a Trainer, put off until ``look``.

    Every rank makes one for each of its runs, in the same order.

    Args:
        transport: between all ranks.
        device: where it has its tensors.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport, self._device = transport, device
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"lightning_spindle/signals/{next(_runs)}", store)
        self._handlers: dict[int, Callable[[int, FrameType | None], None]] = {}
        self._process = os.getpid()
        self._times: dict[int, int] = {}
        self._acted_at_s: dict[int, float] = {}
        self.ending = False
        """Whether all ranks have been ended by SIGTERM, at the same call: they still work together."""

    @contextmanager
    def put_off(self, trainer: Any) -> Iterator[None]:
        """Inside, handlers that the Trainer registers only note signals, and its loops look for them.

        They look where Lightning 2.6 asks whether SIGTERM has come: before each training batch, at each
        epoch's end, and before each batch of an evaluation.
        """

        def register(original: Callable[[], None]) -> None:
            original()
            self._exchange_handlers()

        def look(original: Callable[[], None]) -> None:
            self.look()

        def look_after(original: Callable[[], None]) -> None:
            original()
            self.look()

        def look_before(original: Callable[..., None], *args: Any) -> None:
            self.look()
            original(*args)

        fit, evaluation = trainer.fit_loop, "_evaluation_step"
        with ExitStack() as stack:
            for owner, name, replacement in (
                (trainer._signal_connector, "register_signal_handlers", register),
                # Lightning's own look sees rank 0's signals alone and hides a failed broadcast.
                (fit.epoch_loop, "_broadcast_sigterm_tensor", look),
                (fit, "on_advance_end", look_after),
                # Later its progress would tell a resumed run that the batch was evaluated.
                (fit.epoch_loop.val_loop, evaluation, look_before),
                (trainer.validate_loop, evaluation, look_before),
                (trainer.test_loop, evaluation, look_before),
            ):
                stack.enter_context(_shadowed(owner, name, replacement))
            yield

    def look(self) -> None:
        """Acts on signals that came on any rank; collective.

        Raises:
            SIGTERMException: on every rank, where one was told to end.
        """
        for number in self._agreed():
            self._times[number] = self._times.get(number, 0) + 1
            self._acted_at_s[number] = time.monotonic()
            # Also where a handler of the user's ends the rank itself.
            self.ending |= number == signal.SIGTERM
            self._handlers[number](number, None)
        if self.ending:
            raise SIGTERMException

    def _exchange_handlers(self) -> None:
        """Lightning's become notes; it restores what was there before them when the run ends."""
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if isinstance(handler, _HandlersCompose):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Leaves word for rank 0 at once, so that whatever this rank does after it comes later there too."""
        if os.getpid() != self._process:
            _act_in_child(number)
        elif time.monotonic() - self._acted_at_s.get(number, float("-inf")) > _ONE_EVENT_S:
            with suppress(RuntimeError, ValueError):
                self._store.add(self._key(number), 1)

    def _key(self, number: int) -> str:
        return f"{number}/{self._times.get(number, 0)}"

    def _agreed(self) -> list[int]:
        """The signals that rank 0 has found, on every rank."""
        flags = torch.zeros(signal.NSIG, dtype=torch.uint8)
        if self._transport.rank == 0:
            # Without the store's host (torchrun's agent, say) no signal is heard, and training goes on.
            with suppress(RuntimeError, ValueError):
                for number in self._handlers:
                    flags[number] = self._store.check([self._key(number)])
        flags = flags.to(self._device)
        self._transport.broadcast(flags, 0, everyone(self._transport)).wait()
        return [number for number, come in enumerate(flags.tolist()) if come]


def _act_in_child(number: int) -> None:
    """A process that was forked in the run has its handlers: SIGTERM ends it, the others are not for it."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


@contextmanager
def _shadowed(owner: Any, name: str, replacement: Callable[..., None]) -> Iterator[None]:
    """Inside, ``replacement`` is called for the owner's method, with it as the first argument."""
    setattr(owner, name, partial(replacement, getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)
