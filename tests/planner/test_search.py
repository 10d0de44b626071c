from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spindle.cluster import Cluster, Link
from lightning_spindle.graph import Flow, Layout
from lightning_spindle.planner import PLANNERS, PlanningProblem, load_cell, plan
from lightning_spindle.planner.search import plan_search
from lightning_spindle.planner.search.anneal import Budget, Clock, Cooling, anneal
from lightning_spindle.planner.search.decode import blocking, decode, resume
from lightning_spindle.planner.search.instance import instance
from lightning_spindle.planner.search.moves import Moves
from lightning_spindle.planner.search.plan import default_moves
from lightning_spindle.planner.search.start import one_slice_each, order_by
from tests.planner.checking import CELLS, YARDSTICK, check, op, problem, problems
from tests.planner.exhaustive import optimum_ms

ROOT = Path(__file__).parents[2]


def cell(name: str) -> PlanningProblem:
    return load_cell(CELLS / f"{name}.json")


def narrow(found):
    """Each MetaOp on its smallest allocation."""
    return order_by(found, [[(0, l)] for l in found.layers], wide_first=False, longest_rest=True)


def tiny(seed: int) -> PlanningProblem:
    rng = random.Random(seed)
    ops = []
    for i in range(3):
        alpha, beta = rng.uniform(0.05, 1.0), rng.uniform(0.5, 4.0)
        allocations = sorted({1, *rng.sample([2, 3, 4], rng.randint(0, 3))})
        after = [f"m{j}" for j in range(i) if rng.random() < 0.3]
        times = {n: round(alpha + beta / n, 3) for n in allocations}
        ops.append(op(f"m{i}", rng.randint(1, 4), after, times))
    return problem(*ops, devices=4)


def test_exhaustive_optimum_of_known_problems():
    one = problem(op("a", 3, times={1: 4.0, 2: 3.0, 4: 2.0}))
    assert optimum_ms(one, 1e9) == pytest.approx(6.0)
    pair = problem(op("a", 2, times={1: 2.0, 2: 1.0}), op("b", 1, times={4: 1.0}))
    assert optimum_ms(pair, 1e9) == pytest.approx(3.0)
    chain = problem(op("a", times={1: 2.0}), op("b", after=["a"], times={2: 1.0}), op("c", times={3: 2.5}))
    assert optimum_ms(chain, 1e9) == pytest.approx(3.5)


def test_finds_the_optimum_of_tiny_problems():
    found = 0
    for seed in range(200):
        case = tiny(seed)
        ms = check(plan_search(case, time_limit_s=None, moves=1000), case)
        best = optimum_ms(case, ms)
        assert ms <= best * 1.05
        found += ms <= best * (1 + 1e-6)
    assert found >= 190


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(YARDSTICK))
def test_limits_on_the_cells(name):
    """The default budget, without the clock: the figures do not depend on the machine."""
    case = cell(name)
    found = plan_search(case, time_limit_s=None)
    ms = check(found, case)
    yard, report = YARDSTICK[name], dict(found.report)
    assert ms == pytest.approx(found.makespan_ms)
    assert ms <= yard["published_best_ms"] * 1.0005
    assert ms <= yard["bound_ms"] * (1.12 if name.startswith("random") else 1.07)
    assert report["bound_ms"] <= yard["bound_ms"] * (1 + 1e-6)
    assert report["gap"] == pytest.approx(ms / report["bound_ms"] - 1)
    assert report["capped"] == 0


@given(problems())
@settings(max_examples=40)
def test_plans_are_valid_and_never_worse_than_another_planner(case):
    found = plan_search(case, time_limit_s=None, moves=100)
    assert check(found, case) == pytest.approx(found.makespan_ms)
    for name in PLANNERS.keys() - {"search"}:
        assert found.makespan_ms <= plan(case, name).makespan_ms * (1 + 1e-9)
    assert found.makespan_ms >= dict(found.report)["bound_ms"] * (1 - 1e-6)


@given(problems(), st.integers(0, 2**32))
@settings(max_examples=60)
def test_decoding_from_the_middle_equals_decoding_anew(case, seed):
    found = instance(case)
    rng = random.Random(seed)
    moves, now = Moves(found, rng, split=True), decode(found, narrow(found))
    for _ in range(60):
        moved = moves.propose(now.order, rng.randrange(len(now.order)))
        if moved is None:
            continue
        order, changed, grown = moved
        assert order[:changed] == now.order[:changed]
        tried, anew = resume(found, order, changed, now, float("inf")), decode(found, order)
        assert tried is not None
        assert (tried.starts, tried.free) == (anew.starts, anew.free)
        assert anew.used == pytest.approx(now.used + grown)
        bound = anew.makespan_ms * (1 + 1e-9)
        assert resume(found, order, changed, now, bound) is not None
        assert resume(found, order, 0, None, bound * 0.999) is None
        idle = found.devices * bound - anew.used
        assert resume(found, order, changed, now, float("inf"), idle + 1e-6) is not None
        _check_order(found, order)
        now = anew


def _check_order(found, order):
    left = list(found.layers)
    for m, n, d, l, k in order:
        assert found.allocations[m][k] == n
        assert d == pytest.approx(l * found.layer_ms[m][k])
        assert l > 0
        assert all(left[b] == 0 for b in found.not_before[m] if b != m)
        left[m] -= l
    assert not any(left)


@given(problems())
@settings(max_examples=30)
def test_blocking_chain_reaches_from_start_to_end(case):
    found = instance(case)
    now = decode(found, narrow(found))
    chain = blocking(now)
    ends = [now.starts[i] + now.order[i][2] for i in chain]
    assert max(ends) == now.makespan_ms
    assert min(now.starts[i] for i in chain) == 0.0


