"""The simulated and emulated modes: cells, rows, sweeps that go on where they stopped."""

import csv
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra
import pytest

import benchmark
from benchmarking import setups, simulated
from benchmarking.cells import cell_of, of_tasks
from benchmarking.report_simulated import report_simulated, speedup
from benchmarking.results import append, read_rows
from benchmarking.rows import SimulatedRow
from benchmarking.simulated import (
    Cell,
    Planning,
    Result,
    attempted,
    samples_of,
    simulate_baseline,
    simulate_spindle,
)
from benchmarking.sweep import Progress, jobs_of, latest
from benchmarking.sweep_report import report_sweep
from lightning_spindle.costs import A800, AnalyticCosts
from lightning_spindle.planner import PLANNERS
from tests.support.workloads import composed
from tests.test_baselines import graph_of

ROOT = Path(__file__).parents[1]


@pytest.fixture
def cell() -> Cell:
    return Cell("toy", 2, "a800", AnalyticCosts(graph_of("a", "b"), A800.cluster(16), A800))


def test_every_planner_and_baseline_gives_a_row(cell: Cell) -> None:
    rows = [simulate_spindle(cell, Planning(planner, 0.2)).row for planner in (*PLANNERS, "auto")]
    rows += [simulate_baseline(cell, system).row for system in ("deepspeed", "megatron")]
    assert len({row.key for row in rows}) == len(rows)
    for row in rows:
        assert row.simulated_ms is not None
        assert row.memory_bytes is not None
        shares = (row.compute_share, row.transfer_share, row.sync_share)
        assert all(share is not None and 0 <= share <= 1 for share in shares)
        assert (row.planning_s is None) == (row.system != "spindle")
    spindle = [row for row in rows if row.system == "spindle"]
    assert all(
        row.computing_ms >= row.bound_ms * 0.999 for row in spindle if row.computing_ms and row.bound_ms
    )
    auto = next(row for row in spindle if row.planner == "auto")
    assert auto.setting in PLANNERS
    assert auto.simulated_ms == min(row.simulated_ms for row in spindle if row.simulated_ms)
    assert speedup(auto, rows) == pytest.approx(rows[-2].simulated_ms / auto.simulated_ms)


