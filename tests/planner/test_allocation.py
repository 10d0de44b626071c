from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lightning_spindle.graph import Layout
from lightning_spindle.planner.allocation import (
    ASLTuple,
    Demand,
    Envelope,
    Interpolation,
    allocate,
    continuous_optimum,
    discretise,
    envelope,
    inverse,
    round_layers,
)
from tests.planner.checking import curves, op

FIGURE_5A = Envelope((1, 2), (7.0, 3.0))
"""MetaOp 2 of figure 5a: T(2)/T(1) = 3/7."""


def test_figure_5a_discretises_by_time():
    """n* = 1.5 and L = 12 are 8.4 layers on 2 devices and 3.6 on 1, rounded to 8 and 4."""
    speed = 0.5 / 7 + 0.5 / 3
    c_star_ms = 12 / speed
    assert inverse(FIGURE_5A, c_star_ms / 12, Interpolation.SPEED).n == pytest.approx(1.5)
    demand = Demand("m2", 12, FIGURE_5A)
    exact = discretise(demand, c_star_ms, Interpolation.SPEED)
    assert [(t.n, pytest.approx(t.layers)) for t in exact] == [(2, 8.4), (1, 3.6)]
    assert [t.layers * FIGURE_5A.time_ms(t.n) for t in exact] == pytest.approx([c_star_ms / 2] * 2)
    assert round_layers(exact) == (ASLTuple(2, 8), ASLTuple(1, 4))


def test_figure_5a_under_equation_11():
    """Linear in T, n* = 1.5 is half of the layers on each."""
    c_star_ms = 12 * 5.0
    assert inverse(FIGURE_5A, 5.0, Interpolation.TIME).n == pytest.approx(1.5)
    exact = discretise(Demand("m2", 12, FIGURE_5A), c_star_ms, Interpolation.TIME)
    assert [(t.n, pytest.approx(t.layers)) for t in exact] == [(2, 6.0), (1, 6.0)]


def test_dummy_allocation_keeps_all_layers():
    """n* < 1 (MetaOp 3 of figure 5a): one device, idle for the rest of C*."""
    demand = Demand("m3", 4, Envelope((1, 2), (1.0, 0.6)))
    assert inverse(demand.envelope, 8.0 / 4, Interpolation.SPEED).n == pytest.approx(0.5)
    assert discretise(demand, 8.0, Interpolation.SPEED) == (ASLTuple(1, 4.0),)


def test_envelope_leaves_out_what_is_no_faster():
    times = {1: 4.0, 2: 5.0, 3: 3.0, 4: 3.0, 8: 1.0}
    assert envelope(op("m", times=times), 4) == Envelope((1, 3), (4.0, 3.0))


@pytest.mark.parametrize("more", [{"layout": Layout.WHOLE}, {"pin": "buffer"}])
def test_what_must_run_on_one_device_does(more):
    assert envelope(op("m", times={1: 4.0, 2: 2.0}, **more), 4).allocations == (1,)


def test_devices_that_nobody_can_use_stay_idle():
    optimum = continuous_optimum([Demand("m", 3, Envelope((1, 2), (4.0, 2.0)))], 16)
    assert optimum.c_star_ms == pytest.approx(6.0)
    assert optimum.allocations == (2,)


@st.composite
def levels(draw) -> tuple[list[Demand], int]:
    devices = draw(st.integers(1, 32))
    count = draw(st.integers(1, 8))
    demands = [
        Demand(f"m{i}", draw(st.integers(1, 40)), envelope(op(f"m{i}", times=draw(curves(devices))), devices))
        for i in range(count)
    ]
    return demands, devices


@given(levels(), st.sampled_from(Interpolation))
def test_theorem_1(level, interpolation):
    """All end together at C*, and fill the devices unless each has its largest allocation."""
    demands, devices = level
    optimum = continuous_optimum(demands, devices, interpolation)
    total = sum(optimum.allocations)
    assert total <= devices * (1 + 1e-9)
    slowest = max(d.envelope.times_ms[-1] * d.layers for d in demands)
    assert total == pytest.approx(devices, rel=1e-6) or optimum.c_star_ms == pytest.approx(slowest)
    assert optimum.c_star_ms >= slowest * (1 - 1e-9)


@given(levels(), st.sampled_from(Interpolation))
def test_conditions_10a_and_10b(level, interpolation):
    demands, devices = level
    c_star_ms = continuous_optimum(demands, devices, interpolation).c_star_ms
    for demand in demands:
        tuples = discretise(demand, c_star_ms, interpolation)
        assert len(tuples) <= 2
        assert sum(t.layers for t in tuples) == pytest.approx(demand.layers)  # (10a)
        assert all(t.n in demand.envelope.allocations for t in tuples)
        time_ms = sum(t.layers * demand.envelope.time_ms(t.n) for t in tuples)
        dummy = tuples[0].n == demand.envelope.allocations[0] and len(tuples) == 1
        largest = tuples[0].n == demand.envelope.allocations[-1] and len(tuples) == 1
        if dummy or largest:
            assert time_ms <= c_star_ms * (1 + 1e-6)
        else:
            assert time_ms == pytest.approx(c_star_ms, rel=1e-6)  # (10b)
            curve = demand.envelope.allocations
            assert curve.index(tuples[0].n) == curve.index(tuples[1].n) + 1


@given(levels(), st.sampled_from(Interpolation))
def test_rounding_keeps_10a_and_moves_less_than_a_layer(level, interpolation):
    demands, devices = level
    plan = allocate(demands, devices, interpolation)
    for demand, (name, tuples) in zip(demands, plan.tuples, strict=True):
        assert name == demand.name
        assert sum(t.layers for t in tuples) == demand.layers
        assert all(isinstance(t.layers, int) and t.layers > 0 for t in tuples)
        exact = {t.n: t.layers for t in discretise(demand, plan.c_star_ms, interpolation)}
        for t in tuples:
            assert abs(t.layers - exact[t.n]) <= 0.5 + 1e-9


def test_a_wider_cluster_is_never_slower():
    demands = [Demand(f"m{i}", 3 + i, Envelope((1, 2, 4), (9.0, 5.0, 3.0))) for i in range(5)]
    times = [continuous_optimum(demands, n).c_star_ms for n in range(1, 21)]
    assert times == sorted(times, reverse=True)
