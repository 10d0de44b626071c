"""The execution plan: which layers run where and when (paper, sections 3.3 to 3.5).

A plan is a tuple of runs. A Stage (*wave* in the paper's later version) is a set of runs
with a common span; the paper's planners name it in ``Run.stage``, others leave it None.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_spindle.graph import Layout, MetaGraph

FORMAT = 1
_TOLERANCE_MS = 1e-3


@dataclass(frozen=True, slots=True)
class Configuration:
    """How a run divides its n devices: data x tensor x sequence parallel."""

    data: int
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.sequence) < 1:
            raise ValueError(f"invalid configuration: {self}")

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.sequence

    def __str__(self) -> str:
        return f"dp{self.data}" + "".join(
            f"tp{self.tensor}" * (self.tensor > 1) + f"sp{self.sequence}" * (self.sequence > 1)
        )


@dataclass(frozen=True, slots=True)
class Run:
    """Layers [first, last) of a MetaOp on a fixed device group, from ``start_ms`` to ``end_ms``."""

    metaop: str
    first: int
    last: int
    devices: tuple[int, ...]
    start_ms: float
    end_ms: float
    configuration: Configuration
    stage: int | None = None

    @property
    def layers(self) -> int:
        return self.last - self.first

    def __str__(self) -> str:
        where = ",".join(map(str, self.devices))
        return f"{self.metaop}[{self.first}:{self.last}]@{where}"


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Runs in order of their planned start, with what the planner promises of them.

    ``makespan_ms`` is the planner's own figure. ``report`` holds named numbers that the
    planner adds (C*, lower bound, ...), ordered by name.

    Raises:
        ValueError: "invalid plan: ...", from the constructor, where the plan contradicts itself.
    """

    planner: str
    devices: int
    runs: tuple[Run, ...]
    makespan_ms: float
    report: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for run in self.runs:
            _check_run(run, self.devices)
        ordered = tuple(sorted(self.runs, key=lambda r: (r.start_ms, r.end_ms, r.metaop, r.first)))
        object.__setattr__(self, "runs", ordered)
        _check_layers(ordered)
        _check_devices(ordered)

    def validate(self, graph: MetaGraph) -> None:
        """Raises ValueError unless the plan runs each layer of ``graph`` once and in order."""
        known = {m.name: m for m in graph.metaops}
        spans: dict[str, tuple[float, float]] = {}
        counts = dict.fromkeys(known, 0)
        for run in self.runs:
            metaop = known.get(run.metaop)
            if metaop is None:
                raise ValueError(f"invalid plan: {run} names a MetaOp that the model does not have")
            if metaop.layout is Layout.WHOLE and len(run.devices) != 1:
                raise ValueError(f"invalid plan: {run} couples samples and must run on one device")
            counts[run.metaop] += run.layers
            start, end = spans.get(run.metaop, (run.start_ms, run.end_ms))
            spans[run.metaop] = (min(start, run.start_ms), max(end, run.end_ms))
        for name, count in counts.items():
            if count != len(known[name].layers):
                raise ValueError(f"invalid plan: {name} runs {count} of its {len(known[name].layers)} layers")
        for metaop in graph.metaops:
            for before in metaop.after:
                if spans[metaop.name][0] < spans[before][1] - _TOLERANCE_MS:
                    raise ValueError(f"invalid plan: {metaop.name} starts before {before} ends")
        _check_pins(self.runs, graph)

    def digest(self) -> str:
        """A short hash of everything that decides what runs where; equal plans, equal digests.

        Who planned, and what was promised (makespan, report), does not count.
        """
        body = {"format": FORMAT, "devices": self.devices, "runs": [_run_to_dict(run) for run in self.runs]}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        body = {
            "format": FORMAT,
            "planner": self.planner,
            "devices": self.devices,
            "makespan_ms": self.makespan_ms,
            "runs": [_run_to_dict(run) for run in self.runs],
            "report": dict(self.report),
        }
        return json.dumps(body, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ExecutionPlan:
        """Reads what ``to_json`` wrote.

        Raises:
            ValueError: the text is no plan, or one of another format.
        """
        try:
            body = json.loads(text)
        except json.JSONDecodeError as e:
            raise ValueError(f"invalid plan: the text is no JSON ({e})") from e
        try:
            if body["format"] != FORMAT:
                raise ValueError(f"invalid plan: format {body['format']}, this version reads {FORMAT}")
            runs = tuple(_run_from_dict(r) for r in body["runs"])
            report = tuple(sorted(body["report"].items()))
            return cls(body["planner"], body["devices"], runs, body["makespan_ms"], report)
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"invalid plan: missing or malformed field ({e})") from e

    def with_report(self, figures: Mapping[str, float]) -> ExecutionPlan:
        """The same plan with more figures in its report."""
        return replace(self, report=tuple(sorted({**dict(self.report), **figures}.items())))

    def __str__(self) -> str:
        """A table, one line a run."""
        head = f"{'run':34} {'devices':>14} {'config':>8} {'stage':>5} {'start ms':>10} {'end ms':>10}"
        lines = [f"{self.planner} plan, {self.devices} devices, {self.makespan_ms:.2f} ms predicted", head]
        for run in self.runs:
            label = f"{run.metaop}[{run.first}:{run.last}]"
            stage = "-" if run.stage is None else str(run.stage)
            lines.append(
                f"{label:34} {_ranges(run.devices):>14} {run.configuration!s:>8} {stage:>5} "
                f"{run.start_ms:10.3f} {run.end_ms:10.3f}"
            )
        return "\n".join(lines)


