"""Megatron-LM and DeepSpeed as they are simulated, against times worked out by hand."""

import itertools
from dataclasses import replace

import pytest

from benchmarking.baselines import Setting, best, execute, settings_of
from benchmarking.simulated import Cell
from lightning_spindle.cluster import Link
from lightning_spindle.costs import A800, AnalyticCosts, all_gather_s, all_reduce_s, optimizer_step_s
from lightning_spindle.graph import Layout, Operator, OperatorGraph, Parameter, Reduction, Result, Value
from lightning_spindle.planner import PLANNERS
from lightning_spindle.simulate import simulate
from lightning_spindle.timeline import Category

BATCH, LAYERS, WEIGHT_BYTES, FLOPS = 64, 3, 2 * 10**8, 4e12


def graph_of(*tasks: str, batch: int = BATCH, kept_bytes: int = 10**6) -> OperatorGraph:
    """A chain of layers for each task, each with its weight, and a loss that sees the whole batch."""
    operators, values, parameters, results = [], [], [], []
    for task in tasks:
        for k in range(LAYERS):
            parameters.append(Parameter(f"{task}.w{k}", WEIGHT_BYTES, True))
            inputs = (f"{task}/v{k - 1}",) if k else ()
            outputs, weights = (f"{task}/v{k}",), (f"{task}.w{k}",)
            operators.append(
                Operator(
                    f"{task}/{k}",
                    task,
                    "s",
                    Layout.SPLIT,
                    inputs,
                    outputs,
                    weights,
                    FLOPS,
                    kept_bytes * batch,
                )
            )
            values.append(Value(f"{task}/v{k}", 0, 1, batch * 1000, True))
        features = (f"{task}/v{LAYERS - 1}",)
        operators.append(Operator(f"{task}/loss", task, "l", Layout.WHOLE, features, (f"{task}/l",)))
        values.append(Value(f"{task}/l", None, 1, 4, True))
        results.append(Result(task, "loss", f"{task}/l", Reduction.WHOLE))
    rows = tuple((task, batch) for task in tasks)
    return OperatorGraph(tuple(operators), tuple(values), tuple(parameters), tuple(results), rows)


def costs_of(graph: OperatorGraph, devices: int) -> AnalyticCosts:
    return AnalyticCosts(graph, A800.cluster(devices))


def test_one_device_takes_the_sum_of_its_work() -> None:
    costs = costs_of(graph_of("a", "b"), 1)
    operators = [
        costs.operator_s(o.name, BATCH, backward) for o in costs.graph.operators for backward in (False, True)
    ]
    step = optimizer_step_s(2 * LAYERS * WEIGHT_BYTES, A800)
    assert execute(Setting(), costs).timeline.span_s == pytest.approx(sum(operators) + step)


def test_tasks_run_one_after_the_other_on_all_devices() -> None:
    timeline = execute(Setting(), costs_of(graph_of("a", "b"), 8)).timeline
    for rank in range(8):
        computing = [e for e in timeline.on(rank) if e.category.computes and e.task]
        assert [e.task for e in computing] == sorted(e.task for e in computing)
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(computing))
    assert timeline.on(0) == tuple(replace(e, rank=0) for e in timeline.on(7))


def test_gradients_are_summed_beside_the_backward_of_other_layers() -> None:
    costs = costs_of(graph_of("a"), 8)
    timeline = execute(Setting(), costs).timeline
    one = all_reduce_s(WEIGHT_BYTES, range(8), costs.cluster)
    sums = [e for e in timeline.on(0) if e.label == "gradients of a bucket"]
    assert [e.duration_s for e in sums] == pytest.approx([one] * LAYERS)
    last = max(e.end_s for e in timeline.on(0) if e.category is Category.BACKWARD)
    assert sums[0].start_s < last < sums[-1].end_s


def test_more_rows_than_a_device_can_have_are_shared_by_fewer() -> None:
    """Four rows on eight devices: each of four has one, the others wait."""
    few, many = (execute(Setting(), costs_of(graph_of("a", batch=4), n)) for n in (4, 8))
    computing = [
        sum(e.duration_s for e in run.timeline.on(0) if e.category is Category.FORWARD) for run in (few, many)
    ]
    assert computing[0] == pytest.approx(computing[1])


def test_zero_divides_memory_and_adds_gathers() -> None:
    costs = costs_of(graph_of("a"), 8)
    stages = [execute(Setting(1, zero), costs) for zero in range(4)]
    memory = [s.memory_bytes for s in stages]
    assert memory == sorted(memory, reverse=True)
    state = LAYERS * WEIGHT_BYTES
    kept = LAYERS * 10**6 * BATCH // 8
    assert memory[0] == pytest.approx(4 * state + kept)
    assert memory[1] == pytest.approx((2 + 2 / 8) * state + kept)
    gathered = [e for e in stages[1].timeline.on(0) if e.label == "parameters"]
    assert [e.duration_s for e in gathered] == pytest.approx([all_gather_s(state, range(8), costs.cluster)])


