"""Costs from FLOPs and bytes, for clusters that nobody has at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_spindle.costs.base import Costs
from lightning_spindle.costs.collectives import all_reduce_s
from lightning_spindle.costs.devices import A800, DeviceKind, Work, optimizer_step_s, pass_s


@dataclass(frozen=True, eq=False)
class AnalyticCosts(Costs):
    """Costs from what capture counted, a device's data sheet and a cluster's links.

    An operator's time is that of its passes (``pass_s``).
    """

    kind: DeviceKind = A800

    def work(self, operator: str, rows: int) -> Work:
        """One forward pass of an operator over ``rows`` rows: its FLOPs, and what it reads and writes.

        What computes no products (an embedding) reads no more of its weights than it gives.
        """
        o = self._operators[operator]
        share = rows / self.example_rows(o.task)
        weights = sum(self._parameters[p].bytes for p in o.parameters)
        flowing = sum(self._values[v].bytes for v in (*o.inputs, *o.outputs)) + o.activation_bytes
        read = weights if o.forward_flops > 0 else min(weights, flowing * share)
        return Work(o.forward_flops * share, read + flowing * share)

    def passes(self, operator: str, backward: bool) -> int:
        """Passes like forward's: in backward as many as there are kinds of gradients to compute.

        Those of the parameters, and those of the inputs.
        """
        return self._products[operator] if backward else 1

    def operator_s(self, operator: str, rows: int, backward: bool) -> float:
        passes = self.passes(operator, backward)
        return passes * pass_s(self.work(operator, rows), self.kind) if rows > 0 and passes else 0.0

    def all_reduce_s(self, size_bytes: int, devices: Sequence[int]) -> float:
        return all_reduce_s(size_bytes, devices, self.cluster)

    def optimizer_s(self, parameter_bytes: int) -> float:
        return optimizer_step_s(parameter_bytes, self.kind, self.state)
