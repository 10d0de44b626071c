from __future__ import annotations

import math
import random

import pytest

from lightning_spindle.plan import Configuration
from lightning_spindle.planner.curves import (
    Sample,
    best_times,
    fit,
    fit_set,
    valid_allocations,
    valid_configurations,
)

BATCH_CURVE_MS = {1: 16.3, 2: 27.2, 4: 51.4, 8: 97.0, 16: 184.3}
"""Two layers, embedding and head (d 4096, sequence 2048) on an A800-like device, by batch."""


def test_public_batch_curve_within_3_percent():
    """A batch of b on one device is what 16/b devices do of a batch of 16."""
    curve = fit((16 / batch, ms) for batch, ms in BATCH_CURVE_MS.items())
    assert curve.fit_error < 0.03
    assert curve.leave_one_out_error is not None
    assert curve.leave_one_out_error < 0.05
    for batch, ms in BATCH_CURVE_MS.items():
        assert curve.time_ms(16 / batch) == pytest.approx(ms, rel=0.03)


def test_exact_curve_is_found_back():
    curve = fit((n, 2.0 + 30.0 / n) for n in (1, 2, 4, 8))
    assert curve.time_ms(3) == pytest.approx(12.0)
    assert curve.leave_one_out_error == pytest.approx(0.0, abs=1e-9)
    assert curve.scalability(8) == pytest.approx(32.0 / 5.75)
    assert len(curve.pieces) == 1


def test_two_regimes_take_two_pieces():
    """Kernels that change with the work of a device: one α-β would be 20 % off."""

    def truth(n):
        return 1.0 + 64.0 / n if n <= 8 else 7.0 + 16.0 / n

    curve = fit((n, truth(n)) for n in (1, 2, 4, 6, 8, 12, 16, 24, 32, 64))
    assert len(curve.pieces) == 2
    assert curve.fit_error < 1e-6
    assert curve.time_ms(48) == pytest.approx(truth(48))


def test_confidence_falls_with_noise():
    rng = random.Random(0)
    errors = []
    for noise in (0.0, 0.05, 0.2):
        samples = [(n, (1 + 20 / n) * (1 + noise * rng.uniform(-1, 1))) for n in (1, 2, 4, 8, 16)]
        errors.append(fit(samples).leave_one_out_error)
    assert errors == sorted(errors)


def test_repeated_samples_count_as_their_median():
    assert fit([(1, 10.0), (1, 11.0), (1, 90.0)]).time_ms(1) == pytest.approx(11.0)


def test_few_samples_have_no_confidence():
    assert fit([(1, 8.0)]).leave_one_out_error is None
    assert fit([(1, 8.0)]).time_ms(2) == pytest.approx(4.0)
    assert fit([(1, 8.0), (2, 8.0)]).time_ms(4) == pytest.approx(8.0)


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf])
def test_bad_samples_are_refused(ms):
    with pytest.raises(ValueError, match=rf"{ms} ms on 2 devices"):
        fit([(1, 1.0), (2, ms)])


def test_no_sample_is_refused():
    with pytest.raises(ValueError, match="no sample"):
        fit([])


def test_valid_allocations():
    assert valid_allocations(96, 64) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
    assert valid_allocations(7, 48) == (1, 7)
    assert valid_allocations(7, 48, True) == (1, 2, 3, 4, 5, 6, 7)
    assert valid_allocations(64, 16, tensor=(2,)) == (2, 4, 8, 16)
    assert valid_allocations(3, 16, tensor=(1, 2)) == (1, 2, 3, 6)
    assert valid_allocations(8, 16, tensor=(16,), island=8) == ()
    assert Configuration(4, 2) in valid_configurations(64, 8, tensor=(1, 2))


def test_best_configuration_for_each_n():
    """Tensor parallelism wins where data parallelism no longer scales."""
    samples = [Sample(Configuration(n), 4.0 + 8.0 / n) for n in (1, 2, 4, 8)]
    samples += [Sample(Configuration(n, 2), 1.0 + 16.0 / (2 * n)) for n in (1, 2, 4)]
    curves = fit_set(samples)
    times, configurations = best_times(curves, None, 8, valid_configurations(8, 8, tensor=(1, 2)))
    assert [n for n, _ in times] == [1, 2, 4, 8]
    assert dict(configurations) == {
        1: Configuration(1),
        2: Configuration(2),
        4: Configuration(2, 2),
        8: Configuration(4, 2),
    }
    assert dict(times)[8].total_ms == pytest.approx(3.0)


def test_ragged_shards_cost_what_the_largest_does():
    curves = fit_set(Sample(Configuration(n), 12.0 / n) for n in (1, 2, 4))
    times, _ = best_times(curves, curves, 6, valid_configurations(6, 4, any_n=True))
    assert dict(times)[4].forward_ms == pytest.approx(4.0)  # ceil(6 / 4) of 6 rows
    assert dict(times)[4].total_ms == pytest.approx(8.0)