def _run_to_dict(run: Run) -> dict[str, Any]:
    body = asdict(run)
    body["layers"] = [body.pop("first"), body.pop("last")]
    body["devices"] = list(run.devices)
    return body


def _run_from_dict(body: Mapping[str, Any]) -> Run:
    first, last = _integers(body["layers"], 2)
    devices = _integers(body["devices"])
    configuration = body.get("configuration") or {"data": len(devices)}
    return Run(
        metaop=body["metaop"],
        first=first,
        last=last,
        devices=devices,
        start_ms=body["start_ms"],
        end_ms=body["end_ms"],
        configuration=Configuration(**configuration),
        stage=body.get("stage"),
    )


def _integers(numbers: Any, count: int | None = None) -> tuple[int, ...]:
    found = tuple(numbers)
    if count not in (None, len(found)) or not all(type(n) is int for n in found):
        raise TypeError(f"{numbers!r} where {count or 'some'} whole numbers belong")
    return found


def _check_run(run: Run, devices: int) -> None:
    if not 0 <= run.first < run.last:
        raise ValueError(f"invalid plan: {run} has no layers")
    if not run.devices or len(set(run.devices)) != len(run.devices):
        raise ValueError(f"invalid plan: {run} has no devices, or one twice")
    if not all(0 <= d < devices for d in run.devices):
        raise ValueError(f"invalid plan: {run} uses a device outside 0..{devices - 1}")
    if run.configuration.devices != len(run.devices):
        raise ValueError(f"invalid plan: {run} is configured for {run.configuration.devices} devices")
    if not 0 <= run.start_ms <= run.end_ms:
        raise ValueError(f"invalid plan: {run} lasts from {run.start_ms} to {run.end_ms} ms")


def _check_layers(runs: tuple[Run, ...]) -> None:
    at: dict[str, tuple[int, float]] = {}
    for run in runs:
        first, start_ms = at.get(run.metaop, (0, 0.0))
        if run.first != first:
            raise ValueError(f"invalid plan: {run} follows layer {first} of {run.metaop}")
        if run.start_ms < start_ms - _TOLERANCE_MS:
            raise ValueError(f"invalid plan: {run} starts before the layers below it end")
        at[run.metaop] = (run.last, run.end_ms)


def _check_devices(runs: tuple[Run, ...]) -> None:
    busy: dict[int, Run] = {}
    for run in runs:
        for device in run.devices:
            before = busy.get(device)
            if before is not None and run.start_ms < before.end_ms - _TOLERANCE_MS:
                raise ValueError(f"invalid plan: {before} and {run} overlap on device {device}")
            busy[device] = run


def _check_pins(runs: tuple[Run, ...], graph: MetaGraph) -> None:
    placed: dict[str, tuple[int, ...]] = {}
    for run in runs:
        pin = graph.metaop(run.metaop).pin
        if pin is not None and placed.setdefault(pin, run.devices) != run.devices:
            raise ValueError(f"invalid plan: {run} must share device {placed[pin]} (both write {pin})")


def _ranges(devices: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) as "0-2,5"."""
    parts: list[list[int]] = []
    for d in sorted(devices):
        if parts and d == parts[-1][-1] + 1:
            parts[-1].append(d)
        else:
            parts.append([d])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
