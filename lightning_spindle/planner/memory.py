"""Who holds which parameters, and what each device has left (paper, section 3.5).

A device holds each parameter of its runs once, with gradient and optimizer state, and its part
of their activations. All tasks' activations are alive between the forwards and the backwards,
so nothing that was placed is ever given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_spindle.planner.problem import PlannedOp, PlanningProblem
from lightning_spindle.planner.timing import UnplacedRun


@dataclass(frozen=True, slots=True)
class Need:
    """What a run needs of each of its devices.

    ``parameters``: (holders so far as a bit set, bytes of parameters) for each set of holders;
    a device that is not among them must take those bytes, times the state factor.
    """

    parameters: tuple[tuple[int, float], ...]
    activation_bytes: float

    def missing_bytes(self, device: int) -> float:
        """Bytes of parameters that the device does not hold yet."""
        return sum(size for holders, size in self.parameters if not holders >> device & 1)


class Memory:
    """The ledger of a cluster while runs are placed."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.sizes = dict(problem.parameter_bytes)
        self.holders: dict[str, int] = {}
        self.used = [0.0] * problem.devices

    def need(self, run: UnplacedRun) -> Need:
        op = self.problem.metaop(run.metaop)
        by_holders: dict[int, float] = {}
        for name in parameters_of(op, run.first, run.last):
            holders = self.holders.get(name, 0)
            by_holders[holders] = by_holders.get(holders, 0.0) + self._shard_bytes(op, run.n, name)
        activations = op.activation_bytes * (run.last - run.first) / run.n
        return Need(tuple(sorted(by_holders.items())), activations)

    def bytes_on(self, need: Need, device: int) -> float:
        """What the device would hold more, were the run placed there."""
        return self.problem.state_factor * need.missing_bytes(device) + need.activation_bytes

    def available(self, device: int) -> float:
        """Bytes left; without a known capacity only differences between devices mean something."""
        return float(self.problem.cluster.memory_bytes or 0) - self.used[device]

    def fits(self, need: Need, device: int) -> bool:
        limited = self.problem.cluster.memory_bytes is not None
        return not limited or self.bytes_on(need, device) <= self.available(device)

    def fitting(self, need: Need, devices: Sequence[int]) -> Sequence[int]:
        """Those of the devices that have room for it."""
        if self.problem.cluster.memory_bytes is None:
            return devices
        return [d for d in devices if self.fits(need, d)]

    def take(self, run: UnplacedRun, devices: tuple[int, ...]) -> tuple[dict[str, int], dict[int, float]]:
        """Books the run; returns what ``give_back`` needs to undo it."""
        need = self.need(run)
        used = {d: self.used[d] for d in devices}
        for d in devices:
            self.used[d] += self.bytes_on(need, d)
        names = parameters_of(self.problem.metaop(run.metaop), run.first, run.last)
        holders = {name: self.holders.get(name, 0) for name in names}
        group = bit_set(devices)
        for name in names:
            self.holders[name] = self.holders.get(name, 0) | group
        return holders, used

    def give_back(self, booked: tuple[dict[str, int], dict[int, float]]) -> None:
        holders, used = booked
        self.holders.update(holders)
        for d, before in used.items():
            self.used[d] = before

    def _shard_bytes(self, op: PlannedOp, n: int, name: str) -> float:
        return self.sizes.get(name, 0) / op.configuration(n).tensor


def parameters_of(op: PlannedOp, first: int, last: int) -> tuple[str, ...]:
    """The parameters of layers [first, last), each once."""
    return tuple(dict.fromkeys(name for layer in op.layer_parameters[first:last] for name in layer))


def bit_set(devices: tuple[int, ...]) -> int:
    """Bit d is set for each device d."""
    found = 0
    for d in devices:
        found |= 1 << d
    return found
