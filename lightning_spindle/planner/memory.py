"""Who holds which parameters, and what each device has left (paper, section 3.5).

A device holds each parameter of its runs once, with gradient and optimizer state (or its share of that,
where holders divide it), and its part of their activations. All tasks' activations are alive between the
forwards and the backwards, so nothing that was placed is ever given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_spindle.planner.problem import PlannedOp, PlanningProblem
from lightning_spindle.planner.timing import UnplacedRun

Bytes = NDArray[np.float64]
"""One number for each device of the cluster."""


@dataclass(frozen=True, slots=True, eq=False)
class Need:
    """What a run needs of each of its devices.

    ``parameters``: (holders so far as a bit set, bytes of trainable parameters) for each set of holders.
    ``state_bytes``: what each device would have to take of parameters that it does not hold, with
    gradients and optimizer state. Where holders divide that, it is what is left of it when the run's
    devices have joined, or more: nobody's grows by it.
    """

    parameters: tuple[tuple[int, float], ...]
    activation_bytes: float
    state_bytes: Bytes


@dataclass(frozen=True, slots=True, eq=False)
class Booked:
    """How things stood before a booking: holders of its parameters, and bytes used."""

    holders: dict[str, int]
    used: Bytes


class Memory:
    """The ledger of a cluster while runs are placed."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.sizes = dict(problem.parameter_bytes)
        self.holders: dict[str, int] = {}
        self.used: Bytes = np.zeros(problem.devices)
        self._names: dict[tuple[str, int, int], tuple[str, ...]] = {}

    def need(self, run: UnplacedRun) -> Need:
        op = self.problem.metaop(run.metaop)
        trained, frozen = self._by_holders(run)
        state = np.zeros(self.problem.devices)
        for holders, size in sorted(trained.items()):
            after = max(run.n, holders.bit_count() + 1)
            state += self.problem.state_factor(after) * size * self._others(holders)
        for holders, size in sorted(frozen.items()):
            state += size * self._others(holders)
        activations = op.activation_bytes * (run.last - run.first) / run.n
        return Need(tuple(sorted(trained.items())), activations, state)

    def bytes_on(self, need: Need, device: int) -> float:
        """What the device would hold more, were the run placed there."""
        return float(need.state_bytes[device] + need.activation_bytes)

    def available(self, device: int) -> float:
        """Bytes left; without a known capacity only differences between devices mean something."""
        return float((self.problem.cluster.memory_bytes or 0) - self.used[device])

    def left_after(self, need: Need) -> Bytes:
        """Bytes that each device would have left, were the run placed there."""
        capacity = self.problem.cluster.memory_bytes or 0
        return capacity - self.used - need.state_bytes - need.activation_bytes

    def fits(self, need: Need, device: int) -> bool:
        limited = self.problem.cluster.memory_bytes is not None
        return not limited or self.bytes_on(need, device) <= self.available(device)

    def fitting(self, need: Need, devices: Sequence[int]) -> Sequence[int]:
        """Those of the devices that have room for it."""
        if self.problem.cluster.memory_bytes is None:
            return devices
        has_room = (self.left_after(need) >= 0.0).tolist()
        return [d for d in devices if has_room[d]]

    def take(self, run: UnplacedRun, devices: tuple[int, ...]) -> Booked:
        """Books the run; returns what ``give_back`` needs to undo it."""
        before = Booked({name: self.holders.get(name, 0) for name in self._parameters(run)}, self.used)
        group = bit_set(devices)
        joined = bits(group, self.problem.devices)
        trained, frozen = self._by_holders(run)
        used = self.used + self.need(run).activation_bytes * joined
        for holders, size in sorted(trained.items()):
            used += self._state_bytes(size, holders | group) - self._state_bytes(size, holders)
        for holders, size in sorted(frozen.items()):
            used += size * joined * self._others(holders)
        self.used = used
        for name, holders in before.holders.items():
            self.holders[name] = holders | group
        return before

    def give_back(self, booked: Booked) -> None:
        """Undoes the last booking that was not undone."""
        self.holders.update(booked.holders)
        self.used = booked.used

    def _state_bytes(self, size: float, holders: int) -> Bytes:
        """What trainable parameters take on each device."""
        factor = self.problem.state_factor(max(1, holders.bit_count()))
        return np.multiply(factor * size, bits(holders, self.problem.devices), dtype=np.float64)

    def _others(self, holders: int) -> Bytes:
        """1 for each device that is no holder."""
        return np.subtract(1.0, bits(holders, self.problem.devices), dtype=np.float64)

    def _by_holders(self, run: UnplacedRun) -> tuple[dict[int, float], dict[int, float]]:
        """Bytes on a device of a run's parameters, by their holders so far: trainable ones, frozen ones."""
        op = self.problem.metaop(run.metaop)
        tensor = op.configuration(run.n).tensor
        found: tuple[dict[int, float], dict[int, float]] = {}, {}
        for name in self._parameters(run):
            holders, of = self.holders.get(name, 0), found[name in self.problem.frozen]
            of[holders] = of.get(holders, 0.0) + self.sizes.get(name, 0) / tensor
        return found

    def _parameters(self, run: UnplacedRun) -> tuple[str, ...]:
        key = (run.metaop, run.first, run.last)
        if key not in self._names:
            self._names[key] = parameters_of(self.problem.metaop(run.metaop), run.first, run.last)
        return self._names[key]


def parameters_of(op: PlannedOp, first: int, last: int) -> tuple[str, ...]:
    """The parameters of layers [first, last), each once."""
    return tuple(dict.fromkeys(name for layer in op.layer_parameters[first:last] for name in layer))


def bit_set(devices: Iterable[int]) -> int:
    """Bit d is set for each device d."""
    found = 0
    for d in devices:
        found |= 1 << d
    return found


def bits(members: int, devices: int) -> NDArray[np.uint8]:
    """A bit set as an array: 1 for each device in it."""
    raw = np.frombuffer(members.to_bytes((devices + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, count=devices, bitorder="little")