def test_tensor_parallelism_divides_work_and_adds_sums_of_activations() -> None:
    costs = costs_of(graph_of("a"), 8)
    whole, divided = (execute(Setting(t), costs) for t in (1, 8))
    sums = [e for e in divided.timeline.on(0) if e.category is Category.SYNC and e.label.startswith("a/")]
    # Forward and backward of each layer; the loss gathers nothing: one data-parallel group has all rows.
    assert len(sums) == 2 * LAYERS
    assert sum(e.duration_s for e in sums) == pytest.approx(
        2 * LAYERS * 2 * all_reduce_s(BATCH * 1000, range(8), costs.cluster)
    )
    assert divided.memory_bytes < whole.memory_bytes / 7


def computing_s(costs: AnalyticCosts, setting: Setting, category: Category = Category.FORWARD) -> float:
    """Of device 0, under a setting."""
    return sum(e.duration_s for e in execute(setting, costs).timeline.on(0) if e.category is category)


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize(
    "category", [Category.FORWARD, Category.BACKWARD, Category.OPTIMIZER], ids=lambda c: c.name
)
def test_processes_that_compute_at_once_share_cores(tensor: int, category: Category) -> None:
    """Four devices of each machine on two cores take twice as long; on four cores they have one each."""
    for devices in (4, 8):
        costs, setting = costs_of(graph_of("a"), devices), Setting(tensor)
        costs = replace(costs, cluster=replace(costs.cluster, island_size=4))
        alone, four, two = (
            computing_s(replace(costs, cluster=replace(costs.cluster, cores=n)), setting, category)
            for n in (None, 4, 2)
        )
        assert alone == four > 0
        assert two == pytest.approx(2 * alone)


def test_devices_with_fewer_rows_leave_their_cores_to_others() -> None:
    """Six rows on four devices: 1, 2, 1, 2. Three rows: 0, 1, 1, 1."""
    for batch, shards in ((6, (1, 2, 1, 2)), (3, (0, 1, 1, 1))):
        graph = graph_of("a", batch=batch)
        costs = AnalyticCosts(graph, replace(A800.cluster(4), cores=2))
        layers = [o for o in graph.operators if o.layout is Layout.SPLIT]
        split = sum(costs.operator_s(o.name, n, False) for o in layers for n in shards) / 2
        loss = costs.operator_s("a/loss", batch, False) * 4 / 2
        assert computing_s(costs, Setting()) == pytest.approx(split + loss)


def test_cores_are_shared_as_in_simulated_programs() -> None:
    """Spindle-Seq does the same work on the same devices; gradients of the loss reach one after another."""
    costs = AnalyticCosts(graph_of("a"), replace(A800.cluster(4), cores=2))
    cell = Cell("toy", 1, "", costs)
    seq = simulate(cell.step.program(PLANNERS["seq"](cell.problem)), costs)
    for category in (Category.FORWARD, Category.BACKWARD):
        layers = [e.duration_s for e in seq.on(0) if e.category is category and "loss" not in e.label]
        passes = [
            e.duration_s
            for e in execute(Setting(), costs).timeline.on(0)
            if e.category is category and "loss" not in e.label
        ]
        assert sum(passes) == pytest.approx(sum(layers), rel=0.005)


@pytest.mark.parametrize("slow", [0, 1])
def test_the_slowest_island_sums_activations_last(slow: int) -> None:
    costs = costs_of(graph_of("a"), 16)
    link = Link(3e-5, 1e9)
    costs = replace(costs, cluster=replace(costs.cluster, islands=((slow, link),)))
    sums = [
        e
        for e in execute(Setting(8), costs).timeline.on(0)
        if e.category is Category.SYNC and e.label.startswith("a/") and e.label != "a/loss"
    ]
    one = 2 * all_reduce_s(BATCH // 2 * 1000, range(8 * slow, 8 * slow + 8), costs.cluster)
    assert [e.duration_s for e in sums] == pytest.approx([one] * 2 * LAYERS)


def test_tensor_parallel_groups_stay_inside_islands() -> None:
    costs = costs_of(graph_of("a"), 12)
    for island_size, degrees in ((6, {1, 2}), (4, {1, 2, 4}), (12, {1, 2, 4}), (16, {1, 2, 4}), (3, {1})):
        cut = replace(costs, cluster=replace(costs.cluster, island_size=island_size))
        assert {s.tensor for s in settings_of("megatron", cut)} == degrees
    six = replace(costs, cluster=replace(costs.cluster, island_size=6))
    for tensor in (4, 5):
        with pytest.raises(ValueError, match=rf"tensor {tensor}, ZeRO 0: 12 devices in islands of 6"):
            execute(Setting(tensor), six)


def test_the_best_setting_that_fits() -> None:
    costs = costs_of(graph_of("a", "b"), 16)
    assert best("deepspeed", costs).iteration_ms == min(
        execute(Setting(1, zero), costs).iteration_ms for zero in range(4)
    )
    assert best("megatron", costs).iteration_ms <= execute(Setting(), costs).iteration_ms
    narrow = replace(costs, cluster=replace(costs.cluster, memory_bytes=int(2e9)))
    assert best("deepspeed", narrow).setting.zero >= 2
    none = replace(costs, cluster=replace(costs.cluster, memory_bytes=1000))
    with pytest.raises(
        ValueError, match=r"deepspeed does not fit on 16 devices of 1000 bytes: .* needs \d+ bytes"
    ):
        best("deepspeed", none)
    with pytest.raises(ValueError, match="no baseline is called 'alpa'"):
        best("alpa", costs)
