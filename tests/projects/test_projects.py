"""Projects in the style of Lightning's documentation: only ``strategy=`` is changed; equal to one process."""

from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_script

HERE = Path(__file__).parent


def trained(project: str, strategy: str, devices: int, folder: Path) -> dict:
    result = folder / f"{strategy}{devices}.pt"
    run_script(HERE / project, [strategy, str(devices), str(result)], timeout_s=180, cwd=folder).check()
    return torch.load(result)


@pytest.mark.parametrize("project", ["dict_batch.py"])
def test_only_the_strategy_changes(project: str, tmp_path: Path) -> None:
    plain = trained(project, "auto", 1, tmp_path)
    ours = trained(project, "spindle", 2, tmp_path)
    assert len(ours["losses"]) == len(plain["losses"]) > 10
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-9)
    assert ours["metrics"] == pytest.approx(plain["metrics"], rel=1e-9)
    assert plain["losses"][-1] < 0.8 * plain["losses"][0]
    assert ours["weights"].keys() == plain["weights"].keys()
    for name, value in ours["weights"].items():
        torch.testing.assert_close(value, plain["weights"][name], rtol=1e-9, atol=1e-9)
