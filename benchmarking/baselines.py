"""Megatron-LM and DeepSpeed, simulated: task after task, each operator on the whole cluster.

Both train a multi-task model as the paper describes (section 5.1): every task's forward and backward in
turn on all devices, gradients summed once an iteration. What differs is how the work is divided. Megatron-LM:
tensor parallelism inside an island, data parallelism over the rest, optimizer state whole or divided.
DeepSpeed: data parallelism under ZeRO 0 to 3. The best of all settings that fit in memory counts.

The times of operators, collectives and optimizer steps are those that Spindle's programs are simulated with
(``lightning_spindle.costs``), rows are divided as theirs, and devices that compute at once share the cores
of their island. All devices wait for the slowest, operator by operator. Where something is not known, it is
taken in the baseline's favour: tensor parallelism divides every operator with parameters evenly, cores are
never idle while their island has work, and a gradient's sum starts with the last task that needs it, beside
computing.

Legend: N devices, t of a tensor-parallel group, d = N / t data-parallel groups, B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_spindle.cluster import Cluster
from lightning_spindle.costs import (
    AnalyticCosts,
    State,
    Work,
    all_gather_s,
    all_reduce_s,
    optimizer_step_s,
    pass_s,
    reduce_scatter_s,
)
from lightning_spindle.graph import Layout, Operator
from lightning_spindle.program import BUCKET_BYTES, row_range
from lightning_spindle.timeline import Category, Event, Timeline

SYSTEMS = ("deepspeed", "megatron")
REDUCES_A_LAYER = 2
"""All-reduces of a layer's output in a tensor-parallel pass: one after attention, one after the MLP."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a baseline divides work: ``tensor`` devices share each operator, ``zero`` is the stage of ZeRO."""

    tensor: int = 1
    zero: int = 0

    def __str__(self) -> str:
        return f"tensor {self.tensor}, ZeRO {self.zero}"


@dataclass(frozen=True, slots=True)
class Execution:
    """A baseline's iteration under one setting; every device does the same at the same time."""

    setting: Setting
    timeline: Timeline
    memory_bytes: float

    @property
    def iteration_ms(self) -> float:
        return self.timeline.span_s * 1e3


def settings_of(system: str, costs: AnalyticCosts) -> tuple[Setting, ...]:
    """What a system can be set to on a cluster.

    Raises:
        ValueError: for an unknown system.
    """
    if system == "deepspeed":
        return tuple(Setting(1, zero) for zero in range(4))
    if system == "megatron":
        degrees = [t for t in (1, 2, 4, 8, 16) if _tensor_groups(t, costs.cluster)]
        return tuple(Setting(t, zero) for t in degrees for zero in (0, 1))
    raise ValueError(f"no baseline is called {system!r}; there are {', '.join(SYSTEMS)}")


def best(system: str, costs: AnalyticCosts) -> Execution:
    """The fastest execution that fits in memory.

    Raises:
        ValueError: for an unknown system, or where nothing fits; says what the smallest needs.
    """
    executions = [execute(setting, costs) for setting in settings_of(system, costs)]
    limit = costs.cluster.memory_bytes
    fitting = [e for e in executions if limit is None or e.memory_bytes <= limit]
    if not fitting:
        least = min(executions, key=lambda e: e.memory_bytes)
        raise ValueError(
            f"{system} does not fit on {costs.cluster.devices} devices of {limit} bytes: "
            f"{least.setting} needs {least.memory_bytes:.0f} bytes on each"
        )
    return min(fitting, key=lambda e: e.iteration_ms)


def execute(setting: Setting, costs: AnalyticCosts) -> Execution:
    """One iteration under a setting.

    Raises:
        ValueError: tensor-parallel groups would reach over islands, or leave devices over.
    """
    groups, cluster = _tensor_groups(setting.tensor, costs.cluster), costs.cluster
    if not groups:
        raise ValueError(
            f"{setting}: {cluster.devices} devices in islands of {cluster.island_size} do not divide into "
            f"groups of {setting.tensor} that are each inside an island"
        )
    return _Iteration(setting, costs, groups).run()


Groups = tuple[tuple[int, ...], ...]


def _tensor_groups(tensor: int, cluster: Cluster) -> Groups:
    """Neighbours that share each operator; none where a group would reach over islands or be smaller."""
    starts = range(0, cluster.devices, tensor)
    groups = tuple(tuple(range(first, first + tensor)) for first in starts)
    inside = all(cluster.island(group[0]) == cluster.island(group[-1]) for group in groups)
    return groups if inside and cluster.devices % tensor == 0 else ()


