"""Graph contraction: operators to MetaOps and MetaLevels (paper, section 3.1).

Two operators become consecutive layers of a MetaOp where

1. data flow from the first to the second, the first has no other successor and the second no
   other predecessor, and
2. they are the same workload (``signature``) under the same layout and pin.

Two things are added to the paper. The layers of a decoder all read the encoder's output: what the
first operator waits for as well does not count as another predecessor of the second
(``shared_inputs``). And real models have stems, norms and heads around their blocks: a *light*
operator that hangs on a MetaOp by its only flow joins the neighbouring
layer, so that it neither is scheduled by itself nor costs a transfer. Operators that
every rank runs (``Layout.EVERYWHERE``) are left out; the lowering adds them. What needs a value
of the whole batch (``Value.meets``) is never in the MetaOp that gives it: its devices have to wait
for each other in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_spindle.graph import Flow, Layout, MetaGraph, MetaOp, Operator, OperatorGraph, Value


@dataclass(slots=True)
class _Unit:
    """A MetaOp in the making; ``core`` is an operator of its first chain, the workload of a layer."""

    layers: list[list[Operator]]
    core: Operator

    @property
    def operators(self) -> list[Operator]:
        return [o for layer in self.layers for o in layer]

    @property
    def flops(self) -> float:
        return sum(o.forward_flops for o in self.operators)

    @property
    def movable(self) -> bool:
        """SPLIT and free of pins: what may join, and be joined."""
        return self.core.layout is Layout.SPLIT and self.core.pin is None


@dataclass(slots=True)
class _Units:
    """The graph of units, kept while units merge. Keys are their first operators' names at the start."""

    units: dict[str, _Unit]
    before: dict[str, set[str]] = field(default_factory=dict)
    after: dict[str, set[str]] = field(default_factory=dict)

    def merge(self, gone: str, kept: str) -> None:
        """Edges of ``gone`` become edges of ``kept``; the caller has merged the layers."""
        for other in self.before.pop(gone):
            self.after[other].discard(gone)
            if other != kept:
                self.after[other].add(kept)
                self.before[kept].add(other)
        for other in self.after.pop(gone):
            self.before[other].discard(gone)
            if other != kept:
                self.before[other].add(kept)
                self.after[kept].add(other)
        del self.units[gone]


def contract(graph: OperatorGraph, *, light: float = 0.25, shared_inputs: bool = True) -> MetaGraph:
    """Contracts until nothing more does; MetaOps in topological order, ties by name.

    ``light``: an operator joins a neighbouring layer when its forward FLOPs are at most this
    share of the layer's (0: only operators without FLOPs; negative: none). The result depends on
    the graph alone, not on the order among independent operators. O(operators + flows) for each
    round of joining; joining takes as many rounds as the longest string of light operators.
    """
    operators = [o for o in graph.operators if o.layout is not Layout.EVERYWHERE]
    before = _predecessors(graph)
    meeting = frozenset(v.name for v in graph.values if v.meets)
    units = _chains(operators, before, graph.producers(), meeting, shared_inputs)
    if light >= 0:
        _join_light(units, light, graph)
    return _metagraph(units, graph)


def _predecessors(graph: OperatorGraph) -> dict[str, set[str]]:
    """Operators to wait for, seen through the EVERYWHERE ones."""
    direct = graph.predecessors()
    found: dict[str, set[str]] = {}
    everywhere = {o.name for o in graph.operators if o.layout is Layout.EVERYWHERE}
    for o in graph.operators:
        found[o.name] = set()
        for name in direct[o.name]:
            found[o.name] |= found[name] if name in everywhere else {name}
    return {name: names for name, names in found.items() if name not in everywhere}


