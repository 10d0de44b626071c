"""Projects in the style of Lightning's documentation: only ``strategy=`` is changed; equal to one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.projects import dict_batch
from tests.support.ranks import run_ranks
from tests.support.scripts import run_script


def trained(strategy: str, devices: int, result: Path) -> dict[str, Any]:
    """By the project's own ``main``, in forked processes."""
    arguments = (strategy, str(devices), str(result))
    run_ranks(lambda rank, size: dict_batch.main(*arguments), devices, timeout_s=120, init_group=False)
    return torch.load(result)


def test_only_the_strategy_changes(tmp_path: Path) -> None:
    """The project's script, launched on 2 processes, and what it does on 4 as in one."""
    result = tmp_path / "launched.pt"
    run_script(dict_batch.__file__, ["spindle", "2", str(result)], timeout_s=180, cwd=tmp_path).check()
    plain = trained("auto", 1, tmp_path / "plain.pt")
    assert_same(torch.load(result), plain)
    assert_same(trained("spindle", 4, tmp_path / "four.pt"), plain)


def assert_same(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    assert len(ours["losses"]) == len(plain["losses"]) > 10
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-9)
    assert ours["metrics"] == pytest.approx(plain["metrics"], rel=1e-9)
    assert plain["losses"][-1] < 0.8 * plain["losses"][0]
    assert ours["weights"].keys() == plain["weights"].keys()
    for name, value in ours["weights"].items():
        torch.testing.assert_close(value, plain["weights"][name], rtol=1e-9, atol=1e-9)