def test_annealing_is_never_worse_than_its_start():
    found = instance(cell("ofasys4_8_a"))
    order = narrow(found)
    result = anneal(found, order, Budget(50, Clock(None), 1.0), random.Random(0), Cooling())
    assert result.makespan_ms <= decode(found, order).makespan_ms


def test_equal_seeds_equal_plans_whatever_the_input_order():
    case = cell("random3_16")
    rng = random.Random(5)
    metaops = [replace(m, after=tuple(rng.sample(m.after, len(m.after)))) for m in case.metaops]
    shuffled = replace(case, metaops=tuple(rng.sample(metaops, len(metaops))))
    first = plan_search(case, time_limit_s=None, moves=400)
    assert plan_search(shuffled, time_limit_s=None, moves=400) == first
    assert plan_search(case, time_limit_s=None, moves=400, seed=1) != first


def test_equal_plans_in_other_processes():
    code = (
        "import sys; from lightning_spindle.planner import load_cell\n"
        "from lightning_spindle.planner.search import plan_search\n"
        "print(plan_search(load_cell(sys.argv[1]), time_limit_s=None, moves=400).digest())"
    )
    digests = set()
    for seed in ("0", "1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code, str(CELLS / "clip4_16_a.json")]
        digests.add(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(digests) == 1


def test_says_whether_the_time_limit_ended_it():
    case = cell("clip7_16_a")
    assert dict(plan_search(case, time_limit_s=0.05).report)["capped"] == 1
    assert dict(plan_search(case, time_limit_s=None, moves=50).report)["capped"] == 0


def large(metaops: int, devices: int) -> PlanningProblem:
    rng = random.Random(0)
    ops = []
    for i in range(metaops):
        work, fixed = rng.uniform(5.0, 200.0), rng.uniform(0.1, 1.5)
        after = [f"m{j:03d}" for j in range(max(0, i - 20), i) if i % 3 == 2 and rng.random() < 0.1]
        times = {1 << k: work / (1 << k) + fixed for k in range(devices.bit_length())}
        ops.append(op(f"m{i:03d}", rng.randint(1, 32), after, times, batch=devices))
    return problem(*ops, devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize(("metaops", "devices", "seconds"), [(30, 64, 1.0), (300, 1024, 10.0)])
def test_planning_takes_its_time_and_no_more(metaops, devices, seconds):
    case = large(metaops, devices)
    began_s = time.process_time()
    found = plan_search(case, time_limit_s=seconds)
    assert time.process_time() - began_s < seconds
    check(found, case)
    assert dict(found.report)["gap"] < 0.12


def test_budget_follows_the_time_limit_and_the_size():
    small, large = cell("clip4_8_a"), cell("clip10_32_a")
    assert default_moves(small, 3.0) == pytest.approx(3 * default_moves(small, 1.0), abs=2)
    assert default_moves(large, 1.0) < default_moves(small, 1.0)


def costly(devices: int = 4, **more) -> PlanningProblem:
    """Links that cost something: a MetaOp that moves pays for it."""
    slow = Link(5e-4, 1e8)
    ops = [
        op(f"t{i}.{part}", 6, [f"t{i}.a"] if part == "b" else [], {1: 8.0 + i, 2: 4.5 + i / 2, 4: 3.0},
           layer_flow_bytes=200_000)
        for i in range(3) for part in "ab"
    ]  # fmt: skip
    flows = tuple(Flow(f"t{i}.a", f"t{i}.b", 200_000) for i in range(3))
    cluster = Cluster(devices, devices, slow, slow, **more)
    return PlanningProblem("costly", tuple(ops), cluster, flows)


def test_score_decides_between_finalists():
    case = costly()
    seen = []

    def score(found):
        seen.append(found)
        return float(len(found.runs))

    best = plan_search(case, time_limit_s=None, moves=600, score=score)
    assert len(best.runs) == min(len(p.runs) for p in seen) == len(case.metaops)
    assert len({p.digest() for p in seen}) >= 3
    assert best.planner == "search"


def test_transfers_are_part_of_the_makespan():
    case = costly()
    best = plan_search(case, time_limit_s=None, moves=2000)
    for name in PLANNERS.keys() - {"search"}:
        assert best.makespan_ms <= plan(case, name).makespan_ms * (1 + 1e-9)


def test_pinned_and_whole_metaops_share_their_device():
    ops = [op(f"t.m{i}", 4, times={1: 3.0, 2: 1.6, 4: 1.0}) for i in range(3)]
    pinned = [op(f"t.p{i}", 1, [f"t.m{i}"], {1: 1.0}, pin="bank", layout=Layout.WHOLE) for i in range(3)]
    case = problem(*ops, *pinned)
    found = plan_search(case, time_limit_s=None, moves=500)
    check(found, case)
    assert len({r.devices for r in found.runs if ".p" in r.metaop}) == 1


def test_a_problem_that_does_not_fit_is_refused():
    layers = tuple((f"w{i}",) for i in range(2))
    big = op("a.big", 2, times={1: 1.0, 2: 0.6}, layer_parameters=layers)
    case = problem(big, devices=2, memory=1000, parameter_bytes=(("w0", 900), ("w1", 900)))
    with pytest.raises(ValueError, match=r"a\.big.*device \d+ needs \d+ bytes"):
        plan_search(case, time_limit_s=None, moves=50)


def test_one_slice_each_keeps_the_widest_share():
    found = instance(problem(op("a", 9, times={1: 2.0, 2: 1.2})))
    order = [found.slice(0, 0, 2), found.slice(0, 1, 7)]
    assert one_slice_each(found, order) == [found.slice(0, 1, 9)]