class _Iteration:
    """The clock of all devices, as each step ends with the slowest of them, and that of their collectives.

    Data-parallel groups (the first of each tensor-parallel group, the second of each, …) have equal links:
    each has as many members in an island as the others.
    """

    def __init__(self, setting: Setting, costs: AnalyticCosts, tensor_groups: Groups) -> None:
        self.setting, self.costs = setting, costs
        self.tensor_groups = tensor_groups
        self.data_group = tuple(group[0] for group in tensor_groups)
        self.sharded: State = costs.state.sharded(len(self.data_group), setting.zero)
        self.now_s = 0.0
        self.sums_end_s = 0.0
        self.events: list[Event] = []
        self.finished_s: dict[str, float] = {}

    def run(self) -> Execution:
        tasks = dict.fromkeys(o.task for o in self.costs.graph.operators)
        for task in tasks:
            operators = [o for o in self.costs.graph.operators if o.task == task]
            for o in operators:
                self._pass(o, backward=False)
            for o in reversed(operators):
                if self.costs.has_backward(o.name):
                    self._pass(o, backward=True)
        self._sum_gradients()
        self.now_s = max(self.now_s, self.sums_end_s)
        self._step()
        devices = self.costs.cluster.devices
        everywhere = tuple(replace(e, rank=rank) for e in self.events for rank in range(devices))
        return Execution(self.setting, Timeline("predicted", devices, everywhere), self._memory_bytes())

    def _pass(self, operator: Operator, *, backward: bool) -> None:
        category = Category.BACKWARD if backward else Category.FORWARD
        if self.setting.zero == 3:
            self._spend(
                self._gather_s(operator),
                operator,
                Category.SYNC,
                beside_s=self._compute_s(operator, backward),
            )
        if operator.layout is Layout.WHOLE and not backward:
            self._spend(self._inputs_s(operator), operator, Category.SYNC)
        self._spend(self._compute_s(operator, backward), operator, category)
        self._spend(self._tensor_s(operator, backward), operator, Category.SYNC)
        if backward:
            for p in operator.parameters:
                self.finished_s[p] = self.now_s
            if self.setting.zero >= 2:
                # Gradients that are kept divided are summed in every task's backward.
                self._sum_beside(self._trainable_bytes(operator.parameters), operator.name, operator.task)

    def _compute_s(self, operator: Operator, backward: bool) -> float:
        """Each group has its part of B rows; the whole batch of what couples rows."""
        batch, d = self.costs.example_rows(operator.task), len(self.data_group)
        rows = [batch] * d
        if operator.layout is Layout.SPLIT:
            rows = [last - first for first, last in (row_range(k, d, batch) for k in range(d))]
        alone_s = {n: self._alone_s(operator, n, backward) for n in set(rows)}
        return self._at_once_s([alone_s[n] for n in rows])

    def _alone_s(self, operator: Operator, rows: int, backward: bool) -> float:
        """A device of a group with so many rows, on a core of its own."""
        costs, tensor = self.costs, self.setting.tensor
        if tensor == 1 or not operator.parameters or not rows:
            return costs.operator_s(operator.name, rows, backward)
        work = costs.work(operator.name, rows)
        divided = Work(work.flops / tensor, work.moved_bytes / tensor, work.operations)
        return costs.passes(operator.name, backward) * pass_s(divided, costs.kind)

    def _at_once_s(self, alone_s: Sequence[float]) -> float:
        """All devices compute, those of tensor group k for ``alone_s[k]`` had they a core each."""
        cluster = self.costs.cluster
        slowest_s = max(alone_s)
        if cluster.cores is None:
            return slowest_s
        work_s: dict[int, float] = {}
        for group, seconds in zip(self.tensor_groups, alone_s, strict=True):
            island = cluster.island(group[0])
            work_s[island] = work_s.get(island, 0.0) + len(group) * seconds
        return max(slowest_s, max(work_s.values()) / cluster.cores)

    def _tensor_s(self, operator: Operator, backward: bool) -> float:
        if self.setting.tensor == 1 or not operator.parameters:
            return 0.0
        rows = -(-self.costs.example_rows(operator.task) // len(self.data_group))
        size = sum(self.costs.value_bytes(v, operator.task, rows) for v in operator.outputs)
        passes = min(1, self.costs.passes(operator.name, backward))
        return passes * REDUCES_A_LAYER * self._tensor_sum_s(size)

    def _tensor_sum_s(self, size_bytes: float) -> float:
        """Of the island whose devices are slowest to sum."""
        cluster = self.costs.cluster
        of_islands = {cluster.island(group[0]): group for group in self.tensor_groups}
        return max(all_reduce_s(size_bytes, group, cluster) for group in of_islands.values())

    def _inputs_s(self, operator: Operator) -> float:
        """All rows of what couples them become known to every data-parallel group (contrastive losses)."""
        rows = self.costs.example_rows(operator.task)
        size = sum(self.costs.value_bytes(v, operator.task, rows) for v in operator.inputs)
        return all_gather_s(size, self.data_group, self.costs.cluster)

    def _gather_s(self, operator: Operator) -> float:
        """ZeRO 3: a layer's parameters, fetched ahead while the one before computes."""
        size = sum(self.costs.graph.parameter_map()[p].bytes for p in operator.parameters)
        return all_gather_s(size / self.setting.tensor, self.data_group, self.costs.cluster)

    def _spend(self, seconds: float, operator: Operator, category: Category, beside_s: float = 0.0) -> None:
        """Time of the device; of what runs beside computing only the rest."""
        seconds -= beside_s
        if seconds > 0:
            self._note(self.now_s, self.now_s + seconds, operator.name, category, operator.task)
            self.now_s += seconds

    def _note(self, start_s: float, end_s: float, label: str, category: Category, task: str = "") -> None:
        self.events.append(Event(0, start_s, end_s, "", label, category, task))

    def _sum_beside(
        self, size_bytes: float, label: str, task: str = "", ready_s: float | None = None
    ) -> None:
        if size_bytes <= 0 or len(self.data_group) == 1:
            return
        start_s = max(self.sums_end_s, self.now_s if ready_s is None else ready_s)
        divided = self.setting.zero >= 1
        summing = reduce_scatter_s if divided else all_reduce_s
        self.sums_end_s = start_s + summing(size_bytes, self.data_group, self.costs.cluster)
        self._note(start_s, self.sums_end_s, f"gradients of {label}", Category.SYNC, task)

    def _sum_gradients(self) -> None:
        """ZeRO 0 and 1: each bucket once its parameters' last task has passed."""
        if self.setting.zero >= 2:
            return
        for ready_s, size_bytes in self._buckets():
            self._sum_beside(size_bytes, "a bucket", ready_s=ready_s)

    def _buckets(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[float, float]]:
        filled = 0.0
        ready_s = 0.0
        for p, at_s in sorted(self.finished_s.items(), key=lambda item: item[1]):
            filled += self._trainable_bytes([p])
            ready_s = at_s
            if filled >= bucket_bytes:
                yield ready_s, filled
                filled = 0.0
        if filled:
            yield ready_s, filled

    def _trainable_bytes(self, parameters: Sequence[str]) -> float:
        return self.costs.trainable_bytes(parameters) / self.setting.tensor

    def _step(self) -> None:
        """The optimizer, on a part of the parameters where its state is divided, which then are gathered."""
        size = self._trainable_bytes(tuple(self.finished_s))
        shards = len(self.data_group) if self.setting.zero else 1
        alone_s = optimizer_step_s(size / shards, self.costs.kind, self.costs.state)
        end_s = self.now_s + self._at_once_s([alone_s] * len(self.data_group))
        self._note(self.now_s, end_s, "optimizer", Category.OPTIMIZER)
        if self.setting.zero in (1, 2):
            gathered_s = end_s + all_gather_s(size, self.data_group, self.costs.cluster)
            self._note(end_s, gathered_s, "parameters", Category.SYNC)

    def _memory_bytes(self) -> float:
        """State of all parameters, and the activations of the task that keeps most."""
        graph, tensor = self.costs.graph, self.setting.tensor
        held = sum(
            p.bytes * (self.sharded.total if p.trainable else self.sharded.parameter)
            for p in graph.parameters
        )
        kept: dict[str, float] = {}
        for o in graph.operators:
            rows = self.costs.example_rows(o.task)
            rows = -(-rows // len(self.data_group)) if o.layout is Layout.SPLIT else rows
            size = self.costs.activation_bytes(o.name, rows) / (tensor if o.parameters else 1)
            kept[o.task] = kept.get(o.task, 0.0) + size
        return held / tensor + max(kept.values(), default=0.0)
