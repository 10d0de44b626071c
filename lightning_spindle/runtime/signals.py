"""Signals that Lightning acts on, acted on by all ranks at the same step.

Lightning's handlers of SIGTERM and of SLURM's requeue signal save checkpoints, broadcast, and end the
training of the rank that they run on. Inside a step that is the wrong place: other ranks wait there for
this one's values. So a signal is only noted when it comes, on whichever rank, and the handlers run on
every rank where all of them are at the same call (decision 0025).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_spindle.runtime.transport import Transport, everyone

_runs = count()


class Signals:
    """Lightning's signal handlers of one run, put off until ``look``.

    All ranks make it at the same call. A signal is acted on once a run, however often and on however many
    ranks it comes.

    Args:
        trainer: whose handlers are registered already.
        transport: between all ranks.
        device: where it has its tensors.
    """

    def __init__(self, trainer: Any, transport: Transport, device: torch.device) -> None:
        self._trainer, self._transport, self._device = trainer, transport, device
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"lightning_spindle/signals/{next(_runs)}", store)
        self._acted: set[int] = set()
        self.ending = False
        """Whether all ranks raise SIGTERMException now: they still work together."""
        self._handlers = self._put_off()

    def look(self) -> None:
        """Acts on signals that came on any rank; collective.

        Raises:
            SIGTERMException: on every rank, where one was told to end.
        """
        for number in sorted(self._agreed() - self._acted):
            self._acted.add(number)
            if number in self._handlers:
                self._handlers[number](number, None)
        if self._trainer.received_sigterm:
            self.ending = True
            raise SIGTERMException

    def _put_off(self) -> dict[int, Callable[[int, FrameType | None], None]]:
        """Exchanges the handlers for notes; Lightning restores what was there before them."""
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {}
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if isinstance(handler, _HandlersCompose):
                handlers[number] = handler
                signal.signal(number, self._note)
        return handlers

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Leaves word for rank 0 at once, so that whatever this rank does after it comes later there too."""
        # Where the store's host is gone, the next look says so.
        with suppress(RuntimeError, ValueError):
            self._store.set(str(number), "come")

    def _agreed(self) -> set[int]:
        """The signals that rank 0 has found, on every rank."""
        flags = torch.zeros(signal.NSIG, dtype=torch.uint8)
        if self._transport.rank == 0:
            with suppress(RuntimeError, ValueError):
                for number in self._handlers.keys() - self._acted:
                    flags[number] = self._store.check([str(number)])
        flags = flags.to(self._device)
        self._transport.broadcast(flags, 0, everyone(self._transport)).wait()
        return {number for number, come in enumerate(flags.tolist()) if come}
