"""``benchmark.py``: shards and the loss over them, failing jobs, what is computed, a tiny run of it all."""

import copy
import csv
import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from torch import Tensor
from torch.utils.data import BatchSampler, SequentialSampler

import benchmark
from benchmarking import measured
from benchmarking.job import fit
from benchmarking.jobs import Job, jobs_of
from benchmarking.launch import JobFailed, run_job
from benchmarking.results import Row, Spread, largest_difference, ratio, read_rows
from datamodules.sharded import Sharded, ShardedBatches, shard
from lightning_spindle import tasklog
from lightning_spindle.planner import PLANNERS
from tasks.build import ModelSize, build_data, build_model
from tasks.global_batch import couple_globally
from tasks.optimizers import AdamWSchedule
from tests.support.ranks import RankError, run_ranks
from tests.support.scripts import ROOT, run_script
from tests.support.workloads import composed, data_of, model_of, size_of

SIZE = ModelSize(width=16, layers=1, heads=2, mlp_ratio=2, embedding=8, dropout=0.0, patch=4, frames=5)
ROWS = {"image_text": {"batch_size": 7}, "audio_text": {"batch_size": 5}}


# ------------------------------------------------------------------------------------------------ shards
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_partition_each_global_batch(ranks: int) -> None:
    batches = BatchSampler(SequentialSampler(range(25)), batch_size=7, drop_last=False)
    shards = [list(ShardedBatches(batches, rank, ranks)) for rank in range(ranks)]
    assert [[i for part in parts for i in part] for parts in zip(*shards, strict=True)] == list(batches)
    assert {len(ShardedBatches(batches, rank, ranks)) for rank in range(ranks)} == {4}
    sizes = [[len(batch) for batch in own] for own in shards]
    assert all(max(part) - min(part) <= 1 for part in zip(*sizes, strict=True))


def test_a_batch_with_fewer_rows_than_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 2 rows cannot be shared by 3 processes"):
        shard([4, 5], 0, 3)


class Ranks:
    """What a datamodule asks of its trainer."""

    def __init__(self, global_rank: int, world_size: int) -> None:
        self.global_rank, self.world_size = global_rank, world_size


def test_sharded_loaders_draw_the_batches_of_one_process() -> None:
    whole = build_data(ROWS).datamodules["audio_text"]
    parts = []
    for rank in range(3):
        sharded = Sharded(whole)
        sharded.trainer = Ranks(rank, 3)
        sharded.setup("fit")
        torch.manual_seed(3)
        parts.append([batch["label"] for batch in sharded.train_dataloader()])
    torch.manual_seed(3)
    for batch, *own in zip(whole.train_dataloader(), *parts, strict=True):
        assert torch.equal(batch["label"], torch.cat(own))


