"""Execution plans: what they refuse, and that they come back from JSON as they were."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spindle.graph import Layout, MetaGraph, MetaOp
from lightning_spindle.plan import Configuration, ExecutionPlan, Run
from tests.support.programs import Sample, samples


def run(
    metaop: str,
    first: int,
    last: int,
    devices: tuple[int, ...],
    start: float,
    end: float,
    stage: int | None = None,
) -> Run:
    return Run(metaop, first, last, devices, start, end, Configuration(len(devices)), stage)


VISION = (run("vision", 0, 3, (0, 1), 0, 2, 0), run("vision", 3, 4, (0,), 2, 3.5, 1))
TEXT = run("text", 0, 2, (2,), 0, 2, 0)
LOSS = run("loss", 0, 1, (0,), 3.5, 4)


GOLDEN_DIGEST = "345c5c591bee70d9"


def plan(*runs: Run, devices: int = 4) -> ExecutionPlan:
    return ExecutionPlan("spindle", devices, runs or (*VISION, TEXT, LOSS), 4.0)


def metagraph(**changes: MetaOp) -> MetaGraph:
    metaops = {
        "vision": MetaOp("vision", "a", tuple((f"v{k}",) for k in range(4)), (), 8, 0),
        "text": MetaOp("text", "a", (("t0",), ("t1",)), (), 8, 0),
        "loss": MetaOp("loss", "a", (("l",),), ("vision", "text"), 8, 1, Layout.WHOLE),
    }
    return MetaGraph(tuple({**metaops, **changes}.values()))


# ------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([run("a", 2, 2, (0,), 0, 1)], r"a\[2:2\]@0 has no layers"),
        ([run("a", -1, 2, (0,), 0, 1)], r"a\[-1:2\]@0 has no layers"),
        ([replace(LOSS, devices=())], r"loss\[0:1\]@ has no devices, or one twice"),
        ([run("a", 0, 1, (1, 1), 0, 1)], r"a\[0:1\]@1,1 has no devices, or one twice"),
        ([run("a", 0, 1, (3, 4), 0, 1)], r"a\[0:1\]@3,4 uses a device outside 0\.\.3"),
        ([run("a", 0, 1, (-1,), 0, 1)], r"uses a device outside 0\.\.3"),
        ([replace(TEXT, configuration=Configuration(2))], r"text\[0:2\]@2 is configured for 2 devices"),
        ([run("a", 0, 1, (0,), 2, 1)], "lasts from 2 to 1 ms"),
        ([run("a", 0, 1, (0,), -1, 1)], "lasts from -1 to 1 ms"),
        ([run("a", 0, 1, (0,), float("nan"), 1)], "lasts from nan to 1 ms"),
        ([run("a", 1, 2, (0,), 0, 1)], r"a\[1:2\]@0 follows layer 0 of a"),
        ([run("a", 0, 2, (0,), 0, 1), run("a", 1, 2, (0,), 1, 2)], r"a\[1:2\]@0 follows layer 2 of a"),
        ([run("a", 0, 2, (0,), 0, 1), run("a", 3, 4, (0,), 1, 2)], r"a\[3:4\]@0 follows layer 2 of a"),
        ([run("a", 0, 1, (0,), 0, 2), run("a", 1, 2, (1,), 1, 3)], "starts before the layers below it end"),
        (
            [run("a", 0, 1, (0, 1), 0, 2), run("b", 0, 1, (1, 2), 1, 3)],
            r"a\[0:1\]@0,1 and b\[0:1\]@1,2 overlap on device 1",
        ),
    ],
)
def test_contradictions_are_refused(runs: list[Run], message: str) -> None:
    with pytest.raises(ValueError, match=f"^invalid plan: .*{message}"):
        plan(*runs)


@pytest.mark.parametrize("sizes", [(0,), (2, 0), (1, 1, -1)])
def test_configurations_have_positive_degrees(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="invalid configuration"):
        Configuration(*sizes)


@pytest.mark.parametrize(
    ("runs", "changes", "message"),
    [
        (
            (*VISION, TEXT, LOSS, run("audio", 0, 1, (3,), 0, 1)),
            {},
            "audio.* names a MetaOp that the model does not have",
        ),
        (
            (*VISION, TEXT, run("loss", 0, 1, (0, 1), 3.5, 4)),
            {},
            r"loss.* couples samples and must run on one device",
        ),
        ((VISION[0], TEXT, LOSS), {}, "vision runs 3 of its 4 layers"),
        ((*VISION, LOSS), {}, "text runs 0 of its 2 layers"),
        ((*VISION, TEXT, run("text", 2, 3, (3,), 2, 3), LOSS), {}, "text runs 3 of its 2 layers"),
        ((*VISION, TEXT, run("loss", 0, 1, (3,), 3.0, 4)), {}, "loss starts before vision ends"),
        (
            (*VISION, TEXT, LOSS),
            {
                "text": MetaOp("text", "a", (("t0",), ("t1",)), (), 8, 0, pin="stats"),
                "loss": MetaOp("loss", "a", (("l",),), (), 8, 0, Layout.WHOLE, pin="stats"),
            },
            r"loss\[0:1\]@0 must share device \(2,\) \(both write stats\)",
        ),
    ],
)
def test_plans_that_do_not_fit_the_model_are_refused(
    runs: tuple[Run, ...], changes: dict[str, MetaOp], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^invalid plan: .*{message}"):
        plan(*runs).validate(metagraph(**changes))


def test_a_plan_that_fits_is_accepted() -> None:
    plan().validate(metagraph())


def test_rounding_in_times_is_no_contradiction() -> None:
    late = run("loss", 0, 1, (0,), 3.5 - 1e-6, 4)
    plan(*VISION, TEXT, late).validate(metagraph())


def test_runs_without_time_may_share_a_device() -> None:
    plan(run("a", 0, 1, (0,), 1, 1), run("b", 0, 1, (0,), 1, 2))


# ------------------------------------------------------------------------------------ JSON and digest


@given(samples())
def test_plans_come_back_from_json(sample: Sample) -> None:
    given_ = sample.plan.with_report({"bound_ms": 1.25, "c_star_ms": 0.1 + 0.2})
    back = ExecutionPlan.from_json(given_.to_json())
    assert back == given_
    assert back.digest() == given_.digest()


@given(samples(), st.randoms(use_true_random=False))
def test_the_order_of_runs_does_not_matter(sample: Sample, rng: random.Random) -> None:
    runs = list(sample.plan.runs)
    rng.shuffle(runs)
    assert replace(sample.plan, runs=tuple(runs)).digest() == sample.plan.digest()


def test_the_digest_is_stable() -> None:
    """Written into checkpoints: it may change with ``FORMAT`` only."""
    assert plan().digest() == GOLDEN_DIGEST


@pytest.mark.parametrize(
    "other",
    [
        plan(devices=5),
        plan(*VISION, replace(TEXT, devices=(3,)), LOSS),
        plan(*VISION, replace(TEXT, stage=1), LOSS),
        plan(VISION[0], replace(VISION[1], devices=(1,)), TEXT, LOSS),
        plan(*VISION, replace(TEXT, end_ms=1.5), LOSS),
    ],
)
def test_another_plan_has_another_digest(other: ExecutionPlan) -> None:
    assert other.digest() != plan().digest()


def test_a_run_without_a_configuration_is_data_parallel() -> None:
    body = json.loads(plan().to_json())
    for one in body["runs"]:
        del one["configuration"], one["stage"]
    runs = ExecutionPlan.from_json(json.dumps(body)).runs
    assert {r.configuration for r in runs} == {Configuration(1), Configuration(2)}
    assert {r.stage for r in runs} == {None}


def change(**fields: object) -> str:
    return json.dumps({**json.loads(plan().to_json()), **fields})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "missing or malformed field"),
        ("[]", "missing or malformed field"),
        ("null", "missing or malformed field"),
        ("no plan at all", "is no JSON"),
        (change(format=99), "format 99, this version reads 1"),
        (change(runs=None), "missing or malformed field"),
        (change(runs=[{}]), "missing or malformed field"),
        (change(report=[]), "missing or malformed field"),
        (change(devices=2), r"uses a device outside 0\.\.1"),
        (change(devices="4"), "missing or malformed field"),
    ],
)
def test_other_texts_are_no_plans(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"invalid plan: .*{message}"):
        ExecutionPlan.from_json(text)


def test_promises_do_not_change_the_digest() -> None:
    """They may hold the planning time, which differs between ranks that plan alike."""
    other = replace(plan(), planner="search", makespan_ms=3.0).with_report({"planning_s": 0.5})
    assert other.digest() == plan().digest()


@pytest.mark.parametrize(
    "fields", [{"layers": [0, 1, 2]}, {"layers": [0, 1.5]}, {"devices": [True]}, {"devices": 1}]
)
def test_malformed_runs_are_refused(fields: dict[str, object]) -> None:
    body = json.loads(plan().to_json())
    body["runs"][0].update(fields)
    with pytest.raises(ValueError, match="invalid plan: missing or malformed field"):
        ExecutionPlan.from_json(json.dumps(body))


def test_a_report_is_kept_by_name() -> None:
    reported = plan().with_report({"z": 1.0, "a": 2.0}).with_report({"z": 3.0})
    assert reported.report == (("a", 2.0), ("z", 3.0))


# --------------------------------------------------------------------------------------------- table


def test_the_table_has_a_line_for_each_run() -> None:
    tensor = Run("llm", 0, 8, (0, 1, 2, 5), 4, 6, Configuration(2, 2))
    text = str(plan(*VISION, TEXT, LOSS, tensor, devices=6))
    assert text == TABLE, text


TABLE = """\
spindle plan, 6 devices, 4.00 ms predicted
run                                       devices   config stage   start ms     end ms
text[0:2]                                       2      dp1     0      0.000      2.000
vision[0:3]                                   0-1      dp2     0      0.000      2.000
vision[3:4]                                     0      dp1     1      2.000      3.500
loss[0:1]                                       0      dp1     -      3.500      4.000
llm[0:8]                                    0-2,5   dp2tp2     -      4.000      6.000"""
