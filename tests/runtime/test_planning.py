"""How the strategy plans on rank 0."""

from typing import Any

import pytest
import torch

from lightning_spindle.planner import search
from lightning_spindle.planner.choice import TIME_LIMIT_S
from lightning_spindle.runtime.planning import Planner
from lightning_spindle.runtime.transport import LocalTransport
from tests.planner.test_choice import workload


@pytest.mark.parametrize("name", ["search", "auto"])
def test_search_is_one_planner_whether_named_or_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its finalists are judged by simulated iteration, within the same limit."""
    asked: list[Any] = []
    own = search.plan_search

    def watched(problem: Any, **options: Any) -> Any:
        asked.append(options)
        return own(problem, **options)

    monkeypatch.setattr(search, "plan_search", watched)
    work, problem = workload([(3, 4.0), (2, 9.0)])
    planner = Planner(name, None, 0.0, LocalTransport(), torch.device("cpu"), 4, False, None, False)
    planner._plan(problem, work)
    assert [(one["score"], one["time_limit_s"]) for one in asked] == [(work.iteration_ms, TIME_LIMIT_S)]
