"""What a planner is given: MetaOps with their scaling curves, flows, and a cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_spindle.cluster import Cluster
from lightning_spindle.costs.state import FULL, State
from lightning_spindle.graph import Flow, Layout
from lightning_spindle.plan import Configuration


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Milliseconds of one layer, forward and backward apart; the paper's T is their sum."""

    forward_ms: float
    backward_ms: float

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """A MetaOp as a planner sees it.

    ``times`` maps each valid allocation n to the time of one layer, ascending in n.
    ``layer_parameters`` holds for each layer the names of its parameters, whose sizes are
    in ``PlanningProblem.parameter_bytes``. ``activation_bytes`` is kept alive by one layer
    from forward to backward (whole batch). ``pin``: MetaOps of equal pin share one device.
    """

    name: str
    task: str
    layers: int
    after: tuple[str, ...]
    batch: int
    times: tuple[tuple[int, LayerTime], ...]
    layout: Layout = Layout.SPLIT
    layer_parameters: tuple[tuple[str, ...], ...] = ()
    activation_bytes: int = 0
    pin: str | None = None
    configurations: tuple[tuple[int, Configuration], ...] = ()
    """The configuration behind the time of an allocation; data parallelism where none is given."""
    layer_flow_bytes: int = 0
    """Bytes that each layer gives to the next one (whole batch): what moves where a run ends inside."""

    @property
    def allocations(self) -> tuple[int, ...]:
        return tuple(n for n, _ in self.times)

    def configuration(self, n: int) -> Configuration:
        """How n devices are divided."""
        return dict(self.configurations).get(n, Configuration(n))

    def time(self, n: int) -> LayerTime:
        for allocation, time in self.times:
            if allocation == n:
                return time
        raise ValueError(f"MetaOp {self.name}: {n} devices is not a valid allocation of {self.allocations}")


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """MetaOps to run on a cluster; the order of ``metaops`` never changes a plan.

    Raises:
        ValueError: a cycle, an unknown dependency, no valid allocation, a time that is not
            a positive number; the message names the MetaOp and the value.
    """

    name: str
    metaops: tuple[PlannedOp, ...]
    cluster: Cluster
    flows: tuple[Flow, ...] = ()
    parameter_bytes: tuple[tuple[str, int], ...] = ()
    frozen: frozenset[str] = frozenset()
    """Parameters without gradient and optimizer state."""
    state: State = FULL
    shard_optimizer_state: bool = False
    """Whether the holders of a parameter divide its optimizer state among themselves."""
    _by_name: Mapping[str, PlannedOp] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        known = {m.name for m in self.metaops}
        if len(known) != len(self.metaops):
            raise ValueError(f"problem {self.name}: MetaOp names are not unique")
        for m in self.metaops:
            _check_metaop(m, known, self.cluster.devices)
        ordered = _topological(self.metaops, self.name)
        object.__setattr__(self, "metaops", ordered)
        object.__setattr__(self, "_by_name", {m.name: m for m in ordered})

    def metaop(self, name: str) -> PlannedOp:
        return self._by_name[name]

    @property
    def devices(self) -> int:
        return self.cluster.devices

    def state_factor(self, holders: int) -> float:
        """Bytes that each of so many holders keeps for each byte of a trainable parameter.

        Whole parameters are shared out by size, so that of a few large ones a holder may keep more.
        """
        return (self.state.sharded(holders, 1) if self.shard_optimizer_state else self.state).total


def load_cell(path: str | Path) -> PlanningProblem:
    """Reads a planner cell: curves and dependencies alone, on links that cost nothing.

    A cell gives the sum of forward and backward; it is stored as a forward time.

    Raises:
        ValueError: the file is no cell, or its problem is invalid.
    """
    try:
        cell = json.loads(Path(path).read_text())
        name, devices, given = str(cell["name"]), cell["devices"], list(cell["metaops"])
        if type(devices) is not int:
            raise ValueError(f"invalid cell {path}: {devices!r} devices")
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as e:
        raise ValueError(f"invalid cell {path}: missing or malformed field ({e})") from e
    metaops = tuple(_metaop_of_cell(m, position) for position, m in enumerate(given))
    return PlanningProblem(name, metaops, Cluster.ideal(devices))


def _metaop_of_cell(body: Any, position: int) -> PlannedOp:
    name = body.get("name") if isinstance(body, dict) else None
    try:
        return PlannedOp(
            name=body["name"],
            task=body["task"],
            layers=body["layers"],
            after=tuple(body["after"]),
            batch=body["batch"],
            times=tuple(sorted((int(n), LayerTime(float(ms), 0.0)) for n, ms in body["time_ms"].items())),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        what = f"MetaOp {name}" if name else f"MetaOp at position {position}"
        raise ValueError(f"{what}: missing or malformed field ({e})") from e


def _check_metaop(m: PlannedOp, known: Collection[str], devices: int) -> None:
    for before in m.after:
        if before not in known:
            raise ValueError(f"MetaOp {m.name} follows {before!r}, which does not exist")
    if type(m.layers) is not int or m.layers < 1:
        raise ValueError(f"MetaOp {m.name} has {m.layers} layers")
    for n, time in m.times:
        if n < 1:
            raise ValueError(f"MetaOp {m.name}: allocation of {n} devices")
        if not (
            math.isfinite(time.total_ms) and time.forward_ms >= 0 <= time.backward_ms and time.total_ms > 0
        ):
            raise ValueError(f"MetaOp {m.name}: time on {n} devices is {time.total_ms} ms")
    if (m.layout is Layout.WHOLE or m.pin is not None) and not any(n == 1 for n, _ in m.times):
        raise ValueError(f"MetaOp {m.name} must run on one device, but has times for {m.allocations} devices")
    if not any(n <= devices for n, _ in m.times):
        raise ValueError(
            f"MetaOp {m.name}: no valid allocation within {devices} devices (has {m.allocations})"
        )


def _topological(metaops: tuple[PlannedOp, ...], problem: str) -> tuple[PlannedOp, ...]:
    """A topological order that depends on names only, never on the order given."""
    waiting: Mapping[str, PlannedOp] = {m.name: m for m in sorted(metaops, key=lambda m: m.name)}
    done: dict[str, PlannedOp] = {}
    while len(done) < len(metaops):
        ready = [m for m in waiting.values() if m.name not in done and all(b in done for b in m.after)]
        if not ready:
            raise ValueError(f"problem {problem}: cycle among {sorted(waiting.keys() - done.keys())}")
        done.update((m.name, m) for m in ready)
    return tuple(done.values())
