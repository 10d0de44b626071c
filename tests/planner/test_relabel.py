"""The order of shards in a group, and placements improved as a whole."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from lightning_spindle.graph import Flow
from lightning_spindle.planner.network import Network
from lightning_spindle.planner.placement import place
from lightning_spindle.planner.relabel import relabel
from lightning_spindle.planner.spindle import Reading, stage_schedule, unplaced_runs
from lightning_spindle.planner.sync import SYNC_WEIGHT
from lightning_spindle.planner.timing import PlacedRun, UnplacedRun
from lightning_spindle.planner.transfers import arranged, shares, transfer_ms, transfers_ms
from tests.planner.checking import op, problem, problems

TIMES = {4: 2.0, 8: 1.0}


def test_a_group_keeps_its_rows_where_they_are():
    """From 4 to 8 devices each of the 4 keeps half of its rows; back to 4, all of the shards left."""
    cluster = problem(op("a"), devices=8, island=4, free=False).cluster
    wide = arranged(range(8), [(1 << 20, (4, 5, 6, 7))], cluster)
    assert wide == (4, 0, 5, 1, 6, 2, 7, 3)
    assert arranged((4, 5, 6, 7), [(1 << 20, wide)], cluster) == (4, 5, 6, 7)
    half = (1 << 20) / 8
    moved_ms = 2e3 * cluster.between.seconds(half)
    assert transfer_ms(1 << 20, (4, 5, 6, 7), wide, cluster) == pytest.approx(moved_ms)


@given(st.integers(1, 16), st.data())
def test_arranging_never_moves_more(n, data):
    cluster = problem(op("a"), devices=16, island=4, free=False).cluster
    source = tuple(data.draw(st.permutations(range(16)))[: data.draw(st.integers(1, 16))])
    group = sorted(data.draw(st.permutations(range(16)))[:n])
    order = arranged(group, [(1 << 24, source)], cluster)
    assert sorted(order) == group

    def kept(devices):
        return sum(share for a, b, share in shares(source, devices) if a == b)

    assert kept(order) >= kept(group) - 1e-9


def test_relabelling_spreads_what_grows_over_islands():
    """4, then 8, then 4 devices on two islands of 4: spread evenly, no row leaves its island."""
    p = problem(op("a", 6, times=TIMES, layer_flow_bytes=1 << 28), devices=8, island=4, free=False)
    runs = [
        UnplacedRun("a", 0, 2, 4, 0.0, 4.0),
        UnplacedRun("a", 2, 4, 8, 4.0, 6.0),
        UnplacedRun("a", 4, 6, 4, 6.0, 10.0),
    ]
    placed = place(runs, p)
    assert {len({p.cluster.island(d) for d in r.devices}) for r in placed} == {2}
    inside_ms = 2e3 * p.cluster.inside.seconds((1 << 28) / 8)
    assert transfers_ms(placed, p) == pytest.approx(2 * inside_ms)


@settings(max_examples=60)
@given(problems(most_devices=8), st.randoms(use_true_random=False))
def test_relabelling_keeps_schedules_and_never_costs_more(p, rng):
    ops = tuple(replace(m, layer_flow_bytes=rng.randrange(1 << 24)) for m in p.metaops)
    flows = tuple(Flow(b, m.name, rng.randrange(1 << 24)) for m in ops for b in m.after)
    p = problem(*ops, devices=p.devices, island=2, free=False, flows=flows)
    _, schedule = stage_schedule(p, Reading())
    given_runs = [PlacedRun(r, d) for r, d in one_after_another(unplaced_runs(schedule))]
    found = relabel(given_runs, given_runs, p, steps=40, sync_weight=SYNC_WEIGHT)
    network = Network(unplaced_runs(schedule), p, SYNC_WEIGHT)
    before, after = network.start(given_runs), network.start(found)
    assert network.feasible(after)
    assert sum(network.link_ms(k, after) for k in range(len(network.links))) <= 1e-9 + sum(
        network.link_ms(k, before) for k in range(len(network.links))
    )


def one_after_another(runs):
    """Each Stage's runs on the next devices."""
    at, start_ms = 0, -1.0
    for r in sorted(runs, key=lambda r: (r.start_ms, r.metaop)):
        at, start_ms = (at if r.start_ms <= start_ms + 1e-6 else 0), r.start_ms
        yield r, tuple(range(at, at + r.n))
        at += r.n
