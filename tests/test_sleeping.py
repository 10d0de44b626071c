"""The simulator against real processes whose operators sleep."""

from datetime import timedelta

import pytest

from benchmarking.sleeping import PROCESSES, Measurement, measure_rank
from lightning_spindle.runtime.transport import world_transport
from tests.support.ranks import run_ranks


def rank_main(rank: int, size: int, steps: int) -> Measurement | None:
    return measure_rank(world_transport(timedelta(seconds=30)), steps)


@pytest.mark.slow
def test_a_simulated_iteration_of_eight_processes_is_within_10_percent_of_a_measured_one() -> None:
    """Operators of at least 100 ms; ``python -m benchmarking.sleeping`` takes more steps."""
    found = run_ranks(rank_main, PROCESSES, 2)[0]
    assert min(found.measured_s) > 1.0
    assert abs(found.difference) < 0.1
