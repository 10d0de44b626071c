"""Runs of many parameters in pieces: where they are cut, and what is summed when."""

from collections.abc import Sequence
from typing import Any

import pytest

from lightning_spindle.cluster import Cluster, Link
from lightning_spindle.costs import MeasuredCosts
from lightning_spindle.graph import (
    Layout,
    MetaGraph,
    MetaOp,
    Operator,
    OperatorGraph,
    Parameter,
    Reduction,
    Result,
    Value,
)
from lightning_spindle.plan import Configuration, ExecutionPlan, Run
from lightning_spindle.program import Program, ProgramRun, holders, lower, place_plan
from lightning_spindle.runtime import session
from lightning_spindle.simulate import check_deadlock, simulate
from tests.support import toys
from tests.support.fitting import (
    Fit,
    assert_same_fit,
    metagraph_of,
    placed,
    plain_fit,
    spindle_fit,
    without_gradients,
)

LAYERS, ROWS = 4, 4


class Step:
    """Towers of four layers, each with a weight of 10 bytes, that may read what other towers give."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.metaops: list[MetaOp] = []
        self.runs: list[Run] = []

    def tower(
        self,
        name: str,
        devices: tuple[int, ...],
        reads: str | None = None,
        at: Sequence[int] = range(LAYERS),
        weights: str | None = None,
    ) -> None:
        """``reads``: the tower whose last layer is read by the layers ``at``; ``weights``: whose weights."""
        for k in range(LAYERS):
            given = (f"{name}.v{k - 1}",) * (k > 0)
            other = (f"{reads}.v{LAYERS - 1}",) if reads and k in at else ()
            weight = f"{weights or name}.w{k}"
            self.operators.append(
                Operator(
                    f"{name}.{k}", "t", "s", Layout.SPLIT, given + other, (f"{name}.v{k}",), (weight,), 1e9
                )
            )
        layers = tuple((f"{name}.{k}",) for k in range(LAYERS))
        self.metaops.append(MetaOp(name, "t", layers, (reads,) if reads else (), ROWS, 0))
        start = float(len(self.runs))
        self.runs.append(Run(name, 0, LAYERS, devices, start, start + 1, Configuration(len(devices))))

    def graph(self) -> OperatorGraph:
        values = tuple(Value(o.outputs[0], 0, 1, 8, True) for o in self.operators)
        names = dict.fromkeys(p for o in self.operators for p in o.parameters)
        results = (Result("t", "loss", values[-1].name, Reduction.MEAN),)
        return OperatorGraph(
            tuple(self.operators),
            values,
            tuple(Parameter(n, 10, True) for n in names),
            results,
            (("t", ROWS),),
        )

    def placed(self, piece_bytes: int) -> tuple[ProgramRun, ...]:
        devices = 1 + max(d for run in self.runs for d in run.devices)
        plan = ExecutionPlan("forced", devices, tuple(self.runs), float(len(self.runs)))
        return place_plan(plan, MetaGraph(tuple(self.metaops)), self.graph(), piece_bytes=piece_bytes)

    def program(self, piece_bytes: int, bucket_bytes: int) -> Program:
        runs, graph = self.placed(piece_bytes), self.graph()
        held = holders([(runs, graph)])
        names = [p.name for p in graph.parameters]
        program = lower(runs, graph, 2, held, trainable=names, bucket_bytes=bucket_bytes)
        check_deadlock(program)
        return program


def labels(step: Step, piece_bytes: int) -> list[str]:
    return [run.label for run in step.placed(piece_bytes)]


@pytest.mark.parametrize(
    ("piece_bytes", "expected"),
    [
        (1, ["a[0:1]", "a[1:2]", "a[2:3]", "a[3:4]"]),
        (11, ["a[0:2]", "a[2:4]"]),
        (30, ["a[0:1]", "a[1:4]"]),
        (41, ["a[0:4]"]),
    ],
)
def test_a_run_is_cut_from_its_last_layer_on(piece_bytes: int, expected: list[str]) -> None:
    step = Step()
    step.tower("a", (0, 1))
    assert labels(step, piece_bytes) == expected


def test_parameters_of_one_device_are_not_summed_and_not_cut_for() -> None:
    step = Step()
    step.tower("a", (0,))
    assert labels(step, 1) == ["a[0:4]"]


def test_shared_parameters_are_cut_for_where_backward_completes_them() -> None:
    """The first run that uses them, which is the last one of backward."""
    step = Step()
    step.tower("a", (0,))
    step.tower("b", (1,), weights="a")
    assert labels(step, 20) == ["a[0:2]", "a[2:4]", "b[0:4]"]


def test_what_other_devices_give_is_read_by_one_piece_alone() -> None:
    step = Step()
    step.tower("a", (0,))
    step.tower("b", (0, 1), reads="a", at=(1, 2))
    step.tower("c", (0, 1), reads="b", at=(0, 3))
    assert labels(step, 1) == ["a[0:4]", "b[0:1]", "b[1:3]", "b[3:4]"] + [f"c[{k}:{k + 1}]" for k in range(4)]


def test_a_piece_is_summed_while_the_next_one_goes_back() -> None:
    step = Step()
    step.tower("a", (0, 1))
    backward = [str(i) for i in step.program(20, 20).order if str(i)[0] in "BGR"]
    assert backward == ["B1", "R0", "B0", "R1"]
    whole = [str(i) for i in step.program(41, 20).order if str(i)[0] in "BGR"]
    assert whole == ["B0", "R0", "R1"]


def test_a_cut_run_takes_less_time() -> None:
    """Each layer 2 rows a device, 1 ms forward and 2 ms backward a row; a sum of 20 bytes 8 ms."""
    step = Step()
    step.tower("a", (0, 1))
    link = Link(0.0, float("inf"))
    times = {o.name: {ROWS: (float(ROWS), 2.0 * ROWS)} for o in step.operators}
    costs = MeasuredCosts(step.graph(), Cluster(2, 2, link, link), times, {2: (0.0, 20 / 8e-3)})
    exchange_ms = costs.exchange_s((0, 1)) * 1e3

    def span_ms(piece_bytes: int) -> float:
        return simulate(step.program(piece_bytes, 20), costs).span_s * 1e3 - exchange_ms

    assert span_ms(41) == pytest.approx(8 + 16 + 8 + 8)
    assert span_ms(20) == pytest.approx(8 + 16 + 8)


def fit(**options: Any) -> tuple[list[Fit], Fit]:
    """On two ranks that hold everything, and in one process."""
    plan = placed(metagraph_of(toys.model(), toys.data()), 2, lambda name: (0, 1))
    strategy = {"plan": plan, "shard_optimizer_state": True}
    return (
        spindle_fit(toys.model, toys.data, 2, strategy=strategy, **options),
        plain_fit(toys.model, toys.data, **options),
    )


def test_parity_of_a_fit_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """PARITY and REPLICA: accumulated gradients, clipped values, an optimizer state for each parameter."""

    def in_pieces(plan: ExecutionPlan, metagraph: MetaGraph, graph: OperatorGraph) -> tuple[ProgramRun, ...]:
        runs = place_plan(plan, metagraph, graph, piece_bytes=1)
        assert len(runs) > len(place_plan(plan, metagraph, graph))
        return runs

    monkeypatch.setattr(session, "place_plan", in_pieces)
    ours, reference = fit(
        accumulate_grad_batches=2, max_steps=3, gradient_clip_val=0.01, gradient_clip_algorithm="value"
    )
    assert_same_fit(without_gradients(ours), without_gradients([reference])[0])
