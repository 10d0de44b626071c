"""Virtual clocks of ranks that are threads, which take turns in the order of virtual time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from lightning_spindle.emulate.network import Network, Posted


class EmulationError(RuntimeError):
    """The ranks cannot go on: they wait for each other, or one of them failed."""


class Clocks:
    """One clock a rank. Guarantees: a rank talks to the network only when no other can at an earlier time.

    Exactly one rank's thread runs at any moment: the one whose next act is the earliest. It runs until
    it next wants to post something or waits; computing only moves its own clock. So results are the
    same in every run.

    Args:
        limit_s: of real time in which no rank gets a turn, so that nothing hangs.
    """

    def __init__(self, ranks: int, network: Network, limit_s: float) -> None:
        self.now_s = [0.0] * ranks
        self._network = network
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._go = [threading.Semaphore(0) for _ in range(ranks)]
        self._parked: dict[int, Callable[[], float]] = {}
        """Ranks that wait, and when each can act; infinite while that is not known."""
        self._running = ranks
        self._turns = 0
        self._error: BaseException | None = None

    def spend(self, rank: int, seconds: float) -> None:
        """A rank computes."""
        self.now_s[rank] += seconds

    def take_turn(self, rank: int) -> float:
        """Returns once no other rank can act before this one's time, which is returned."""
        self._park(rank, lambda: self.now_s[rank])
        return self.now_s[rank]

    def wait(self, rank: int, posted: Posted) -> None:
        """The rank goes on when a transfer has ended."""
        if posted.end_s is None:
            self._park(rank, lambda: math.inf if posted.end_s is None else posted.end_s)
        assert posted.end_s is not None
        self.now_s[rank] = max(self.now_s[rank], posted.end_s)

    def align(self, rank: int) -> None:
        """All ranks come here, and go on at the time of the last."""
        posted = self._network.barrier(self.take_turn(rank), rank, len(self.now_s))
        self.wait(rank, posted)

    def leave(self) -> None:
        """A rank has ended."""
        with self._lock:
            self._running -= 1
            self._choose()

    def fail(self, error: BaseException) -> None:
        """A rank has failed: the others raise."""
        with self._lock:
            self._give_up(error)

    def _park(self, rank: int, when_s: Callable[[], float]) -> None:
        with self._lock:
            self._parked[rank] = when_s
            self._running -= 1
            self._choose()
        turns = -1
        while not self._go[rank].acquire(timeout=self._limit_s):
            if turns == self._turns:
                raise EmulationError(f"no rank had a turn for {self._limit_s:g} s")
            turns = self._turns
        if self._error is not None:
            raise EmulationError(f"another rank failed: {self._error}") from self._error

    def _choose(self) -> None:
        """Where all wait: lets the network go on until a rank can, and wakes the first that can."""
        if self._running or not self._parked or self._error is not None:
            return
        while True:
            first = min(self._parked, key=lambda r: (self._parked[r](), r))
            at_s, end_s = self._parked[first](), self._network.next_end_s()
            if self._network.settle(min(at_s, end_s)):
                continue
            if end_s <= at_s and end_s < math.inf:
                self._network.end_next()
            elif at_s < math.inf:
                break
            else:
                self._give_up(EmulationError("ranks wait for each other for ever"))
                return
        del self._parked[first]
        self._running = 1
        self._turns += 1
        self._go[first].release()

    def _give_up(self, error: BaseException) -> None:
        self._error = self._error or error
        for rank in self._parked:
            self._go[rank].release()
