"""Runs that are expected to fail: every rank ends in time, with one clear error."""

import re
from collections.abc import Callable
from typing import Any

from lightning_spindle.strategy import SpindleStrategy
from tests.support import toys
from tests.support.fitting import fit_once
from tests.support.ranks import RankOutcome, watch_ranks

LIMIT_S = 30.0


def watch_fit(
    size: int,
    make_model: Callable[[int], Any] = lambda rank: toys.model(),
    make_data: Callable[[int], Any] = lambda rank: toys.data(),
    strategy: Callable[[int], dict[str, Any]] = lambda rank: {},
    options: Callable[[int], dict[str, Any]] = lambda rank: {},
) -> tuple[RankOutcome, ...]:
    """A fit of a few steps on ``size`` ranks, each argument by rank; nobody is stopped before the limit."""

    def body(rank: int, size: int) -> str:
        quick = {"profile_budget_s": 0.2, "planner": "spindle", "timeline": False}
        settings = {"max_steps": 4, **options(rank)}
        fit_once(
            lambda: make_model(rank),
            lambda: make_data(rank),
            SpindleStrategy(**{**quick, **strategy(rank)}),
            **{"devices": size, **settings},
        )
        return "ended well"

    return watch_ranks(body, size, timeout_s=LIMIT_S + 10, group_timeout_s=60, init_group=size > 1)


def assert_refused(outcomes: tuple[RankOutcome, ...], kind: str, *parts: str) -> None:
    """Every rank raised an exception of the kind within the limit; its message has all the parts."""
    for outcome in outcomes:
        assert outcome.error is not None, outcome.describe()
        assert outcome.seconds < LIMIT_S, outcome.describe()
        assert outcome.error.startswith(kind), outcome.describe()
        for part in parts:
            assert re.search(part, outcome.error), f"{part!r} is not in: {outcome.describe()}"


def assert_all_ended(outcomes: tuple[RankOutcome, ...], *parts: str) -> None:
    """Every rank ended by an error within the limit; each says what the first one's was."""
    for outcome in outcomes:
        assert not outcome.hung, outcome.describe()
        assert outcome.seconds < LIMIT_S, outcome.describe()
        assert outcome.error is not None, outcome.describe()
        for part in parts:
            assert re.search(part, outcome.error), f"{part!r} is not in: {outcome.describe()}"