def test_planners_see_the_times_that_the_simulator_has(cell: Cell) -> None:
    samples = samples_of(cell.metagraph, cell.costs)
    for m in cell.problem.metaops:
        for n, time in m.times:
            rows = -(-m.batch // n)
            layers = cell.metagraph.metaop(m.name).layers
            own = sum(samples.operators[o][rows].total_ms for layer in layers for o in layer) / len(layers)
            assert time.total_ms == pytest.approx(own)
            costs = [cell.costs.operator_s(layers[0][0], rows, backward) for backward in (False, True)]
            assert samples.operators[layers[0][0]][rows].total_ms == pytest.approx(1e3 * sum(costs))


def test_a_refusal_is_a_row_with_its_reason(cell: Cell) -> None:
    narrow = replace(cell, costs=replace(cell.costs, cluster=replace(cell.costs.cluster, memory_bytes=1000)))
    result = attempted(narrow.row("deepspeed"), partial(simulate_baseline, narrow, "deepspeed"))
    assert result.row.simulated_ms is None
    assert "ValueError: deepspeed does not fit on 16 devices" in result.row.error
    assert "FAILED deepspeed" in report_simulated([result.row])


def test_a_defect_is_no_refusal(cell: Cell) -> None:
    def broken() -> Result:
        raise ZeroDivisionError("no time at all")

    with pytest.raises(ZeroDivisionError):
        attempted(cell.row("deepspeed"), broken)
    assert (
        attempted(cell.row("deepspeed"), broken, Exception).row.error == "ZeroDivisionError: no time at all"
    )


def test_rows_are_read_as_they_were_written(cell: Cell, tmp_path: Path) -> None:
    rows = [simulate_spindle(cell, Planning("seq", 0.2)).row, replace(cell.row("megatron"), error="no, none")]
    for row in rows:
        append(tmp_path / "results.csv", row)
    assert read_rows(tmp_path / "results.csv", SimulatedRow) == rows
    assert read_rows(tmp_path / "other.csv", SimulatedRow) == []


def test_a_sweep_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    real = benchmark.attempted

    def attempt(*args: Any) -> Any:
        done.append(f"{args[0].system}:{args[0].planner}")
        return real(*args)

    monkeypatch.setattr(benchmark, "attempted", attempt)
    monkeypatch.setattr(benchmark, "cell_of", lambda config: cell)
    progress = Progress(3)
    monkeypatch.setattr(benchmark, "_progress", lambda: progress)
    results = tmp_path / "results.csv"
    for planner in ("spindle", "seq", "spindle"):
        config = composed("mode=simulated", f"planner={planner}", "planner.time_limit_s=0.2")
        assert benchmark.simulated(config, tmp_path, results)
    assert done == ["spindle:spindle", "deepspeed:", "megatron:", "spindle:seq"]
    with results.open() as file:
        assert len(list(csv.DictReader(file))) == 4
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["[1/3]", "[2/3]", "[3/3]"]
    assert "(0 s left)" in lines[-1]


def test_jobs_of_a_command_line() -> None:
    assert jobs_of(["-m", "workload=ofasys,qwen_val", "cluster.devices=8,16,32", "seed=1"]) == 6
    assert jobs_of(["workload=ofasys"]) == 1


def test_configurations_make_cells() -> None:
    small = ["workload=qwen_val", "workload.size=small", "cluster=h200", "cluster.devices=4"]
    small += [f"workload.sizes.small.{part}.layers=1" for part in ("language", "vision", "audio")]
    config = composed(*small)
    assert config["mode"]["name"] == "simulated"
    cell = cell_of(config)
    assert (cell.workload, cell.tasks, cell.cluster) == ("qwen_val (small)", 3, "h200")
    assert cell.costs.cluster.devices == 4
    assert cell_of(composed(*small)) is cell
    first = cell_of(composed(*small, "workload.tasks=2"))
    assert first.tasks == 2
    assert set(first.graph.operators) < set(cell.graph.operators)
    assert cell_of(composed(*small, "cluster.kind=A800-80GB")).setup != cell.setup == first.setup
    with pytest.raises(ValueError, match="quickstart is measured only"):
        cell_of(composed())
    with pytest.raises(ValueError, match=r"workload\.size=tiny: qwen_val has full, small"):
        cell_of(composed("workload=qwen_val", "workload.size=tiny"))
    with pytest.raises(ValueError, match="shard_optimizer_state=maybe is neither true nor false"):
        cell_of(composed("workload=qwen_val", "shard_optimizer_state=maybe"))


def test_jobs_that_differ_in_anything_are_done_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell
) -> None:
    """And the table names what each was asked, which lies beside it whole."""

    def found(config: dict[str, Any]) -> Cell:
        return replace(cell, setup=setups.fingerprint(config["workload"], config["cluster"]))

    monkeypatch.setattr(benchmark, "cell_of", found)
    results = tmp_path / "results.csv"
    length = "workload.sizes.full.text_length"
    for override in ("seed=0", "seed=1", "planner.time_limit_s=0.1", "cluster.kind=H200-141GB",
                     f"{length}=64", "seed=0", "workload.sizes.small.text_length=8"):  # fmt: skip
        config = composed("mode=simulated", "workload=qwen_val", "planner=seq", "baselines=[]", override)
        assert benchmark.attempt(config, tmp_path, results)
    rows = read_rows(results, SimulatedRow)
    assert [(row.seed, row.time_limit_s) for row in rows] == [
        (0, 3.0),
        (1, 3.0),
        (0, 0.1),
        (0, 3.0),
        (0, 3.0),
    ]
    described = {path.stem: path.read_text() for path in (tmp_path / "setups").iterdir()}
    assert '"H200-141GB"' in described[rows[3].setup]
    assert '"text_length": 64' in described[rows[4].setup]
    assert set(described) == {row.setup for row in rows}


@pytest.mark.usefixtures("hydra_restored")
def test_a_sweep_goes_on_after_any_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell
) -> None:
    """A defect of ours, a planner that there is not, a number that is none: a row each."""

    def found(config: dict[str, Any]) -> Cell:
        return cell if config["cluster"]["devices"] == 16 else cell_of(config)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("no time at all")

    monkeypatch.setattr(benchmark, "cell_of", found)
    monkeypatch.setattr(benchmark, "simulate_baseline", broken)
    sweep(monkeypatch, tmp_path, "planner.name=foo,seq", "cluster.devices=16,foo", "baselines=[deepspeed]")
    rows = latest(read_rows(tmp_path / "results.csv", SimulatedRow))
    assert len(rows) == 5
    good = [row for row in rows if not row.error]
    assert [(row.planner, row.devices) for row in good] == [("seq", 16)]
    errors = {(row.name, row.devices): row.error for row in rows if row.error}
    assert errors["foo", 16].startswith("ValueError: there is no planner 'foo'; there are auto, ")
    assert errors["deepspeed", 16] == "ZeroDivisionError: no time at all"
    assert errors["seq", 0] == errors["foo", 0] != ""
    assert (tmp_path / "report.md").read_text().count("FAILED") == 4


def test_a_limit_below_nothing_is_refused(cell: Cell) -> None:
    with pytest.raises(ValueError, match=r"planner\.time_limit_s=-1 is less than 0"):
        simulate_spindle(cell, Planning("seq", -1.0))


