"""Megatron-LM and DeepSpeed as they are simulated, against times worked out by hand."""

import itertools
from dataclasses import replace

import pytest

from benchmarking.baselines import Setting, best, execute
from lightning_spindle.costs import A800, AnalyticCosts, all_gather_s, all_reduce_s, optimizer_step_s
from lightning_spindle.graph import Layout, Operator, OperatorGraph, Parameter, Reduction, Result, Value
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
