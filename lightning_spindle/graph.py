"""Operators, MetaOps and the graphs that they form (paper, section 3.1).

Everything here is plain, frozen data without torch: capture writes it, the planner, the
lowering, the simulator and the engine read it.

Legend: B rows of a task's global batch, n devices of a run. A *value* is one tensor that
an operator gives to others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Layout(StrEnum):
    """How an operator's rows lie on the devices of its run."""

    SPLIT = "split"
    """n devices hold n consecutive row ranges that differ by at most one row."""
    WHOLE = "whole"
    """One device sees all rows: the operator couples samples, or writes a buffer."""
    EVERYWHERE = "everywhere"
    """Every rank sees all rows: metrics, whose state must be the same on each rank."""


class Reduction(StrEnum):
    """How the shards' results of a step (loss, logged values) make the step's result."""

    MEAN = "mean"
    """Weighted by rows: sum over shards of (rows of the shard / B) * result."""
    SUM = "sum"
    """Added."""
    WHOLE = "whole"
    """Computed from all rows at once; one shard has it."""


class Reading(StrEnum):
    """What the devices that read a value see of it."""

    OWN = "own"
    """Their own rows; a value without rows as it is."""
    GATHERED = "gathered"
    """The rows of the whole batch (``functional.gather_batch``)."""
    SUMMED = "summed"
    """The sum of what its producer's devices have (``functional.batch_sum``)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter by its canonical name (first of ``named_parameters``); ties share one name."""

    name: str
    bytes: int
    trainable: bool
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that flows between operators.

    ``dim`` is the dimension that holds the rows, ``per_row`` how many entries of it belong
    to one row (2 where two frames of a clip are stacked), None for a tensor without rows.
    ``bytes`` is its size for the example batch. ``differentiable``: a gradient can flow
    back through it. ``dynamic``: its shape depends on values, not only on input shapes.
    """

    name: str
    dim: int | None
    per_row: int
    bytes: int
    differentiable: bool
    dynamic: bool = False
    shape: tuple[int, ...] = ()
    """Its shape on the example batch, for people to read."""
    reading: Reading = Reading.OWN

    @property
    def meets(self) -> bool:
        """Whether each device that reads the value needs what all of its producer's devices have."""
        return self.reading is not Reading.OWN

    @property
    def alike(self) -> bool:
        """Whether all devices of its producer have the same, of which a reader needs one."""
        return self.dim is None and not self.meets


@dataclass(frozen=True, slots=True)
class Result:
    """A scalar that a step gives out: its loss, or one logged key.

    ``key`` is "loss" for a task's loss, else "log:" and the logged name. Where one loss is made of
    several tasks' scalars, each task has "loss:" and a number for those that the loss depends on.
    ``dtype`` is that of the tensor that the step gives; None for a number, and where only a step that runs
    as one operator can tell.
    """

    task: str
    key: str
    value: str
    reduction: Reduction
    dtype: str | None = None

    @property
    def is_loss(self) -> bool:
        return self.key == "loss" or self.key.startswith("loss:")


