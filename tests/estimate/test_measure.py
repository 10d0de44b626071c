"""Measuring: what is measured, that ranks agree, and that training afterwards is none the wiser."""

import copy
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree
from torchmetrics.classification import BinaryAccuracy

from lightning_spindle.capture.pieces import BatchLayout, Capture, LeafLayout, LeafRef, Piece, ValueRef
from lightning_spindle.estimate.links import measure_links
from lightning_spindle.estimate.measure import _Unit, measure, row_counts
from lightning_spindle.estimate.passes import OperatorTime, TaskPasses
from lightning_spindle.estimate.problem import cluster_from, measured_costs, planning_problem
from lightning_spindle.estimate.samples import Samples
from lightning_spindle.graph import Layout, Operator, OperatorGraph, Parameter, Reduction, Result, Value
from lightning_spindle.planner import plan
from lightning_spindle.runtime.transport import LocalTransport, ProcessGroupTransport, world_transport
from tests.support import handmade
from tests.support.ranks import run_ranks, run_threads

CPU = torch.device("cpu")
BUDGET_S = 8.0


def build(capture: Capture) -> dict[str, Callable[..., Any]]:
    return {name: piece.build() for name, piece in capture.pieces.items()}


def example() -> dict[str, list[Any]]:
    return {task: pytree.tree_leaves(batch) for task, batch in handmade.batches(0).items()}


def measured(transport: Any, budget_s: float = BUDGET_S, model: nn.Module | None = None) -> Samples:
    model = model or handmade.Handmade()
    capture = handmade.capture(model)
    return measure(capture, build(capture), example(), transport, CPU, module=model, budget_s=budget_s)


