"""Costs against public measurements, and what holds for any."""

from typing import Any

import pytest

from lightning_spindle.cluster import Cluster, Link
from lightning_spindle.costs import (
    A100,
    A800,
    FULL,
    H100,
    MIXED,
    AnalyticCosts,
    DeviceKind,
    MeasuredCosts,
    Work,
    all_gather_s,
    all_reduce_s,
    optimizer_step_s,
    pass_s,
    reduce_scatter_s,
)
from lightning_spindle.graph import Layout, Operator, OperatorGraph, Parameter, Reduction, Result, Value
from tests.test_simulate import costs_of, graph_of

# ---------------------------------------------------------------------------------------- measured


def test_measured_times_are_linear_between_samples_and_beyond() -> None:
    graph = graph_of(("a", 1))
    samples_ = {"a/0": {2: (3.0, 6.0), 4: (4.0, 8.0), 8: (8.0, 16.0)}}
    costs = MeasuredCosts(graph, Cluster.ideal(1), samples_)
    got = [costs.operator_s("a/0", n, False) * 1e3 for n in (0, 1, 2, 3, 4, 6, 8, 10)]
    assert got == pytest.approx([0.0, 2.5, 3.0, 3.5, 4.0, 6.0, 8.0, 10.0])
    assert costs.operator_s("a/0", 3, True) * 1e3 == pytest.approx(7.0)


def test_noise_never_makes_fewer_rows_dearer_beyond_the_samples() -> None:
    graph = graph_of(("a", 1))
    costs = MeasuredCosts(graph, Cluster.ideal(1), {"a/0": {2: (3.0, 0.0), 4: (2.0, 0.0)}})
    assert [costs.operator_s("a/0", n, False) * 1e3 for n in (1, 3, 9)] == pytest.approx([3.0, 2.5, 2.0])