@dataclass(frozen=True, slots=True)
class Operator:
    """One layer, as the user would call it, with the glue around it.

    ``signature`` is equal for operators of equal type, parameter shapes and input shapes
    (criterion 2 of section 3.1). ``inputs``/``outputs`` name values; what an operator reads
    straight from the batch is not listed. ``parameters`` are canonical names.
    ``forward_flops`` and ``activation_bytes`` hold for the whole example batch. ``after``
    names operators that must run before without giving a value (two writers of a buffer);
    such operators also carry the same ``pin`` and share its device.
    """

    name: str
    task: str
    signature: str
    layout: Layout
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    forward_flops: float = 0.0
    activation_bytes: int = 0
    after: tuple[str, ...] = ()
    pin: str | None = None


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """The operators of all tasks in an order in which they can run.

    Raises:
        ValueError: names are not unique, or an operator uses a value that no earlier
            operator gives.
    """

    operators: tuple[Operator, ...]
    values: tuple[Value, ...]
    parameters: tuple[Parameter, ...] = ()
    results: tuple[Result, ...] = ()
    rows: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        _require_unique("operator", (o.name for o in self.operators))
        _require_unique("value", (v.name for v in self.values))
        _require_unique("parameter", (p.name for p in self.parameters))
        given: set[str] = set()
        done: set[str] = set()
        for operator in self.operators:
            for name in operator.inputs:
                if name not in given:
                    raise ValueError(f"invalid graph: {operator.name} uses {name} before it is given")
            for name in operator.after:
                if name not in done:
                    raise ValueError(f"invalid graph: {operator.name} comes before {name}, which it follows")
            given.update(operator.outputs)
            done.add(operator.name)

    def operator(self, name: str) -> Operator:
        return self.operator_map()[name]

    def operator_map(self) -> dict[str, Operator]:
        return {o.name: o for o in self.operators}

    def value_map(self) -> dict[str, Value]:
        return {v.name: v for v in self.values}

    def parameter_map(self) -> dict[str, Parameter]:
        return {p.name: p for p in self.parameters}

    def producers(self) -> dict[str, str]:
        """Value name to the operator that gives it."""
        return {name: o.name for o in self.operators for name in o.outputs}

    def predecessors(self) -> dict[str, tuple[str, ...]]:
        """Operator to the operators that it waits for, each once, in their order of first use."""
        producers = self.producers()
        return {
            o.name: tuple(dict.fromkeys([producers[v] for v in o.inputs] + list(o.after)))
            for o in self.operators
        }

    def loss_operators(self) -> frozenset[str]:
        """Operators that a loss depends on; all of them where the graph names no loss.

        Nothing flows back through the others (metrics, logged figures).
        """
        wanted = {r.value for r in self.results if r.is_loss}
        if not wanted:
            return frozenset(o.name for o in self.operators)
        leading: set[str] = set()
        for o in reversed(self.operators):
            if wanted.intersection(o.outputs):
                leading.add(o.name)
                wanted.update(o.inputs)
        return frozenset(leading)

    def gradient_values(self, trainable: Iterable[str]) -> frozenset[str]:
        """Values through which a gradient must flow back, given the trainable parameters.

        A value carries a gradient where it is differentiable and a trainable parameter
        lies on the way to it.
        """
        trains = set(trainable)
        values = self.value_map()
        carrying: set[str] = set()
        for o in self.operators:
            if trains.intersection(o.parameters) or carrying.intersection(o.inputs):
                carrying.update(name for name in o.outputs if values[name].differentiable)
        return frozenset(carrying)


@dataclass(frozen=True, slots=True)
class MetaOp:
    """L consecutive layers with the same workload (section 3.1).

    ``layers`` holds L tuples of operator names; a layer has more than one operator where a
    light one (a stem, a final norm) was joined to its neighbour. ``after`` names MetaOps.
    ``batch`` is the task's rows, ``level`` the MetaLevel, the longest path from a source.
    """

    name: str
    task: str
    layers: tuple[tuple[str, ...], ...]
    after: tuple[str, ...]
    batch: int
    level: int
    layout: Layout = Layout.SPLIT
    pin: str | None = None
    layer_flow_bytes: int = 0
    """Bytes that a layer gives to the next one in one forward pass (whole batch)."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes that flow from one MetaOp to another in one forward pass (whole batch)."""

    source: str
    target: str
    bytes: int


@dataclass(frozen=True, slots=True)
class MetaGraph:
    """MetaOps in topological order and the flows between them."""

    metaops: tuple[MetaOp, ...]
    flows: tuple[Flow, ...] = ()
    _by_name: Mapping[str, MetaOp] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        _require_unique("MetaOp", (m.name for m in self.metaops))
        object.__setattr__(self, "_by_name", {m.name: m for m in self.metaops})

    def metaop(self, name: str) -> MetaOp:
        return self._by_name[name]

    @property
    def levels(self) -> tuple[tuple[MetaOp, ...], ...]:
        """MetaOps by MetaLevel; those of one level are independent of each other."""
        count = 1 + max((m.level for m in self.metaops), default=-1)
        return tuple(tuple(m for m in self.metaops if m.level == k) for k in range(count))


def _require_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"invalid graph: two of the {what}s are called {name!r}")
        seen.add(name)