def threads(fn: Callable[[ProcessGroupTransport], Any], size: int) -> list[Any]:
    """``fn(transport)`` on ranks that are threads."""
    store = dist.HashStore()
    limit = timedelta(seconds=10)

    def rank(index: int, _: int, group: Any) -> Any:
        def subgroup(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
            if index not in ranks:
                return None
            scope = dist.PrefixStore(str(ranks), store)
            return dist.ProcessGroupGloo(scope, ranks.index(index), len(ranks), limit)

        return fn(ProcessGroupTransport(group, subgroup, timeout=limit, blocking_sends=True))

    return run_threads(rank, size)


def assert_complete(samples: Samples, devices: int) -> None:
    graph = handmade.capture(handmade.Handmade()).graph
    assert samples.operators.keys() == {o.name for o in graph.operators}
    for o in graph.operators:
        batch = handmade.ROWS[o.task]
        expected = [batch] if o.layout is Layout.WHOLE else row_counts(batch, devices)
        times = samples.operators[o.name]
        assert sorted(times, reverse=True) == expected
        assert all(t.forward_ms > 0 and t.backward_ms > 0 for t in times.values())
    assert samples.repeats >= 2
    assert samples.busy == devices


@pytest.mark.parametrize(
    ("batch", "devices", "rows"),
    [(7, 1, [7]), (7, 4, [7, 4, 3, 2]), (3, 8, [3, 2, 1]), (64, 4, [64, 32, 22, 16]), (1, 4, [1])],
)
def test_rows_of_the_largest_shards(batch: int, devices: int, rows: list[int]) -> None:
    assert row_counts(batch, devices) == rows


def test_one_process() -> None:
    samples = measured(LocalTransport())
    assert_complete(samples, 1)
    assert samples.links.all_reduce == {}
    assert samples.links.inside.seconds(10**9) == 0.0


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_as_threads(size: int) -> None:
    found = threads(measured, size)
    assert_complete(found[0], size)
    assert all(s == found[0] for s in found)
    assert sorted(found[0].links.all_reduce) == sorted({2, size})


def test_processes_and_their_plan() -> None:
    """C23: times differ between ranks, the samples and the plan made of them do not."""

    def rank(_: int, size: int) -> tuple[str, str]:
        torch.manual_seed(0)
        model = handmade.Handmade()
        samples = measured(world_transport(timedelta(seconds=10)), model=model)
        cluster = cluster_from(samples, size, cores=samples.cores)
        graph = handmade.capture(model).graph
        problem = planning_problem("measured", handmade.metagraph(), graph, samples, cluster)
        costs = measured_costs(graph, cluster, samples)
        assert costs.operator_s("pair/loss", 7, True) > 0
        return samples.to_json(), plan(problem, "spindle").to_json()

    found = run_ranks(rank, 2)
    assert_complete(Samples.from_json(found[0][0]), 2)
    assert found[0] == found[1]


def test_links_between_islands() -> None:
    links = threads(lambda transport: measure_links(transport, CPU, 0.2, island_size=2), 4)[0]
    assert links.between is not None
    assert sorted(links.all_reduce) == [2, 4]
    for link in (links.inside, links.between, *links.all_reduce.values()):
        assert 0 < link.seconds(4 * 2**20) < 5
    assert 0 < links.exchange_s < 5


def test_progress_runs_from_start_to_end() -> None:
    seen: list[tuple[float, str]] = []
    model = handmade.Handmade()
    capture = handmade.capture(model)
    measure(
        capture,
        build(capture),
        example(),
        LocalTransport(),
        CPU,
        module=model,
        budget_s=0.3,
        progress=lambda fraction, text: seen.append((fraction, text)),
    )
    fractions = [f for f, _ in seen]
    assert fractions[-1] == 1.0
    assert all(0.0 <= f <= 1.0 for f in fractions)
    assert any("pair" in text for _, text in seen)


class Slow(nn.Module):
    """A block that takes its time, by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(handmade.WIDTH, handmade.WIDTH).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02 * len(x))
        return self.linear(x)


def slowed() -> handmade.Handmade:
    model = handmade.Handmade()
    model.image[0] = Slow()
    return model


def test_budget_is_kept() -> None:
    """A pass of task "pair" sleeps 0.14 s, the budget has no room for many."""
    start = time.monotonic()
    samples = measured(LocalTransport(), 0.6, slowed())
    assert time.monotonic() - start < 2.0
    assert samples.operators["pair/image.0"][7].forward_ms == pytest.approx(140, rel=0.2)
    assert samples.repeats >= 1


def test_without_any_budget_every_operator_has_one_figure() -> None:
    found = threads(lambda transport: measured(transport, 0.0), 2)[0]
    assert all(list(times) == [max(times)] for times in found.operators.values())
    assert found.repeats == 0


def test_a_pass_sees_its_rows_only() -> None:
    model = slowed()
    capture = handmade.capture(model)
    parameters = dict(model.named_parameters())
    passes = TaskPasses("pair", capture, build(capture), parameters, example()["pair"], CPU)
    for rows in (7, 4, 1):
        found = {t.operator: t for t in passes.run(rows)}
        assert ("pair/loss" in found) == (rows == 7)
        assert 20 * rows <= found["pair/image.0"].forward_ms < 20 * rows + 100
        assert 0 < found["pair/image.0"].backward_ms < 100


def test_a_task_without_a_batch_is_named() -> None:
    model = handmade.Handmade()
    capture = handmade.capture(model)
    leaves = {k: v for k, v in example().items() if k != "score"}
    with pytest.raises(ValueError, match="score"):
        measure(capture, {}, leaves, LocalTransport(), CPU, module=model)


def test_an_operator_that_fails_is_named() -> None:
    model = handmade.Handmade()
    capture = handmade.capture(model)

    def broken(*_: Any) -> Any:
        raise KeyError("lost")

    callables = build(capture) | {"score/text.1": broken}
    with pytest.raises(RuntimeError, match=r"operator score/text\.1 of task score at 5 of 5 rows.*lost"):
        measure(capture, callables, example(), LocalTransport(), CPU, module=model, budget_s=0.1)


def test_frozen_parameters_have_no_backward() -> None:
    model = handmade.Handmade()
    model.image.requires_grad_(False)
    samples = measured(LocalTransport(), 0.3, model)
    assert samples.operators["pair/image.0"][7].backward_ms == 0.0
    assert samples.operators["pair/image.1"][7].backward_ms == 0.0
    assert samples.operators["pair/text.0"][7].backward_ms > 0.0


class Stateful(nn.Module):
    """Dropout, BatchNorm (couples samples, writes buffers), plain attributes and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 1)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.accuracy = BinaryAccuracy()
        self.seen: list[int] = []
        self.calls = 0

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        random.random()
        np.random.random()
        return self.drop(self.act(x)) + self.frozen(x)

    def loss(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.accuracy.update(self.head(h).squeeze(1), y)
        return nn.functional.binary_cross_entropy_with_logits(self.head(h).squeeze(1), y.float())

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.middle(self.norm(self.first(x))), y)


