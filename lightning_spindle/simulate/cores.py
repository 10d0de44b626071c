"""Cores that the processes of one machine share."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(slots=True)
class SharedCores:
    """Work of ``active`` ranks on ``cores`` cores: each proceeds at rate min(1, cores / active).

    Processor sharing with a virtual clock: all jobs progress alike, so a job ends when the
    clock reaches its start plus its work, and one heap orders the ends whatever the rate.
    """

    cores: int | None
    version: int = 0
    """Changes whenever the next end may have moved."""
    _clock: float = 0.0
    _now_s: float = 0.0
    _jobs: list[tuple[float, int]] = field(default_factory=list)

    def add(self, now_s: float, rank: int, work_s: float) -> None:
        """``rank`` starts ``work_s`` of computing."""
        self._forward(now_s)
        heapq.heappush(self._jobs, (self._clock + work_s, rank))
        self.version += 1

    def next_end_s(self) -> float | None:
        """When the next job ends, should nothing else start before."""
        if not self._jobs:
            return None
        return self._now_s + max(0.0, self._jobs[0][0] - self._clock) / self._rate()

    def finish(self, now_s: float) -> int:
        """Takes out the job that ends at ``now_s``; gives its rank."""
        self._forward(now_s)
        end, rank = heapq.heappop(self._jobs)
        self._clock = max(self._clock, end)
        self.version += 1
        return rank

    def _rate(self) -> float:
        return 1.0 if self.cores is None else min(1.0, self.cores / max(1, len(self._jobs)))

    def _forward(self, now_s: float) -> None:
        self._clock += (now_s - self._now_s) * self._rate()
        self._now_s = now_s