def _chains(
    operators: Sequence[Operator],
    before: Mapping[str, set[str]],
    producers: Mapping[str, str],
    meeting: frozenset[str],
    shared_inputs: bool,
) -> _Units:
    """Both criteria, in topological order; afterwards no pair is left that fulfils them."""
    after: dict[str, set[str]] = {o.name: set() for o in operators}
    for name, names in before.items():
        for other in names:
            after[other].add(name)
    by_name = {o.name: o for o in operators}

    def lower_layer(o: Operator) -> str | None:
        """The operator whose next layer ``o`` is."""
        for name in sorted({producers[v] for v in o.inputs} & before[o.name]):
            others = before[o.name] - {name}
            alone = not others or (shared_inputs and others <= before[name])
            apart = meeting.intersection(by_name[name].outputs, o.inputs)
            if alone and not apart and after[name] == {o.name} and _same_workload(by_name[name], o):
                return name
        return None

    head: dict[str, str] = {}
    units: dict[str, _Unit] = {}
    for o in operators:
        lower = lower_layer(o)
        if lower is not None:
            head[o.name] = head[lower]
            units[head[o.name]].layers.append([o])
        else:
            head[o.name] = o.name
            units[o.name] = _Unit([[o]], o)
    found = _Units(units, {u: set() for u in units}, {u: set() for u in units})
    for name, names in before.items():
        for other in names:
            if head[other] != head[name]:
                found.before[head[name]].add(head[other])
                found.after[head[other]].add(head[name])
    return found


def _same_workload(a: Operator, b: Operator) -> bool:
    return (a.task, a.signature, a.layout, a.pin) == (b.task, b.signature, b.layout, b.pin)


def _join_light(units: _Units, light: float, graph: OperatorGraph) -> None:
    """Joins light operators to layers, the lightest first, until none is left that may join."""
    values = graph.value_map()
    waiting = True
    while waiting:
        waiting = False
        for name in sorted(units.units, key=lambda u: (units.units[u].flops, u)):
            side = _side(units, name, light, values)
            if side is None:
                continue
            host, first = side
            gone = units.units[name]
            if first:
                units.units[host].layers[0][:0] = gone.operators
            else:
                units.units[host].layers[-1].extend(gone.operators)
            units.merge(name, host)
            waiting = True


def _side(units: _Units, name: str, light: float, values: Mapping[str, Value]) -> tuple[str, bool] | None:
    """The unit that a light one joins, and whether at its first layer; None where it joins none.

    Between two, it goes to where the smaller flow remains to be transferred.
    """
    unit = units.units[name]
    if not unit.movable or len(unit.layers) != 1:
        return None

    def host(names: set[str]) -> str | None:
        if len(names) != 1:
            return None
        other = units.units[next(iter(names))]
        fits = other.movable and other.core.task == unit.core.task and not _meet(unit, other, values)
        lighter = unit.flops <= light * other.core.forward_flops
        return next(iter(names)) if fits and lighter else None

    below, above = host(units.before[name]), host(units.after[name])
    if below is not None and above is not None:
        received = sum(values[v].bytes for v in _inputs(unit.operators))
        given = sum(values[v].bytes for v in _outputs(unit.operators))
        return (below, False) if given <= received else (above, True)
    if below is not None:
        return below, False
    return (above, True) if above is not None else None


def _meet(a: _Unit, b: _Unit, values: Mapping[str, Value]) -> bool:
    """Whether one of the units needs a value of the other from the whole batch."""
    given = {v for o in a.operators + b.operators for v in o.outputs if values[v].meets}
    return any(given.intersection(o.inputs) for o in a.operators + b.operators)


def _inputs(operators: Sequence[Operator]) -> list[str]:
    given = {v for o in operators for v in o.outputs}
    return sorted({v for o in operators for v in o.inputs} - given)


def _outputs(operators: Sequence[Operator]) -> list[str]:
    used = {v for o in operators for v in o.inputs}
    return sorted({v for o in operators for v in o.outputs} - used)