@pytest.mark.parametrize(
    ("samples_", "message"),
    [
        ({}, "no sample of operator a/0"),
        ({"a/0": {}}, "no sample of operator a/0"),
        ({"a/0": {4: (1.0, float("nan"))}}, r"invalid sample of operator a/0: \(1.0, nan\) ms at 4 rows"),
        ({"a/0": {4: (-1.0, 1.0)}}, "invalid sample of operator a/0"),
        ({"a/0": {0: (1.0, 1.0)}}, "at 0 rows"),
    ],
)
def test_bad_samples_are_refused(samples_: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeasuredCosts(graph_of(("a", 1)), Cluster.ideal(1), samples_)


def test_collectives_are_linear_in_the_group_size() -> None:
    costs = costs_of(graph_of(("a", 1)), 8, collectives={2: (1e-3, 1e6), 4: (3e-3, 5e5)})
    assert costs.all_reduce_s(1000, (0,)) == 0.0
    assert costs.all_reduce_s(1000, (0, 1)) == pytest.approx(2e-3)
    assert costs.all_reduce_s(1000, (0, 1, 2)) == pytest.approx(2e-3 + 1.5e-3)
    assert costs.all_reduce_s(0, range(8)) == pytest.approx(7e-3)


# ------------------------------------------------------------------------------------------- operators

BATCH_CURVE_MS = {1: 16.3, 2: 27.2, 4: 51.4, 8: 97.0, 16: 184.3}
"""Forward of two layers, embedding and head (d 4096, sequence 2048, 50,257 words) on an A800-like device."""
LAYERS_MS = {(4096, 2048): 4.31, (2560, 2048): 2.06, (1600, 1024): 0.60}
"""Forward of a layer for a sample of a batch of 4, by width and sequence."""


def model(width: int, sequence: int, layers: int, words: int = 0) -> OperatorGraph:
    """A language model in bfloat16, sizes for one row; without ``words`` the layers alone."""
    flow = 2 * sequence * width
    operators, values, parameters = [], [], []

    def add(name: str, flops: float, weights: int, given: int, kept: int) -> None:
        inputs = (operators[-1].outputs[0],) if operators else ()
        parameters.append(Parameter(f"{name}.w", 2 * weights, True, "bfloat16"))
        values.append(Value(name, 0, 1, given, True))
        operators.append(Operator(name, "t", "s", Layout.SPLIT, inputs, (name,), (f"{name}.w",), flops, kept))

    if words:
        add("embedding", 0.0, words * width, flow, 0)
    for k in range(layers):
        flops = 24.0 * sequence * width**2 + 4.0 * sequence**2 * width
        add(f"layer{k}", flops, 12 * width**2, flow, 34 * sequence * width)
    if words:  # logits in bfloat16, their softmax in float32
        add("head", 2.0 * sequence * width * words, words * width, 4, 6 * sequence * words)
    return OperatorGraph(tuple(operators), tuple(values), tuple(parameters), rows=(("t", 1),))


def forward_ms(costs: AnalyticCosts, rows: int) -> float:
    return sum(costs.operator_s(o.name, rows, False) for o in costs.graph.operators) * 1e3


@pytest.mark.parametrize(("shape", "expected_ms"), LAYERS_MS.items())
def test_layers_agree_with_public_profiles_within_10_percent(
    shape: tuple[int, int], expected_ms: float
) -> None:
    costs = AnalyticCosts(model(*shape, layers=1), A800.cluster(8))
    assert forward_ms(costs, 4) / 4 == pytest.approx(expected_ms, rel=0.1)


@pytest.mark.parametrize(("batch", "expected_ms"), BATCH_CURVE_MS.items())
def test_the_batch_curve_agrees_with_its_profile_within_10_percent(batch: int, expected_ms: float) -> None:
    costs = AnalyticCosts(model(4096, 2048, layers=2, words=50257), A800.cluster(8))
    assert forward_ms(costs, batch) == pytest.approx(expected_ms, rel=0.1)


def test_efficiency_grows_with_the_batch_and_never_falls_with_the_device() -> None:
    graph = model(1024, 256, layers=1)
    costs = AnalyticCosts(graph, A800.cluster(8))
    a_row_s = [costs.operator_s("layer0", n, False) / n for n in (8, 64, 512)]
    assert a_row_s[0] > 1.2 * a_row_s[1] > 1.2 * a_row_s[2]
    on = [AnalyticCosts(graph, k.cluster(8), kind=k).operator_s("layer0", 64, False) for k in (A800, H100)]
    assert on[1] < on[0]


def test_a_pass_is_as_long_as_its_longest_part() -> None:
    """Starting 12 operations takes 120 µs, moving 2 GB on 2 TB/s a millisecond."""
    assert pass_s(Work(1e6, 10), A800) == pytest.approx(120e-6)
    assert pass_s(Work(1e6, 10, operations=1), A800) < 20e-6
    assert pass_s(Work(1e6, 2e9), A800) == pytest.approx(1e-3)
    assert pass_s(Work(1e14, 10), A800) == pytest.approx(1e14 / 312e12, rel=0.15)


def test_an_embedding_reads_what_it_gives_and_no_more_of_its_table() -> None:
    costs = AnalyticCosts(model(4096, 2048, layers=1, words=50257), A800.cluster(8))
    flow = 2 * 2048 * 4096
    assert costs.work("embedding", 1).moved_bytes == 2 * flow
    assert costs.work("layer0", 1).moved_bytes == 24 * 4096**2 + 2 * flow + 34 * 2048 * 4096


def test_frozen_layers_below_a_trained_one_have_no_backward() -> None:
    operators = (
        Operator("t/frozen", "t", "s", Layout.SPLIT, (), ("x",), ("f",), 1e12, 1000),
        Operator("t/trained", "t", "s", Layout.SPLIT, ("x",), ("y",), ("w",), 1e12, 1000),
        Operator("t/head", "t", "s", Layout.SPLIT, ("y",), ("z",), ("h",), 1e12, 1000),
        Operator("t/metric", "t", "s", Layout.EVERYWHERE, ("z",), (), (), 1e12, 1000),
    )
    parameters = (Parameter("f", 10, False), Parameter("w", 10, True), Parameter("h", 10, True))
    values = tuple(Value(v, 0, 1, 8, True) for v in "xyz")
    results = (Result("t", "loss", "z", Reduction.MEAN),)
    graph = OperatorGraph(operators, values, parameters, results, (("t", 1),))
    costs = AnalyticCosts(graph, A800.cluster(1))
    forward = costs.operator_s("t/head", 1, False)
    times = [costs.operator_s(o.name, 1, True) / forward for o in operators]
    assert times == pytest.approx([0.0, 1.0, 2.0, 0.0])
    assert [costs.activation_bytes(o.name, 1) for o in operators] == [0.0, 1000.0, 1000.0, 0.0]
    assert costs.held_bytes("fwh", "fwh") == 10 + 40 + 40
    assert costs.held_bytes("fwh", "w") == 10 + 40 + 20, "another device has the state of h"


# -------------------------------------------------------------------------------------------- links

PROFILE = [
    (tuple(range(8)), 154.0),
    (tuple(range(4)), 159.0),
    (tuple(range(16)), 44.7),
    ((0, 2, 4, 6, 8, 10, 12, 14), 20.8),
    ((0, 4, 8, 12), 16.2),
    ((0, 8), 8.1),
]
"""Groups on nodes of eight A800s, and the bus bandwidth of their all-reduce in GB/s."""


@pytest.mark.parametrize(("devices", "bus_gb_per_s"), PROFILE)
def test_sums_agree_with_measured_bus_bandwidths_within_5_percent(devices: Any, bus_gb_per_s: float) -> None:
    n, size = len(devices), 2**30
    costs = AnalyticCosts(graph_of(("a", 1)), A800.cluster(64))
    bus = 2 * (n - 1) / n * size / costs.all_reduce_s(size, devices) / 1e9
    assert bus == pytest.approx(bus_gb_per_s, rel=0.05)
    assert costs.uplink_bytes(size, devices) == (0.0 if max(devices) < 8 else 2 * (n - 1) / n * size)


def test_messages_agree_with_measured_ones() -> None:
    """110 to 164 GB/s inside a node, about 8 across; 32 KiB in about 68 µs."""
    costs = AnalyticCosts(graph_of(("a", 1)), A800.cluster(64))
    size = 2**30
    assert 110 < size / costs.message_s(size, 0, 7) / 1e9 < 164
    assert size / costs.message_s(size, 0, 8) / 1e9 == pytest.approx(8.0, rel=0.05)
    assert costs.message_s(32 * 2**10, 0, 8) == pytest.approx(68e-6, rel=0.05)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    cluster = A800.cluster(16)
    for group in ((0, 1), tuple(range(8)), tuple(range(16))):
        halves = reduce_scatter_s(2**28, group, cluster), all_gather_s(2**28, group, cluster)
        assert sum(halves) == pytest.approx(all_reduce_s(2**28, group, cluster))
    assert all_gather_s(2**28, (3,), cluster) == 0.0


def test_sums_go_over_the_slowest_links_of_their_group() -> None:
    slow = Link(0.0, 1e9)
    cluster = Cluster(
        12, 4, Link(0.0, 9e9), Link(0.0, 2e9), islands=((1, slow),), crossing=((1, 2e9), (4, 6e9))
    )
    sizes = {(0, 1): 9e9, (4, 5): 1e9, (0, 1, 2, 4, 5, 6): 1e9, (0, 1, 8, 9): 10e9 / 3, (0, 4): 2e9}
    for devices, rate in sizes.items():
        n = len(devices)
        assert all_reduce_s(1e9, devices, cluster) == pytest.approx(2 * (n - 1) / n * 1e9 / rate)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"uplink_bytes_per_s": 1e3}, "an uplink of 1000 bytes/s is slower than one link between islands"),
        ({"crossing": ((2, 1e9), (1, 1e9))}, "invalid cluster: rates .* of sums over several islands"),
        ({"crossing": ((1, 0.0),)}, "invalid cluster: rates"),
        ({"cores": 0}, "invalid cluster: 0 cores"),
    ],
)
def test_impossible_clusters_are_refused(more: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(4, 2, Link(0.0, 1e9), Link(0.0, 1e9), **more)


# -------------------------------------------------------------------------------------------- memory


def test_training_holds_16_bytes_a_parameter_in_either_width() -> None:
    assert (FULL.total * 4, MIXED.total * 2) == (16.0, 16.0)


@pytest.mark.parametrize(
    ("stage", "held"),
    [(0, 16.0), (1, 2 + 2 + 12 / 8), (2, 2 + (2 + 12) / 8), (3, 16 / 8)],
)
def test_zero_divides_optimizer_then_gradients_then_parameters(stage: int, held: float) -> None:
    assert MIXED.sharded(8, stage).total * 2 == pytest.approx(held)


def test_an_optimizer_step_moves_its_state_once() -> None:
    """Adam in float32 reads 16 bytes a parameter and writes 12; with a master copy it moves 28 as well."""
    parameters = 1e9
    assert optimizer_step_s(4 * parameters, A100) == pytest.approx(28e9 / 2e12, rel=1e-3)
    assert optimizer_step_s(2 * parameters, A100, MIXED) == pytest.approx(28e9 / 2e12, rel=1e-3)
    assert optimizer_step_s(0, A100) == 0.0
    mixed = AnalyticCosts(graph_of(("a", 1)), A100.cluster(1), kind=A100, state=MIXED)
    assert mixed.optimizer_s(10**9) == optimizer_step_s(10**9, A100, MIXED)
    assert mixed.held_bytes(["a.w0"], ["a.w0"]) == 800
    assert mixed.gradient_bytes(["a.w0"]) == 100


def test_a_kind_makes_clusters_of_any_size() -> None:
    kind = DeviceKind("X", 1e12, 1e11, 10**9, Link(1e-5, 1e10))
    cluster = kind.cluster(20)
    assert [cluster.island(d) for d in (0, 7, 8, 19)] == [0, 0, 1, 2]
    assert (cluster.inside, cluster.memory_bytes) == (kind.inside, 10**9)
