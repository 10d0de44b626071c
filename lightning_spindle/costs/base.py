"""What the simulator asks: times and sizes for the programs of one graph on one cluster.

Sizes in an ``OperatorGraph`` hold for its example batch of B rows; what has rows scales
with them. Times are seconds (``_s``), samples milliseconds (``_ms``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_spindle.cluster import Cluster
from lightning_spindle.costs.collectives import ring_bytes
from lightning_spindle.costs.state import FULL, State
from lightning_spindle.graph import Operator, OperatorGraph, Parameter, Value

EXCHANGE_BYTES = 1024
"""What the exchange of losses and logged values carries, about."""


@dataclass(frozen=True, eq=False)
class Costs(ABC):
    """Times and sizes for the programs of one graph on one cluster.

    ``state``: what training holds of a trainable parameter; a frozen one is held once.
    """

    graph: OperatorGraph
    cluster: Cluster
    state: State = field(default=FULL, kw_only=True)

    def __post_init__(self) -> None:
        values, parameters = self.graph.value_map(), self.graph.parameter_map()
        trainable = {p.name for p in self.graph.parameters if p.trainable}
        carrying = self.graph.gradient_values(trainable)
        leading = self.graph.loss_operators()
        products = {
            o.name: (bool(trainable.intersection(o.parameters)) + bool(carrying.intersection(o.inputs)))
            * (o.name in leading)
            for o in self.graph.operators
        }
        object.__setattr__(self, "_operators", self.graph.operator_map())
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_parameters", parameters)
        object.__setattr__(self, "_products", products)
        object.__setattr__(self, "_rows", dict(self.graph.rows))

    _operators: Mapping[str, Operator] = field(init=False, repr=False)
    _values: Mapping[str, Value] = field(init=False, repr=False)
    _parameters: Mapping[str, Parameter] = field(init=False, repr=False)
    _products: Mapping[str, int] = field(init=False, repr=False)
    _rows: Mapping[str, int] = field(init=False, repr=False)

    @abstractmethod
    def operator_s(self, operator: str, rows: int, backward: bool) -> float:
        """One device's time for an operator at ``rows`` rows, undisturbed by others."""

    @abstractmethod
    def all_reduce_s(self, size_bytes: int, devices: Sequence[int]) -> float:
        """Summing ``size_bytes`` over a device group."""

    @abstractmethod
    def optimizer_s(self, parameter_bytes: int) -> float:
        """One optimizer step over a device's trainable parameters."""

    def message_s(self, size_bytes: float, source: int, target: int) -> float:
        """A message between two different devices on idle links."""
        return self.cluster.link(source, target).seconds(size_bytes)

    def uplink_bytes(self, size_bytes: float, devices: Sequence[int]) -> float:
        """What summing ``size_bytes`` over a group sends out of each island that it spans, and into it."""
        islands = {self.cluster.island(d) for d in devices}
        return ring_bytes(size_bytes, len(devices)) if len(islands) > 1 else 0.0

    def broadcast_s(self, size_bytes: int, devices: Sequence[int]) -> float:
        """What one device of a group has becomes known to all: its part of what a sum moves.

        Each member passes it on once, where in an all-reduce it sends ``ring_bytes``.
        """
        n = len(devices)
        return self.all_reduce_s(size_bytes, devices) / ring_bytes(1.0, n) if n > 1 else 0.0

    def broadcast_uplink_bytes(self, size_bytes: float, devices: Sequence[int]) -> float:
        """What a broadcast sends out of each island that its group spans, and into it."""
        return size_bytes if len({self.cluster.island(d) for d in devices}) > 1 else 0.0

    def exchange_s(self, devices: Sequence[int]) -> float:
        """Losses and logged values become known on all devices."""
        return self.all_reduce_s(EXCHANGE_BYTES, devices) if len(devices) > 1 else 0.0

    def example_rows(self, task: str) -> int:
        """Rows of the batch for which the graph's sizes hold; 1 for a task without a batch."""
        return self._rows.get(task, 1)

    def has_backward(self, operator: str) -> bool:
        """Whether gradients pass through an operator, or end in its parameters."""
        return self._products[operator] > 0

    def value_bytes(self, value: str, task: str, rows: int) -> float:
        """Bytes of ``rows`` rows of a value; all of it where it has no rows."""
        v = self._values[value]
        return v.bytes if v.dim is None else v.bytes * rows / self.example_rows(task)

    def activation_bytes(self, operator: str, rows: int) -> float:
        """What an operator keeps from forward to backward for ``rows`` rows; 0 without a backward."""
        o = self._operators[operator]
        return o.activation_bytes * rows / self.example_rows(o.task) if self.has_backward(operator) else 0.0

    def trainable_bytes(self, parameters: Iterable[str]) -> int:
        return sum(p.bytes for name in parameters if (p := self._parameters.get(name)) and p.trainable)

    def held_bytes(self, parameters: Iterable[str], stepped: Iterable[str]) -> float:
        """What parameters take on a device that holds them and their gradients, and steps some of them."""
        found = [p for name in parameters if (p := self._parameters.get(name))]
        state = self.state
        held = sum(p.bytes * (state.parameter + state.gradient if p.trainable else 1.0) for p in found)
        return held + state.optimizer * self.trainable_bytes(stepped)

    def gradient_bytes(self, parameters: Iterable[str]) -> float:
        """The part of ``held_bytes`` that gradients take; it is there from a backward to the next."""
        return self.trainable_bytes(parameters) * self.state.gradient
