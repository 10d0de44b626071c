from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spindle.planner.allocation import AllocationPlan, ASLTuple, Demand, Envelope, allocate
from lightning_spindle.planner.scheduling import Extension, merge_levels, schedule_level
from tests.planner.test_allocation import levels

LINEAR = Envelope((1, 2, 4, 8), (8.0, 4.0, 2.0, 1.0))


def schedule(tuples, curves, devices, **more):
    demands = [Demand(m, sum(int(t.layers) for t in ts), curves[m]) for m, ts in tuples.items()]
    return schedule_level(AllocationPlan(0.0, tuple(tuples.items())), demands, devices, **more)


def test_a_tuple_that_fills_the_devices_is_a_stage_of_its_own():
    """Stage 1 of figure 5b; the other tuple of the same MetaOp waits (constraint 6)."""
    tuples = {"m1": (ASLTuple(8, 2), ASLTuple(4, 3)), "m2": (ASLTuple(4, 6),)}
    stages = schedule(tuples, {"m1": LINEAR, "m2": LINEAR}, 8).stages
    assert [(s.metaop, s.n, s.last - s.first) for s in stages[0].slices] == [("m1", 8, 2)]
    assert [(s.metaop, s.n) for s in stages[1].slices] == [("m2", 4), ("m1", 4)]


def test_longer_tuples_are_dissected_to_the_shortest():
    """Stage 2 of figure 5b: 1 of 9, 2 of 14 and all 3 layers run; the rest waits."""
    curves = {"m1": Envelope((4,), (3.0,)), "m2": Envelope((2,), (1.5,)), "m4": Envelope((2,), (1.0,))}
    tuples = {"m1": (ASLTuple(4, 9),), "m2": (ASLTuple(2, 14),), "m4": (ASLTuple(2, 3),)}
    stage = schedule(tuples, curves, 8).stages[0]
    assert {s.metaop: s.last - s.first for s in stage.slices} == {"m1": 1, "m2": 2, "m4": 3}
    assert stage.end_ms == 3.0


def test_a_stage_is_at_least_as_long_as_its_longest_layer():
    """One slow layer beside short tuples: the others fill its time instead of waiting for it."""
    curves = {
        "slow": Envelope((1,), (10.0,)),
        "short": Envelope((1,), (1.0,)),
        "long": Envelope((1,), (2.0,)),
    }
    tuples = {"slow": (ASLTuple(1, 3),), "short": (ASLTuple(1, 2),), "long": (ASLTuple(1, 9),)}
    stage = schedule(tuples, curves, 3).stages[0]
    assert {s.metaop: s.last - s.first for s in stage.slices} == {"slow": 1, "short": 2, "long": 5}


def test_idle_devices_go_to_the_most_remaining_time():
    """Stage 4 of figure 5b: the last MetaOps are extended until the devices are used."""
    curves = {"long": LINEAR, "short": LINEAR}
    tuples = {"long": (ASLTuple(1, 8),), "short": (ASLTuple(1, 2),)}
    slices = schedule(tuples, curves, 4).stages[0].slices
    # long first; on 4 devices it would need one more than is left, which short takes
    assert {s.metaop: s.n for s in slices} == {"long": 2, "short": 2}
    assert {s.n for s in schedule(tuples, curves, 3).stages[0].slices} == {2, 1}
    assert {s.n for s in schedule(tuples, curves, 4, extension=Extension.NONE).stages[0].slices} == {1}


def test_join_lets_waiting_metaops_in():
    curves = {"a": Envelope((3,), (1.0,)), "b": Envelope((1, 2), (4.0, 2.0))}
    tuples = {"a": (ASLTuple(3, 4),), "b": (ASLTuple(2, 2),)}
    alone = schedule(tuples, curves, 4).stages[0]
    joined = schedule(tuples, curves, 4, extension=Extension.JOIN).stages[0]
    assert len(alone.slices) == 1
    assert {(s.metaop, s.n) for s in joined.slices} == {("a", 3), ("b", 1)}


def test_pinned_metaops_are_never_in_one_stage():
    one = Envelope((1,), (1.0,))
    tuples = {m: (ASLTuple(1, 2),) for m in "abc"}
    for extension in Extension:
        pins = {"a": "buffer", "b": "buffer"}
        for stage in schedule(tuples, dict.fromkeys("abc", one), 4, pins=pins, extension=extension).stages:
            assert sum(s.metaop in pins for s in stage.slices) <= 1


@given(levels(), st.sampled_from(Extension))
def test_every_layer_once_in_order_within_the_devices(level, extension):
    demands, devices = level
    result = schedule_level(allocate(demands, devices), demands, devices, start_ms=5.0, extension=extension)
    at = {d.name: 0 for d in demands}
    now_ms = 5.0
    for stage in result.stages:
        assert stage.start_ms == now_ms
        assert len({s.metaop for s in stage.slices}) == len(stage.slices)
        assert sum(s.n for s in stage.slices) <= devices
        for s in stage.slices:
            assert s.first == at[s.metaop] < s.last
            at[s.metaop] = s.last
            curve = next(d.envelope for d in demands if d.name == s.metaop)
            assert s.end_ms - s.start_ms == pytest.approx(curve.time_ms(s.n) * (s.last - s.first))
        assert stage.end_ms == max(s.end_ms for s in stage.slices)
        now_ms = stage.end_ms
    assert at == {d.name: d.layers for d in demands}
    assert result.end_ms == now_ms


def test_levels_follow_each_other():
    first = schedule({"a": (ASLTuple(1, 2),)}, {"a": LINEAR}, 1)
    second = schedule({"b": (ASLTuple(1, 1),)}, {"b": LINEAR}, 1, start_ms=first.end_ms)
    merged = merge_levels([first, second])
    assert [s.start_ms for s in merged.stages] == [0.0, 16.0]
    assert merged.end_ms == 24.0