# -------------------------------------------------------------------------------------- loss over shards
def model_and_batches(workload: str) -> tuple[Any, dict[str, dict[str, Tensor]]]:
    if workload == "quickstart":
        data = build_data(ROWS)
        data.setup("fit")
        torch.manual_seed(0)
        model = build_model(data, SIZE, AdamWSchedule(lr=1e-3, weight_decay=0.1, warmup=2, total=10)).double()
    else:
        size = size_of(workload, "small")
        data, model = data_of(size, 2), model_of(size, 2).double()
    batches = {name: next(iter(child.train_dataloader())) for name, child in data.datamodules.items()}
    return model, {
        name: {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        for name, batch in batches.items()
    }


def loss_and_gradients(model: Any, batches: Any) -> tuple[Tensor, dict[str, Tensor]]:
    with tasklog.sink(lambda *_: None):
        loss = model.training_step(batches, 0)["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("workload", "ranks"),
    [("quickstart", 2), ("quickstart", 3), ("multitask_clip", 3), ("ofasys", 3), ("qwen_val", 2)],
)
def test_mean_of_shards_gradients_is_one_process_s(workload: str, ranks: int) -> None:
    """Uneven shards, with other numbers of tokens; the loss and every gradient, in float64."""
    model, batches = model_and_batches(workload)

    def data_parallel(rank: int, world: int) -> tuple[Tensor, dict[str, Tensor]]:
        own = copy.deepcopy(model)
        couple_globally(own.tasks, {name: -(-len(b["label"]) // world) for name, b in batches.items()})
        part = {
            name: {k: v[shard(range(len(v)), rank, world)] for k, v in batch.items()}
            for name, batch in batches.items()
        }
        loss, gradients = loss_and_gradients(own, part)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= world
        return loss, gradients

    found = run_ranks(data_parallel, ranks)
    expected_loss, expected = loss_and_gradients(copy.deepcopy(model), batches)
    for loss, gradients in found:
        torch.testing.assert_close(loss, expected_loss, rtol=1e-9, atol=1e-9)
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


# -------------------------------------------------------------------------------------------------- jobs
def test_systems_take_turns_where_they_can_run() -> None:
    config = composed()
    jobs = jobs_of(["plain", "spindle", "spindle:search", "ddp"], [1, 2], 2, config["system"])
    once = [
        ("plain", 1),
        ("spindle", 1),
        ("spindle:search", 1),
        ("spindle", 2),
        ("spindle:search", 2),
        ("ddp", 2),
    ]
    assert [(job.system, job.processes) for job in jobs] == once * 2
    assert [job.repeat for job in jobs] == [0] * len(once) + [1] * len(once)
    assert len({job.folder for job in jobs}) == len(jobs)
    assert [measured.job_config(job, config)["planner"] for job in jobs[:3]] == ["", "auto", "search"]
    seq = composed("planner=seq")
    assert [measured.job_config(job, seq)["planner"] for job in jobs[:3]] == ["", "seq", "search"]
    sharded = composed("shard_optimizer_state=true")
    options = [measured.job_config(job, sharded)["options"] for job in jobs[:2]]
    assert ["shard_optimizer_state" in given for given in options] == [False, True]
    assert options[1]["shard_optimizer_state"]


def test_only_known_systems_and_sensible_counts() -> None:
    known = composed()["system"]
    with pytest.raises(ValueError, match="there is no system 'fsdp'; there are plain, spindle, ddp"):
        jobs_of(["fsdp"], [1], 1, known)
    with pytest.raises(ValueError, match="system 'ddp:search': ddp has no planner"):
        jobs_of(["ddp:search"], [2], 1, known)
    with pytest.raises(ValueError, match=r"no system of \['plain'\] runs on any of \[2, 4\] processes"):
        jobs_of(["plain"], [2, 4], 1, known)
    with pytest.raises(ValueError, match=r"same_losses\.steps=5: a job has 4 steps"):
        measured.require_steps(composed("steps=3", "warmup=1"))
    with pytest.raises(ValueError, match="steps and repeats are at least 1"):
        measured.require_steps(composed("repeats=0"))


def test_the_workload_is_that_of_the_experiment_and_can_be_cut() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        experiment = compose("config", ["experiment=benchmark"])
    config = composed("workload.tasks=2")
    assert (config["tasks"], config["model"]) == (experiment["tasks"], experiment["model"])
    job = measured.job_config(Job("spindle", 2, 0), config)
    assert list(job["tasks"]) == list(config["tasks"])[:2]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["workload.tasks=4"], "ValueError: workload.tasks=4: there are 1 to 3"),
        (["workload.tasks=0"], "ValueError: workload.tasks=0: there are 1 to 3"),
        (["workload.size=small"], "ValueError: workload.size=small: quickstart has no sizes"),
        (["workload=qwen_val", "workload.tasks=4"], "ValueError: workload.tasks=4: there are 1 to 3"),
        (["workload=ofasys", "workload.size=tiny"], "ValueError: workload.size=tiny: ofasys has full"),
        (["systems=[foo]"], "ValueError: there is no system 'foo'; there are plain, "),
        (["seed=foo", "steps=foo"], "TypeError"),
        (["planner.time_limit_s=9"], "ValueError: planner.time_limit_s=9: SpindleStrategy, and so"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_leaves_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    """Before anything is launched."""

    def launched(*_: Any) -> None:
        raise JobFailed("was launched")

    monkeypatch.setattr(measured, "run_job", launched)
    config = composed("mode=measured", *overrides)
    assert not benchmark.attempt(config, tmp_path, tmp_path / "results.csv")
    (row,) = read_rows(tmp_path / "results.csv", Row)
    assert row.error.startswith(message)
    assert row.processes == 0
    assert message in (tmp_path / "report.md").read_text()


def command(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import json, os, subprocess, sys, time; {code}")


def test_a_job_inherits_no_launch_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftovers = (
        "LOCAL_RANK",
        "WORLD_SIZE",
        "NODE_RANK",
        "MASTER_PORT",
        "PL_GLOBAL_SEED",
        "TORCHELASTIC_RUN_ID",
    )
    for name in leftovers:
        monkeypatch.setenv(name, "1")
    code = "json.dump(dict(os.environ), open(sys.argv[1] + '/result.json', 'w'))"
    seen = run_job({}, tmp_path / "job", 60, command(code))
    assert not set(leftovers) & set(seen)
    assert seen["OMP_NUM_THREADS"] == "1"
    assert seen["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ValueError('no such thing')", "ValueError: no such thing"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("print('a last word')", "exit code 0: a last word"),
    ],
)
def test_a_job_that_ends_without_a_result_says_why(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(JobFailed, match=message):
        run_job({}, tmp_path / "job", 60, command(code))


def test_a_job_that_hangs_is_ended_with_its_ranks(tmp_path: Path) -> None:
    child = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"
    code = f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    with pytest.raises(JobFailed, match="not done after 2 s"):
        run_job({}, tmp_path / "job", 2, command(code))
    rank = Path("/proc") / (tmp_path / "job" / "log.txt").read_text().strip()
    limit = time.monotonic() + 5
    while running(rank) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not running(rank)


def running(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --------------------------------------------------------------------------------------------- what is found
LOSSES = {"image_text": [3.0, 2.5, 2.0], "audio_text": [2.0, 1.5, 0.5]}


def result(job: dict[str, Any]) -> dict[str, Any]:
    """A job's result without a job: each process more takes 10 ms more, DDP 40 ms more than others."""
    return {
        "live_ranks": job["processes"],
        "step_ms": 100.0 + 10 * job["processes"] + 40 * (job["strategy"] == "ddp"),
        "predicted_ms": 90.0 if job["plans"] else None,
        "losses": copy.deepcopy(LOSSES),
    }


def measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, *overrides: str
) -> tuple[bool, list[dict[str, str]], str]:
    """Whether all was well, the rows, the report; ``spoil(job, result)`` changes the jobs' results."""

    def run(job: dict[str, Any], folder: Path, timeout_s: float) -> dict[str, Any]:
        found = result(job)
        spoil(job, found)
        return found

    monkeypatch.setattr(measured, "run_job", run)
    config = composed(
        "processes=[1,2]", "repeats=2", "steps=2", "warmup=1", "same_losses.steps=3", *overrides
    )
    good = benchmark.measured(config, tmp_path, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open() as file:
        return good, list(csv.DictReader(file)), (tmp_path / "report.md").read_text()


def test_ratios_of_step_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, rows, text = measurement(tmp_path, monkeypatch, lambda job, found: None)
    assert good
    assert [row["live_ranks"] for row in rows] == ["1", "1", "2", "2"] * 2
    assert "FAILED" not in text
    assert "Losses of the first 3 steps agree" in text
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    assert ["spindle over plain (target: at most 1.05)", "1", "1.000"] in cells
    assert ["ddp over spindle", "2", f"{160 / 120:.3f}"] in cells
    assert [cell[4] for cell in cells if cell[0] == "spindle"] == ["90.0", "90.0"]


def test_a_failed_job_leaves_its_row_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(job: dict[str, Any], found: dict[str, Any]) -> None:
        if job["strategy"] == "ddp":
            raise JobFailed("RuntimeError: no more ports")

    good, rows, text = measurement(tmp_path, monkeypatch, spoil)
    assert not good
    assert [row["error"] for row in rows] == ["", "", "", "RuntimeError: no more ports"] * 2
    assert rows[3]["step_ms"] == rows[3]["live_ranks"] == ""
    assert "FAILED ddp, 2 processes, repeat 0: RuntimeError: no more ports" in text
    assert "ddp over" not in text


def test_other_losses_are_an_error_and_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(job: dict[str, Any], found: dict[str, Any]) -> None:
        found["losses"]["audio_text"][2] += 3e-5 if job["strategy"] == "ddp" else 3e-6

    good, rows, text = measurement(tmp_path, monkeypatch, spoil)
    assert not good
    assert [bool(row["error"]) for row in rows] == [False, False, False, True] * 2
    assert "losses differ from those of plain on 1 process, repeat 0 by 2.7e-05" in rows[3]["error"]
    assert rows[3]["step_ms"] == ""
    assert "ddp over" not in text


def test_other_ranks_than_asked_for_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, rows, _ = measurement(tmp_path, monkeypatch, lambda job, found: found.update(live_ranks=1))
    assert not good
    assert [row["error"] for row in rows] == ["", "", *["1 ranks answered, not 2"] * 2] * 2


def test_one_system_alone_claims_no_agreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, _, text = measurement(tmp_path, monkeypatch, lambda job, found: None, "systems=[plain]")
    assert good
    assert "compared with no other's" in text
    assert "agree" not in text


def test_differences_of_losses() -> None:
    def differing(**losses: list[float]) -> float:
        return largest_difference({**LOSSES, **losses}, LOSSES, 2)

    assert differing() == 0.0
    assert differing(image_text=[3.0, 2.5 + 1e-3, 7.0]) == pytest.approx(1e-3 / 2.5)
    assert differing(audio_text=[2.0]) == differing(image_text=[3.0, float("nan")]) == float("inf")
    assert differing(video_text=[1.0, 1.0]) == float("inf")
    assert largest_difference({}, {}, 2) == float("inf")


def test_ratios_pair_repeats() -> None:
    def rows(*times: float) -> list[Row]:
        given = dict.fromkeys(Row.__dataclass_fields__)
        return [
            Row(**{**given, "repeat": i, "step_ms": time, "error": "" if time else "none"})
            for i, time in enumerate(times)
        ]

    assert ratio(rows(2.0, 6.0, 4.0, 9.0), rows(1.0, 2.0, 4.0, 0.0)) == Spread(2.0, 1.0, 3.0)
    assert ratio(rows(1.0), rows(0.0)) is None


def test_a_report_without_a_good_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(job: dict[str, Any], found: dict[str, Any]) -> None:
        raise JobFailed("exit code 1")

    _, rows, text = measurement(tmp_path, monkeypatch, spoil)
    assert all(row["error"] == "exit code 1" for row in rows)
    assert "No job ended well" in text


# ------------------------------------------------------------------------------------------------ all of it
TINY = ["model=tiny", "repeats=1", "steps=2", "warmup=1", "same_losses.steps=3"]
TINY += ["system.spindle.options.profile_budget_s=1"]


def fitted(system: str, processes: int, folder: Path) -> dict[str, Any]:
    """A job's result, on forked ranks."""
    described = measured.job_config(Job(system, processes, 0), composed(*TINY))
    folder.mkdir()
    ranks = run_ranks(lambda rank, world: fit(described, folder), processes, init_group=False)
    return ranks[0]


def test_systems_have_the_same_losses(tmp_path: Path) -> None:
    plain = fitted("plain", 1, tmp_path / "plain")
    assert plain["live_ranks"] == 1
    others = [("spindle", 1), ("ddp", 3), ("fsdp2", 3)]
    if find_spec("deepspeed"):  # the extra of that name
        others.append(("deepspeed", 2))
    for system, processes in others:
        found = fitted(system, processes, tmp_path / system)
        assert found["live_ranks"] == processes
        assert largest_difference(found["losses"], plain["losses"], 3) < 1e-5
        assert (found["predicted_ms"] is None) == (system != "spindle")
        assert found["planned_by"] in (PLANNERS if system == "spindle" else [""])


def test_ranks_in_different_folders_are_an_error(tmp_path: Path) -> None:
    described = measured.job_config(Job("ddp", 2, 0), composed(*TINY))

    def fit_apart(rank: int, world: int) -> None:
        fit(described, tmp_path / str(rank))

    with pytest.raises(RankError, match="ranks work in different folders"):
        run_ranks(fit_apart, 2, init_group=False)


@pytest.mark.scripts
@pytest.mark.slow
@pytest.mark.timeout(360)
def test_c21_c40_a_sweep_is_one_tree_whose_jobs_have_their_own_ranks(tmp_path: Path) -> None:
    """Two processes, then one: ranks are counted by a collective, and tell where they work."""
    options = ["-m", *TINY, "processes=[2,1]", "systems=[spindle],[plain]", "hydra.sweep.dir=swept"]
    options += ["+system.spindle.fewest_processes=2"]
    output = run_script(ROOT / "benchmark.py", options, cwd=tmp_path, timeout_s=290).check().stdout
    assert [path.name for path in tmp_path.iterdir()] == ["swept"]
    tree = tmp_path / "swept"
    assert sorted(path.name for path in tree.iterdir() if path.is_dir()) == ["0", "1"]
    with (tree / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [(row["system"], row["live_ranks"], row["error"]) for row in rows]
    assert found == [("spindle", "2", ""), ("plain", "1", "")]
    for row in rows:
        planned = row["system"] == "spindle"
        assert float(row["step_ms"]) > 0
        filled = ("predicted_ms", "iteration_ms", "planning_s", "planned_by")
        assert all((row[name] != "") == planned for name in filled)
        assert row["threads"] == "1"
        assert row["cpu"]
        assert row["cores"]
    ranks = {"0/jobs/0-spindle-2": 2, "1/jobs/0-plain-1": 1}
    assert {str(path.parent.relative_to(tree)) for path in tree.rglob("result.json")} == set(ranks)
    for folder, count in ranks.items():
        job = json.loads((tree / folder / "result.json").read_text())
        assert job["folders"] == [str(tree / folder)] * count
    assert output.count("compared with no other's") == 2
    assert (tree / "report.md").read_text().count("Measured ") == 2

    times = {path: path.stat().st_mtime_ns for path in tree.rglob("result.json")}
    again = run_script(ROOT / "benchmark.py", options, cwd=tmp_path, timeout_s=60).check().stdout
    assert again.count("of an earlier run") == 2
    assert {path: path.stat().st_mtime_ns for path in tree.rglob("result.json")} == times