def _metagraph(units: _Units, graph: OperatorGraph) -> MetaGraph:
    levels = _levels(units)
    order = sorted(units.units, key=lambda u: (levels[u], u))
    names = _names({u: units.units[u] for u in order})
    values, rows = graph.value_map(), dict(graph.rows)
    metaops = []
    for u in order:
        unit = units.units[u]
        metaops.append(
            MetaOp(
                name=names[u],
                task=unit.core.task,
                layers=tuple(tuple(o.name for o in layer) for layer in unit.layers),
                after=tuple(sorted(names[b] for b in units.before[u])),
                batch=rows.get(unit.core.task, 1),
                level=levels[u],
                layout=unit.core.layout,
                pin=unit.core.pin,
                layer_flow_bytes=_layer_flow_bytes(unit, values),
            )
        )
    metaops.sort(key=lambda m: (m.level, m.name))
    return MetaGraph(tuple(metaops), _flows(units, names, values))


def _levels(units: _Units) -> dict[str, int]:
    """Longest path from a source, so that no two MetaOps of one level depend on each other."""
    level: dict[str, int] = {}
    missing = {u: len(b) for u, b in units.before.items()}
    ready = sorted(u for u, count in missing.items() if not count)
    while ready:
        u = ready.pop()
        level[u] = 1 + max((level[b] for b in units.before[u]), default=-1)
        for other in units.after[u]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    assert len(level) == len(units.units), "contraction made a cycle"
    return level


def _flows(units: _Units, names: Mapping[str, str], values: Mapping[str, Value]) -> tuple[Flow, ...]:
    """Bytes between MetaOps; a value that several operators of a MetaOp use counts once."""
    source = {v: u for u, unit in units.units.items() for o in unit.operators for v in o.outputs}
    total: dict[tuple[str, str], int] = {}
    for u, unit in units.units.items():
        for v in {v for o in unit.operators for v in o.inputs}:
            if v in source and source[v] != u:
                key = (names[source[v]], names[u])
                total[key] = total.get(key, 0) + values[v].bytes
    return tuple(Flow(a, b, size) for (a, b), size in sorted(total.items()))


def _layer_flow_bytes(unit: _Unit, values: Mapping[str, Value]) -> int:
    """The most that crosses one of the borders between a MetaOp's layers."""
    most = 0
    for lower, upper in zip(unit.layers, unit.layers[1:], strict=False):
        given = {v for o in lower for v in o.outputs}
        most = max(most, sum(values[v].bytes for v in given & {v for o in upper for v in o.inputs}))
    return most


def _names(units: Mapping[str, _Unit]) -> dict[str, str]:
    """Readable and unique: the modules' common path, of the layers alone where that is taken."""
    options = {}
    for u, unit in units.items():
        whole = _common_path(o.name for o in unit.operators)
        layers = _common_path(layer[_core_at(unit, layer)].name for layer in unit.layers)
        options[u] = (whole if "/" in whole else layers, layers, unit.core.name)
    names: dict[str, str] = {}
    for k in range(3):
        taken = set(names.values())
        open_ = [u for u in units if u not in names]
        wanted = [options[u][k] for u in open_]
        for u in open_:
            name = options[u][k]
            if name and wanted.count(name) == 1 and name not in taken:
                names[u] = name
    for u in units:
        if u not in names:  # its operator is called like the common path of others
            names[u] = f"{u}#"
    return names


def _core_at(unit: _Unit, layer: Sequence[Operator]) -> int:
    return next(i for i, o in enumerate(layer) if o.signature == unit.core.signature)


def _common_path(names: Iterable[str]) -> str:
    """The modules that names share: t/vision for t/vision.blocks.0 and t/vision.stem."""
    paths = [re.split(r"[/.]", name) for name in names]
    depth = 0
    while all(len(path) > depth and path[depth] == paths[0][depth] for path in paths):
        depth += 1
    return "/".join(p for p in (paths[0][0], ".".join(paths[0][1:depth])) if p) if depth else ""