def stateful_capture(model: Stateful) -> Capture:
    x, y = LeafRef(0), LeafRef(1)
    calls: list[tuple[str, Any, Any, Layout, list[str]]] = [
        ("t/first", (x,), model.first, Layout.SPLIT, ["first.weight", "first.bias"]),
        ("t/norm", (ValueRef("t/first"),), model.norm, Layout.WHOLE, ["norm.weight", "norm.bias"]),
        ("t/middle", (ValueRef("t/norm"),), model.middle, Layout.SPLIT, ["frozen.weight", "frozen.bias"]),
        ("t/loss", (ValueRef("t/middle"), y), model.loss, Layout.SPLIT, ["head.weight", "head.bias"]),
        ("t/metric", (ValueRef("t/middle"), y), refuse, Layout.EVERYWHERE, []),
        ("t/logged", (ValueRef("t/metric"),), refuse, Layout.SPLIT, []),
    ]
    operators, values, pieces = [], [], {}
    for name, sources, call, layout, parameters in calls:
        inputs = tuple(s.name for s in sources if isinstance(s, ValueRef))
        operators.append(Operator(name, "t", name, layout, inputs, (name,), tuple(parameters)))
        values.append(Value(name, None if name == "t/loss" else 0, 1, 128, name != "t/metric"))
        pieces[name] = Piece(name, sources, (name,), lambda call=call: lambda *a: (call(*a),))
    graph = OperatorGraph(
        tuple(operators),
        tuple(values),
        tuple(Parameter(n, p.nbytes, p.requires_grad) for n, p in model.named_parameters()),
        (Result("t", "loss", "t/loss", Reduction.MEAN),),
        (("t", 8),),
    )
    layout = BatchLayout(pytree.tree_structure((0, 0)), (LeafLayout(0), LeafLayout(0)))
    return Capture(graph, pieces, {"t": layout})


def refuse(*_: Any) -> Any:
    raise AssertionError("a metric must not run")


def state(model: Stateful) -> dict[str, Any]:
    metric = model.accuracy
    return {
        "tensors": {k: v.clone() for k, v in model.state_dict().items()},
        "grads": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "trains": {n: p.requires_grad for n, p in model.named_parameters()},
        "modes": [m.training for m in model.modules()],
        "plain": (model.calls, list(model.seen), metric._update_count),
        "metric": [metric.tp.clone(), metric.fp.clone(), metric.tn.clone(), metric.fn.clone()],
        "torch": torch.random.get_rng_state(),
        "numpy": list(np.random.get_state()[1:]),
        "python": random.getstate(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("size", [1, 2])
def test_training_afterwards_is_the_same(size: int) -> None:
    """Randomness, buffers, gradients, metric state and flags are put back bit for bit."""

    def rank(_: int, size: int) -> None:
        torch.manual_seed(1)
        model = Stateful()
        x, y = torch.randn(8, 4), torch.arange(8) % 2
        other = copy.deepcopy(model)
        for m in (model, other):
            torch.manual_seed(3)
            m.step(x, y).backward()
        model.norm.eval()
        transport: Any = LocalTransport() if size == 1 else world_transport(timedelta(seconds=10))
        before, batch = state(model), (x.clone(), y.clone())
        capture = stateful_capture(model)
        samples = measure(
            capture, build(capture), {"t": [x, y]}, transport, CPU, module=model, budget_s=BUDGET_S
        )
        after = state(model)
        assert [k for k in before if not same(before[k], after[k])] == []
        assert same(batch, (x, y))
        assert samples.operators["t/metric"][8].total_ms == 0.0
        assert sorted(samples.operators["t/norm"]) == [8]
        assert sorted(samples.operators["t/middle"], reverse=True) == row_counts(8, size)
        model.norm.train()
        for m in (model, other):
            torch.manual_seed(2)
            stepper = torch.optim.SGD(m.parameters(), lr=0.1)
            for _ in range(3):
                m.step(x, y).backward()
                stepper.step()
        assert same(model.state_dict(), other.state_dict())

    run_ranks(rank, size)


def test_state_is_put_back_after_an_error() -> None:
    model = Stateful()
    capture = stateful_capture(model)
    before = state(model)
    callables = build(capture) | {"t/loss": refuse}
    leaves = {"t": [torch.randn(8, 4), torch.zeros(8)]}
    before = state(model)
    with pytest.raises(RuntimeError, match="t/loss"):
        measure(capture, callables, leaves, LocalTransport(), CPU, module=model, budget_s=0.1)
    assert same(before, state(model))


def test_figures_include_the_waiting_for_a_core() -> None:
    """Each pass meets one wait, in another operator: proportions without the waits, sums with them."""

    class Passes:
        def __init__(self) -> None:
            self.count = 0

        def run(self, rows: int) -> list[OperatorTime]:
            self.count += 1
            return [OperatorTime(f"o{i}", 1.0 + i + 9.0 * (i == self.count % 4), 0.0) for i in range(4)]

    unit = _Unit(Passes(), 1)  # type: ignore[arg-type]
    for _ in range(6):
        unit.run(2)
    assert [t.forward_ms for t in unit.times()] == pytest.approx([1.9, 3.8, 5.7, 7.6])


def test_samples_of_one_run_replace_by_json() -> None:
    samples = measured(LocalTransport(), 0.2)
    assert Samples.from_json(samples.to_json()) == samples
    assert replace(samples, busy=3) != samples
