"""Samples as data: JSON, the α-β fit, the share of cores."""

import math

import pytest

from lightning_spindle.cluster import Link
from lightning_spindle.estimate.samples import LinkSamples, Samples, fit_link
from lightning_spindle.planner.problem import LayerTime

SAMPLES = Samples(
    {"b/x": {4: LayerTime(0.1, 0.3), 8: LayerTime(1 / 3, 2 / 3)}, "a/loss": {8: LayerTime(0.25, 0.0)}},
    LinkSamples(Link(1.25e-4, 1.7e9), Link(1e-3, 1e8), {2: Link(6e-4, 1e9), 4: Link(5e-3, math.inf)}, 0.005),
    busy=4,
    cores=2,
    repeats=3,
)


@pytest.mark.parametrize("samples", [SAMPLES, Samples({})])
def test_json_round_trip_is_exact(samples: Samples) -> None:
    assert Samples.from_json(samples.to_json()) == samples


def test_json_does_not_depend_on_the_order_of_operators() -> None:
    """C23."""
    shuffled = Samples(dict(reversed(list(SAMPLES.operators.items()))), SAMPLES.links, 4, 2, 3)
    assert shuffled.to_json() == SAMPLES.to_json()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": 7}', '{"format": 1, "links": 3}'])
def test_what_holds_no_samples_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid samples"):
        Samples.from_json(text)


@pytest.mark.parametrize("time", [LayerTime(math.nan, 0.0), LayerTime(1.0, -1.0), LayerTime(math.inf, 0.0)])
def test_times_that_are_none_are_refused(time: LayerTime) -> None:
    with pytest.raises(ValueError, match="operator x took"):
        Samples({"x": {1: time}})


@pytest.mark.parametrize(
    ("busy", "cores", "factor"), [(4, 2, 0.5), (2, 2, 1.0), (1, 2, 1.0), (8, None, 1.0), (3, 1, 1 / 3)]
)
def test_time_on_a_core_of_its_own(busy: int, cores: int | None, factor: float) -> None:
    """Times four ranks on two cores; the simulator, which shares cores itself, gets them back."""
    samples = Samples({"x": {2: LayerTime(6.0, 12.0)}}, busy=busy, cores=cores)
    assert samples.alone("x") == {2: LayerTime(6.0 * factor, 12.0 * factor)}


def test_fit_finds_latency_and_rate() -> None:
    link = Link(2e-4, 1.5e9)
    fitted = fit_link([(size, link.seconds(size)) for size in (64, 65536, 4194304)])
    assert fitted.latency_s == pytest.approx(2e-4)
    assert fitted.bytes_per_s == pytest.approx(1.5e9)


def test_fit_stays_in_what_a_link_can_be() -> None:
    assert fit_link([(64.0, 1e-3), (4e6, 1e-3)]) == Link(1e-3, math.inf)
    assert fit_link([(64.0, 2e-3), (4e6, 1e-3)]).bytes_per_s == math.inf
    superlinear = fit_link([(1e3, 1e-6), (1e6, 1e-2)])
    assert superlinear.latency_s == 0.0
    assert math.isfinite(superlinear.bytes_per_s)
    with pytest.raises(ValueError, match="no α-β model"):
        fit_link([])
