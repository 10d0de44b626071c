"""What ran when: the timeline that the simulator predicts and the engine measures.

Both (and the engine on virtual devices, "emulated") write the same ``Timeline``, so that their
iterations go through the same tables, plots and traces. Times are seconds from the start of the
iteration, on one clock for all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, get_args

Source = Literal["predicted", "measured", "emulated"]


class Category(StrEnum):
    """What a device spends time on, in the order in which overlapping events claim a moment."""

    __hash__ = str.__hash__  # many times faster than that of Enum

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    DATA = "data"
    """Loading and slicing batches."""
    TRANSFER = "transfer"
    """Activations and their gradients between devices."""
    SYNC = "sync"
    """Collectives: gradient buckets, losses and logged values."""
    WAIT = "wait"
    """Blocked until another device is ready."""

    @property
    def computes(self) -> bool:
        return self in _COMPUTING

    @property
    def communicates(self) -> bool:
        """Whether events of this category may overlap with others on the same device."""
        return self in (Category.TRANSFER, Category.SYNC)


_COMPUTING = frozenset({Category.FORWARD, Category.BACKWARD, Category.OPTIMIZER})


@dataclass(frozen=True, slots=True)
class Event:
    """One device did one thing from ``start_s`` to ``end_s``.

    ``instruction`` is the text form of the program's instruction ("F3", "A5:0>1"), empty
    for what no instruction asks for (optimizer, data). ``task`` is empty where several
    tasks share the event.
    """

    rank: int
    start_s: float
    end_s: float
    instruction: str
    label: str
    category: Category
    task: str = ""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class MemorySample:
    """From ``time_s`` on, ``bytes`` are held on a device."""

    rank: int
    time_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of one iteration on all devices, ordered by start, rank and end.

    Raises:
        ValueError: "invalid timeline: ...", an event of an unknown device or that ends
            before it starts.
    """

    source: Source
    devices: int
    events: tuple[Event, ...]
    iteration: int | None = None
    memory: tuple[MemorySample, ...] = ()
    """How memory changes, in order of time for each rank; empty where nobody knows."""
    end_s: float = field(init=False, repr=False, compare=False, default=0.0)
    _of: dict[int, tuple[Event, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.source not in get_args(Source):
            raise ValueError(
                f"invalid timeline: source {self.source!r} is none of {', '.join(get_args(Source))}"
            )
        for e in self.events:
            if not 0 <= e.rank < self.devices:
                raise ValueError(f"invalid timeline: {e} on a device outside 0..{self.devices - 1}")
            if not e.start_s <= e.end_s:
                raise ValueError(f"invalid timeline: {e} ends before it starts")
        ordered = tuple(sorted(self.events, key=lambda e: (e.start_s, e.rank, e.end_s)))
        object.__setattr__(self, "events", ordered)
        object.__setattr__(self, "end_s", max((e.end_s for e in ordered), default=0.0))

    @property
    def start_s(self) -> float:
        return self.events[0].start_s if self.events else 0.0

    @property
    def span_s(self) -> float:
        """From the first start to the last end: the iteration's time."""
        return self.end_s - self.start_s

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks in the order in which they first appear."""
        return tuple(dict.fromkeys(e.task for e in self.events if e.task))

    def on(self, rank: int) -> tuple[Event, ...]:
        """The events of one device."""
        if not self._of:
            rows: dict[int, list[Event]] = {r: [] for r in range(self.devices)}
            for e in self.events:
                rows[e.rank].append(e)
            self._of.update((r, tuple(row)) for r, row in rows.items())
        return self._of[rank]

    def busy_share(self, rank: int) -> float:
        """Share of the iteration in which a device computes (forward, backward, optimizer)."""
        busy_s = _covered_s(e for e in self.on(rank) if e.category.computes)
        return busy_s / self.span_s if self.span_s else 0.0

    def idle_share(self, rank: int) -> float:
        """Share of the iteration in which a device does not compute."""
        return 1.0 - self.busy_share(rank) if self.span_s else 0.0

    @property
    def utilisation(self) -> float:
        """Mean of the devices' busy shares."""
        return sum(map(self.busy_share, range(self.devices))) / self.devices if self.devices else 0.0

    def breakdown(self, rank: int | None = None) -> dict[str, float]:
        """Seconds by category of one device, or summed over all; the rest is "idle".

        Each moment counts once: where events overlap, computing hides communication, and
        communication hides waiting (the order of ``Category``). The values therefore add
        up to the span, times the number of devices.
        """
        ranks = range(self.devices) if rank is None else (rank,)
        shares = {str(c): 0.0 for c in Category}
        for r in ranks:
            for category, seconds in _claimed_s(self.on(r)).items():
                shares[category] += seconds
        shares["idle"] = max(0.0, self.span_s * len(ranks) - sum(shares.values()))
        return shares

    def task_seconds(self) -> dict[str, dict[str, float]]:
        """Device seconds by task and category; overlapping events each count in full."""
        found: dict[str, dict[str, float]] = {task: {} for task in self.tasks}
        for e in self.events:
            if e.task:
                of = found[e.task]
                of[e.category] = of.get(e.category, 0.0) + e.duration_s
        return found

    def peak_bytes(self, rank: int) -> int | None:
        """The most memory that a device holds; None where nobody knows."""
        return max((m.bytes for m in self.memory if m.rank == rank), default=None)

    def from_zero(self) -> Timeline:
        """The same timeline, moved so that its first event starts at 0."""
        by = self.start_s
        events = tuple(replace(e, start_s=e.start_s - by, end_s=e.end_s - by) for e in self.events)
        memory = tuple(replace(m, time_s=m.time_s - by) for m in self.memory)
        return replace(self, events=events, memory=memory)

    def to_chrome_trace(self) -> str:
        """This timeline alone as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""
        return timeline_trace(self)


def timeline_trace(*timelines: Timeline | None) -> str:
    """Timelines side by side as one Chrome trace, JSON.

    Each timeline is a process named after its source, each device a thread (``tid`` is the
    rank); what overlaps with computing has a second thread below it (``tid`` is devices +
    rank). Times are microseconds. ``read_trace`` reads it back.
    """
    rows: list[dict[str, Any]] = []
    heads: list[dict[str, Any]] = []
    for pid, t in enumerate(t for t in timelines if t is not None):
        heads.append({"source": t.source, "devices": t.devices, "iteration": t.iteration})
        rows += _trace_names(t, pid)
        rows += [_trace_event(e, pid, t.devices) for e in t.events]
        rows += [_trace_sample(m, pid) for m in t.memory]
    body = ",\n".join(json.dumps(row) for row in rows)
    return f'{{"displayTimeUnit": "ms", "timelines": {json.dumps(heads)},\n"traceEvents": [\n{body}\n]}}\n'


def read_trace(text: str) -> tuple[Timeline, ...]:
    """The timelines that ``timeline_trace`` wrote, times to a nanosecond.

    Raises:
        ValueError: the text is no trace of ours.
    """
    try:
        body = json.loads(text)
        heads = body["timelines"]
        events: list[list[Event]] = [[] for _ in heads]
        memory: list[list[MemorySample]] = [[] for _ in heads]
        for row in body["traceEvents"]:
            if row["ph"] == "X":
                start_s = row["ts"] / 1e6
                args = row["args"]
                events[row["pid"]].append(
                    Event(
                        row["tid"] % heads[row["pid"]]["devices"],
                        start_s,
                        start_s + row["dur"] / 1e6,
                        args["instruction"],
                        row["name"],
                        Category(row["cat"]),
                        args["task"],
                    )
                )
            elif row["ph"] == "C":
                rank = int(row["name"].split()[1])
                memory[row["pid"]].append(MemorySample(rank, row["ts"] / 1e6, row["args"]["bytes"]))
        return tuple(
            Timeline(h["source"], h["devices"], tuple(e), h["iteration"], tuple(m))
            for h, e, m in zip(heads, events, memory, strict=True)
        )
    except (KeyError, TypeError, IndexError, AttributeError) as e:
        raise ValueError(f"invalid timeline: missing or malformed field ({e})") from e


def comparison(predicted: Timeline, measured: Timeline) -> str:
    """The promise held against what happened: a table, one line a category, ms a device."""
    a, b = predicted.breakdown(), measured.breakdown()
    n, m = max(predicted.devices, 1), max(measured.devices, 1)
    lines = [f"{'ms a device':12} {'predicted':>10} {'measured':>10}"]
    for name in a:
        if max(a[name], b[name]) > 0:
            lines.append(f"{name:12} {a[name] / n * 1e3:10.2f} {b[name] / m * 1e3:10.2f}")
    lines.append(f"{'iteration':12} {predicted.span_s * 1e3:10.2f} {measured.span_s * 1e3:10.2f}")
    return "\n".join(lines)


def _trace_names(t: Timeline, pid: int) -> list[dict[str, Any]]:
    def name(what: str, tid: int, text: str) -> dict[str, Any]:
        return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": text}}

    title = t.source if t.iteration is None else f"{t.source}, iteration {t.iteration}"
    rows = [name("process_name", 0, title)]
    talking = {e.rank for e in t.events if e.category.communicates}
    for rank in range(t.devices):
        threads = [(rank, f"device {rank}", 2 * rank)]
        if rank in talking:
            threads.append((t.devices + rank, f"device {rank}, communication", 2 * rank + 1))
        for tid, text, position in threads:
            rows.append(name("thread_name", tid, text))
            order = {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index"}
            rows.append({**order, "args": {"sort_index": position}})
    return rows


def _trace_event(e: Event, pid: int, devices: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": e.rank + (devices if e.category.communicates else 0),
        "ts": e.start_s * 1e6,
        "dur": e.duration_s * 1e6,
        "name": e.label,
        "cat": str(e.category),
        "args": {"instruction": e.instruction, "task": e.task},
    }


def _trace_sample(m: MemorySample, pid: int) -> dict[str, Any]:
    return {
        "ph": "C",
        "pid": pid,
        "name": f"bytes {m.rank}",
        "ts": m.time_s * 1e6,
        "args": {"bytes": m.bytes},
    }


def _covered_s(events: Iterable[Event]) -> float:
    """Seconds covered by at least one event; events ordered by start."""
    total, until = 0.0, float("-inf")
    for e in events:
        total += max(0.0, e.end_s - max(e.start_s, until))
        until = max(until, e.end_s)
    return total


def _claimed_s(events: Sequence[Event]) -> dict[Category, float]:
    """Seconds by category, each moment given to the first category in the order of ``Category``."""
    claimed: dict[Category, float] = {}
    before, seen = 0.0, set[Category]()
    for category in Category:
        if any(e.category is category for e in events):
            seen.add(category)
            covered = _covered_s(e for e in events if e.category in seen)
            claimed[category] = covered - before
            before = covered
    return claimed
