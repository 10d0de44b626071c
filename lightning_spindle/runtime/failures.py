"""A rank's failure reaches the others: they stop waiting, and say whose error it was.

A rank that raises leaves word in the store that the ranks met at, and breaks its connections,
so that ranks that wait for it wake up at once. Those find the word there and raise it as theirs.
A rank that is killed leaves none; its closed connections say that it is gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

_KEY, _READ, _CALL = "failure", "failure_read_by", "call_of_rank_"
_PATIENCE_S = 1.0
_LOST_PATIENCE_S = 3.0
_LINGER_S = 2.0
_POLL_S = 0.02


class PeerError(RuntimeError):
    """Another rank failed, ended, or did not come; says which and why, as far as it is known."""


class Failures:
    """Where ranks leave word of what ended them.

    Args:
        store: that all ranks reach; rank 0's process may host it.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = dist.PrefixStore("lightning_spindle", store)
        self._rank, self._size = rank, size

    def explain(self, error: Exception, peers: str, waited_s: float) -> PeerError:
        """What to raise in place of a communication's ``error`` with ``peers``."""
        too_long = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        # A peer whose own wait was too long closes its connections first and is patient itself, then
        # leaves word: whoever lost a connection waits for that longer.
        known = self.known(_PATIENCE_S if too_long else _LOST_PATIENCE_S)
        if known is not None:
            return PeerError(f"rank {self._rank} stops, because {known}")
        where = "".join(f" {call}, without the others." for call in self._calls())
        if too_long:
            # A wait that took too long closes its group: if its error was caught, the next fails at once.
            how = f"waited {waited_s:.0f} s" if waited_s >= 1 else "waited too long, in an earlier call,"
            return PeerError(
                f"rank {self._rank} {how} for {peers} in vain: it is stuck, or not at the same call.{where} "
                f"Calls in which ranks work together (trainer.save_checkpoint, strategy.full_model(), "
                f"self.clip_gradients) must be made by every rank, not only where rank is 0"
            )
        return PeerError(
            f"rank {self._rank} lost its connection to {peers}: a rank has ended without leaving word "
            f"(killed, out of memory, or ended by an error outside the Trainer); see its own output.{where}"
        )

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Inside, errors of waits that take too long tell that this rank is at ``what``."""
        self._store.set(f"{_CALL}{self._rank}", f"Rank {self._rank} is at {what}")
        yield
        self._store.set(f"{_CALL}{self._rank}", "")

    def _calls(self) -> list[str]:
        found = []
        with suppress(RuntimeError, ValueError):
            for key in (f"{_CALL}{rank}" for rank in range(self._size)):
                if self._store.check([key]):
                    found.append(self._store.get(key).decode(errors="replace"))
        return [call for call in found if call]

    def report(self, error: BaseException) -> None:
        """Leaves word of this rank's error, unless another rank has."""
        if self.known(0.0) is None:
            text = f"rank {self._rank} failed: {type(error).__name__}: {error}"
            if isinstance(error, PeerError):
                text = str(error)
            try:
                self._store.set(_KEY, text[:4000])
            except (RuntimeError, ValueError):
                return

    def known(self, patience_s: float) -> str | None:
        """The word left by a rank, waiting for it so long; None where there is none."""
        limit = time.monotonic() + patience_s
        try:
            while not self._store.check([_KEY]):
                if time.monotonic() >= limit:
                    return None
                time.sleep(_POLL_S)
            text: str = self._store.get(_KEY).decode(errors="replace")
        except (RuntimeError, ValueError):
            return None
        return text

    def leave(self) -> None:
        """Called last: rank 0, which may host the store, lets the others read it first."""
        try:
            read = self._store.add(_READ, 1)
            limit = time.monotonic() + _LINGER_S
            while self._rank == 0 and read < self._size and time.monotonic() < limit:
                time.sleep(_POLL_S)
                read = self._store.add(_READ, 0)
        except (RuntimeError, ValueError):
            return


def default_failures() -> Failures:
    """Over the store that the default process group was made with."""
    store = dist.distributed_c10d._get_default_store()
    return Failures(store, dist.get_rank(), dist.get_world_size())
