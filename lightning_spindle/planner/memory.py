"""Who holds which parameters, and what each device has left (paper, section 3.5).

A device holds each parameter of its runs once, with gradient and optimizer state, and its part
of their activations. All tasks' activations are alive between the forwards and the backwards,
so nothing that was placed is ever given back.
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

    ``parameters``: (holders so far as a bit set, bytes of parameters) for each set of holders.
    A device that is not among them must take those bytes, times the state factor; ``missing``
    sums them for each device.
    """

    parameters: tuple[tuple[int, float], ...]
    activation_bytes: float
    missing: Bytes


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
        tensor = op.configuration(run.n).tensor
        by_holders: dict[int, float] = {}
        for name in self._parameters(run):
            holders = self.holders.get(name, 0)
            by_holders[holders] = by_holders.get(holders, 0.0) + self.sizes.get(name, 0) / tensor
        missing = np.zeros(self.problem.devices)
        for holders, size in sorted(by_holders.items()):
            missing += size * (1 - bits(holders, self.problem.devices))
        activations = op.activation_bytes * (run.last - run.first) / run.n
        return Need(tuple(sorted(by_holders.items())), activations, missing)

    def bytes_on(self, need: Need, device: int) -> float:
        """What the device would hold more, were the run placed there."""
        return float(self.problem.state_factor * need.missing[device] + need.activation_bytes)

    def available(self, device: int) -> float:
        """Bytes left; without a known capacity only differences between devices mean something."""
        return float((self.problem.cluster.memory_bytes or 0) - self.used[device])

    def left_after(self, need: Need) -> Bytes:
        """Bytes that each device would have left, were the run placed there."""
        capacity = self.problem.cluster.memory_bytes or 0
        return capacity - self.used - self.problem.state_factor * need.missing - need.activation_bytes

    def fits(self, need: Need, device: int) -> bool:
        limited = self.problem.cluster.memory_bytes is not None
        return not limited or self.bytes_on(need, device) <= self.available(device)

    def fitting(self, need: Need, devices: Sequence[int]) -> Sequence[int]:
        """Those of the devices that have room for it."""
        if self.problem.cluster.memory_bytes is None:
            return devices
        has_room = (self.left_after(need) >= 0.0).tolist()
        return [d for d in devices if has_room[d]]

    def take(self, run: UnplacedRun, devices: tuple[int, ...]) -> tuple[dict[str, int], dict[int, float]]:
        """Books the run; returns what ``give_back`` needs to undo it."""
        need = self.need(run)
        used = {d: float(self.used[d]) for d in devices}
        at = list(devices)
        self.used[at] += self.problem.state_factor * need.missing[at] + need.activation_bytes
        names = self._parameters(run)
        holders = {name: self.holders.get(name, 0) for name in names}
        group = bit_set(devices)
        for name in names:
            self.holders[name] = holders[name] | group
        return holders, used

    def give_back(self, booked: tuple[dict[str, int], dict[int, float]]) -> None:
        holders, used = booked
        self.holders.update(holders)
        for d, before in used.items():
            self.used[d] = before

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
