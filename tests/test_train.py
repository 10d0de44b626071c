"""``train.py`` and ``conf/``: every experiment composes and runs a step; results and comparison."""

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import train
from tasks.build import build_data
from tests.support.scripts import ROOT, run_script
from tests.support.workloads import SCHEDULE

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
PLAIN = ("trainer.strategy=single", "trainer.devices=1", "trainer.enable_progress_bar=false")


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_container(compose("config", list(overrides)), resolve=True)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_runs_a_step(experiment: str, tmp_path: Path) -> None:
    config = composed(f"experiment={experiment}", "trainer.max_steps=1", *PLAIN)
    train.train(config, tmp_path)
    results = json.loads((tmp_path / train.RESULTS).read_text())
    assert results["strategy"] == "single"
    assert results["ranks"] == 1
    assert set(results["accuracy"]) == set(results["loss"]) == set(config["tasks"])
    assert all(len(losses) == 1 for losses in results["loss"].values())
    assert list((tmp_path / "checkpoints").glob("*.ckpt"))
    assert "image_text/accuracy" in (tmp_path / "logs" / "metrics.csv").read_text()


@pytest.mark.parametrize(
    ("workload", "tasks", "last"),
    [
        ("multitask_clip", 5, "vision_text"),
        ("ofasys", 2, "speech_recognition"),
        ("qwen_val", 1, "vision_language"),
    ],
)
def test_every_workload_runs_a_step(workload: str, tasks: int, last: str, tmp_path: Path) -> None:
    config = composed(f"workload={workload}", f"workload.tasks={tasks}", "trainer.max_steps=1", *PLAIN)
    assert config["optimization"]["lr"] == 1e-3
    train.train(config, tmp_path)
    results = json.loads((tmp_path / train.RESULTS).read_text())
    assert results["accuracy"] == {}
    assert [len(losses) for losses in results["loss"].values()] == [1] * tasks
    assert list(results["loss"])[-1] == last


@pytest.mark.parametrize("tasks", sorted(path.stem for path in (ROOT / "conf" / "tasks").glob("*.yaml")))
def test_every_task_set_can_be_built(tasks: str) -> None:
    config = composed(f"tasks={tasks}", "model=tiny")
    model, _ = train.build(config, train.AdamWSchedule(**config["optimization"], total=10))
    assert list(model.tasks) == list(config["tasks"])


def test_only_known_strategies_tasks_and_shares() -> None:
    with pytest.raises(ValueError, match=r"trainer\.strategy=dp is none of single, ddp, spindle"):
        train.strategy_of("dp", 1, {})
    with pytest.raises(ValueError, match=r"single is one process; trainer\.devices=2"):
        train.strategy_of("single", 2, {})
    with pytest.raises(ValueError, match=r"there is no task 'video'"):
        build_data({"video": {"batch_size": 4}})
    with pytest.raises(ValueError, match="task 'image_text': 6 rows cannot be shared equally by 4"):
        build_data({"image_text": {"batch_size": 6}}, shards=4)
    with pytest.raises(ValueError, match="workload ofasys: its losses are of whole batches, not of shards"):
        train.build(composed("workload=ofasys"), SCHEDULE, shards=2)
    with pytest.raises(ValueError, match=r"workload\.tasks=9: there are 1 to 7"):
        train.build(composed("workload=ofasys", "workload.tasks=9"), SCHEDULE)


@pytest.mark.parametrize(
    ("many", "ranks", "good"),
    [(0.96, 4, True), (0.97, 4, False), (0.96, 1, False)],
    ids=["equal", "differs", "one rank only"],
)
def test_comparison_demands_equal_accuracies_and_live_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, many: float, ranks: int, good: bool
) -> None:
    def launch(directory: Path, overrides: list[str]) -> dict[str, Any]:
        alone = "trainer.strategy=single" in overrides
        accuracy = dict.fromkeys(config["tasks"], 0.96 if alone else many)
        return {"accuracy": accuracy, "ranks": 1 if alone else ranks, "seconds": 1.0}

    config = composed("experiment=quickstart")
    monkeypatch.setattr(train, "_launch", launch)
    assert train.compare(config, tmp_path, ["experiment=quickstart"]) is good
    assert capsys.readouterr().out.count("image_text") == 1
    config["minimum"]["image_text"] = 0.99
    assert not train.compare(config, tmp_path, ["experiment=quickstart"])


def test_a_workload_has_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compare: workload ofasys has no accuracies"):
        train.compare(composed("workload=ofasys", "compare=true"), tmp_path, [])


@pytest.mark.scripts
def test_ranks_of_a_launched_run_share_its_directory(tmp_path: Path) -> None:
    options = [
        "experiment=quickstart_test",
        "tasks=motion",
        "trainer.max_steps=2",
        "trainer.strategy=ddp",
        "trainer.devices=2",
    ]
    folder = tmp_path / "of time, 12:00"
    run_script(ROOT / "train.py", [*options, f"hydra.run.dir='{folder}'"], cwd=tmp_path).check()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert json.loads((folder / train.RESULTS).read_text())["ranks"] == 2
    assert len(list(folder.glob("*.log"))) == 2
