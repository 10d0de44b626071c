"""From samples to what planners and the simulator are given (paper, sections 3.2 and 3.3).

Legend: B rows of a task's example batch; a device of n has ceil(B / n) of them at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_spindle.cluster import Cluster
from lightning_spindle.costs import FULL, MeasuredCosts, State
from lightning_spindle.estimate.samples import Samples
from lightning_spindle.graph import Layout, MetaGraph, MetaOp, OperatorGraph
from lightning_spindle.planner.curves import fit, valid_allocations
from lightning_spindle.planner.problem import LayerTime, PlannedOp, PlanningProblem

LEAST_MS = 1e-4
"""A layer's forward time is taken as this much at least: planners need times above 0."""


def cluster_from(
    samples: Samples,
    devices: int,
    *,
    island_size: int | None = None,
    cores: int | None = None,
    memory_bytes: int | None = None,
) -> Cluster:
    """The cluster with measured links.

    Args:
        island_size: default all devices in one island.
        cores: workloads that one machine runs at full speed; None where every rank has a device
            of its own (CUDA).
    """
    inside = samples.links.inside
    between = samples.links.between
    return Cluster(
        devices,
        devices if island_size is None else island_size,
        inside,
        inside if between is None else between,
        memory_bytes,
        cores,
    )


def measured_costs(
    graph: OperatorGraph,
    cluster: Cluster,
    samples: Samples,
    *,
    optimizer_s_per_byte: float = 0.0,
) -> MeasuredCosts:
    """What the simulator asks: times on a core of its own, since it shares cores itself.

    ``optimizer_s_per_byte`` is taken as measured, with all ranks busy, like the samples.
    """
    return MeasuredCosts(
        graph,
        cluster,
        {
            o.name: {r: (t.forward_ms, t.backward_ms) for r, t in samples.alone(o.name).items()}
            for o in graph.operators
        },
        {n: (link.latency_s, link.bytes_per_s) for n, link in samples.links.all_reduce.items()},
        optimizer_s_per_byte=optimizer_s_per_byte * samples.alone_factor,
    )


def planning_problem(
    name: str,
    metagraph: MetaGraph,
    graph: OperatorGraph,
    samples: Samples,
    cluster: Cluster,
    *,
    any_allocation: bool = False,
    state: State = FULL,
    shard_optimizer_state: bool = False,
) -> PlanningProblem:
    """MetaOps with the times of one layer at each valid allocation.

    A layer's time is the sum over its operators, the mean over the MetaOp's layers, as measured:
    with all ranks busy, which is how a plan runs. Planners themselves know no cores; the
    simulator's times come from ``measured_costs``. Allocations are the divisors of B up to the
    number of devices (1 always among them), with ``any_allocation`` every n up to B; the time of
    one whose rows were not measured comes from the MetaOp's piecewise α-β curve (appendix A).
    MetaOps that see the whole batch or are pinned have one device.

    Raises:
        ValueError: an operator was not measured; names it.
    """
    present = tuple(m for m in metagraph.metaops if m.layout is not Layout.EVERYWHERE)
    names = {m.name for m in present}
    used = {p for o in graph.operators for p in o.parameters}
    return PlanningProblem(
        name,
        tuple(_planned(m, graph, samples, cluster.devices, any_allocation, names) for m in present),
        cluster,
        tuple(f for f in metagraph.flows if f.source in names and f.target in names),
        tuple((p.name, p.bytes) for p in graph.parameters if p.name in used),
        frozenset(p.name for p in graph.parameters if p.name in used and not p.trainable),
        state,
        shard_optimizer_state,
    )


def layer_times(metaop: MetaOp, samples: Samples) -> dict[int, LayerTime]:
    """Rows to the time of one layer, at the rows where every operator was measured.

    Raises:
        ValueError: there are none.
    """
    operators = [o for layer in metaop.layers for o in layer]
    missing = [o for o in operators if not samples.operators.get(o)]
    if missing:
        raise ValueError(f"MetaOp {metaop.name}: no sample of operator {missing[0]}")
    # What never runs by itself (0 ms at B alone) has no say in which rows there are.
    timed = [samples.operators[o] for o in operators if _runs(samples.operators[o])]
    common = set.intersection(*(set(t) for t in timed)) if timed else {metaop.batch}
    if not common:
        raise ValueError(f"MetaOp {metaop.name}: its operators were measured at different rows")
    layers = len(metaop.layers)
    return {
        r: LayerTime(
            max(LEAST_MS, sum(t[r].forward_ms for t in timed) / layers),
            sum(t[r].backward_ms for t in timed) / layers,
        )
        for r in sorted(common)
    }


def _planned(
    metaop: MetaOp,
    graph: OperatorGraph,
    samples: Samples,
    devices: int,
    any_allocation: bool,
    present: Iterable[str],
) -> PlannedOp:
    operators = graph.operator_map()
    one_device = metaop.layout is Layout.WHOLE or metaop.pin is not None
    limit = 1 if one_device else devices
    allocations = valid_allocations(metaop.batch, limit, any_allocation)
    layers = [[operators[o] for o in layer] for layer in metaop.layers]
    kept = _kept_bytes(metaop, graph)
    return PlannedOp(
        name=metaop.name,
        task=metaop.task,
        layers=len(layers),
        after=tuple(b for b in metaop.after if b in set(present)),
        batch=metaop.batch,
        times=_times(metaop, layer_times(metaop, samples), allocations),
        layout=metaop.layout,
        layer_parameters=tuple(tuple(sorted({p for o in layer for p in o.parameters})) for layer in layers),
        activation_bytes=-(-kept // len(layers)),
        pin=metaop.pin,
        layer_flow_bytes=metaop.layer_flow_bytes,
    )


def _times(
    metaop: MetaOp, measured: Mapping[int, LayerTime], allocations: Iterable[int]
) -> tuple[tuple[int, LayerTime], ...]:
    """The time of a layer at each allocation: measured, else from the curve through what was."""
    batch = metaop.batch
    rows = {n: -(-batch // n) for n in allocations}
    if all(r in measured for r in rows.values()):
        return tuple((n, measured[r]) for n, r in sorted(rows.items()))
    forward = fit((batch / r, t.forward_ms) for r, t in measured.items())
    trained = [(batch / r, t.backward_ms) for r, t in measured.items() if t.backward_ms > 0]
    backward = fit(trained) if trained else None
    found = []
    for n, r in sorted(rows.items()):
        x = batch / r
        time = measured.get(r) or LayerTime(forward.time_ms(x), backward.time_ms(x) if backward else 0.0)
        found.append((n, time))
    return tuple(found)


def _kept_bytes(metaop: MetaOp, graph: OperatorGraph) -> int:
    """What all layers keep from forward to backward; an operator without a backward keeps nothing."""
    trainable = {p.name for p in graph.parameters if p.trainable}
    carrying = graph.gradient_values(trainable)
    operators = graph.operator_map()
    return sum(
        o.activation_bytes
        for layer in metaop.layers
        for o in map(operators.__getitem__, layer)
        if trainable.intersection(o.parameters) or carrying.intersection(o.inputs)
    )


def _runs(times: Mapping[int, LayerTime]) -> bool:
    return any(t.total_ms > 0 for t in times.values())