def test_a_bar_is_one_job(cell: Cell, tmp_path: Path) -> None:
    for seed in (0, 1):
        append(tmp_path / "results.csv", simulate_spindle(cell, Planning("seq", 0.2, seed)).row)
    report_sweep(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("No figure: jobs differ in more than")
    assert "| seed |" in text
    assert "| limit s |" not in text


@pytest.fixture
def hydra_restored() -> Iterator[None]:
    """Hydra in this process sets up logging, and would leave it so."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def sweep(monkeypatch: pytest.MonkeyPatch, directory: Path, *overrides: str) -> None:
    """``python benchmark.py -m`` in this process."""
    options = ["-m", f"hydra.sweep.dir={directory}", "workload=ofasys", "planner.time_limit_s=0.2"]
    monkeypatch.setattr("sys.argv", ["benchmark.py", *options, *overrides])
    benchmark._progress.cache_clear()
    task = benchmark.main.__wrapped__
    hydra.main(config_path=str(ROOT / "conf"), config_name="benchmark", version_base="1.3")(task)()


@pytest.mark.usefixtures("hydra_restored")
def test_a_sweep_has_one_tree_one_table_and_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell
) -> None:
    """Also where it is resumed with more jobs, and where a job is of a workload that there is not."""
    monkeypatch.setattr(benchmark, "cell_of", lambda config: cell if config["seed"] == 0 else cell_of(config))
    monkeypatch.chdir(tmp_path)
    directory = Path("swept")
    sweep(monkeypatch, directory, "planner=seq,optimus", "workload.tasks=99", "seed=0,1")
    sweep(monkeypatch, directory, "planner=seq,stmm", "workload.tasks=99", "seed=0,1")
    assert [path.name for path in tmp_path.iterdir()] == ["swept"]
    folders = sorted(path.name for path in directory.iterdir() if path.is_dir())
    assert folders == ["0", "1", "2", "3", "setups"]
    rows = read_rows(directory / "results.csv", SimulatedRow)
    assert len({row.key for row in rows if not row.error}) == sum(not row.error for row in rows) == 5
    assert [row.name for row in latest(rows) if row.error] == ["seq", "optimus", "stmm"]
    text = (directory / "report.md").read_text()
    assert all(f"spindle:{planner}" in text for planner in ("seq", "optimus", "stmm"))
    assert "FAILED spindle:stmm: ValueError: workload.tasks=99: there are 1 to 7" in text
    assert text.count("FAILED") == 3
    if find_spec("matplotlib"):
        assert (directory / "speedup.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("hydra_restored")
def test_emulated_iterations_stand_beside_simulated_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell
) -> None:
    """Where the simulator is told of other devices, the job has failed and leaves both times."""
    small = replace(cell, costs=replace(cell.costs, cluster=A800.cluster(4)))
    monkeypatch.setattr(benchmark, "cell_of", lambda config: small)
    sweep(monkeypatch, tmp_path, "mode=simulated,emulated", "planner=spindle")
    slow = replace(small.costs, kind=replace(A800, flops_per_s=A800.flops_per_s / 2))
    real = simulated.simulate
    monkeypatch.setattr(simulated, "simulate", lambda program, costs: real(program, slow))
    sweep(monkeypatch, tmp_path, "mode=emulated", "planner=spindle,seq")
    rows = [row for row in read_rows(tmp_path / "results.csv", SimulatedRow) if row.mode == "emulated"]
    assert [(row.name, bool(row.error)) for row in rows] == [("spindle", False), ("seq", True)]
    for row in rows:
        assert row.difference == pytest.approx(row.simulated_ms / row.emulated_ms - 1.0)
        assert (abs(row.difference) < 1e-6) == (not row.error)
    text = (tmp_path / "report.md").read_text()
    assert text.count("Emulated 20") == text.count("Simulated 20") == 1
    assert f"{rows[0].emulated_ms:.2f} |" in text
    assert f"FAILED spindle:seq: simulated {rows[1].simulated_ms:.2f} ms, emulated" in text


def test_a_table_has_rows_of_one_kind(cell: Cell, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("date,step_ms\n2026-01-01,3.0\n")
    with pytest.raises(ValueError, match="has rows of another kind"):
        append(path, cell.row("deepspeed"))
    assert len(path.read_text().splitlines()) == 2


def test_a_report_without_matplotlib_says_what_is_missing(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    append(tmp_path / "results.csv", simulate_baseline(cell, "deepspeed").row)
    report_sweep(tmp_path)
    assert "No figure: drawing figures needs matplotlib" in (tmp_path / "report.md").read_text()


def test_part_of_a_graph() -> None:
    graph = graph_of("a", "b", "c")
    assert of_tasks(graph, ("a", "c")) == graph_of("a", "c")
