"""Figures of simulated iterations: made from small cells, held against sums that are known."""

import csv
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import benchmark
from benchmarking.baselines import Setting, execute
from benchmarking.figures import dynamic, memory, optimality, placement, scaling, utilisation
from benchmarking.figures.breakdown import PARTS, parts_ms
from benchmarking.figures.comparing import COMPARED, ComparedRow
from benchmarking.figures.making import FIGURES, make_figures, names_of
from benchmarking.figures.orderings import orderings
from benchmarking.figures.reported import SPEEDUPS
from benchmarking.figures.speedups import speedup_figure
from benchmarking.figures.style import SYSTEMS
from benchmarking.figures.suite import Suite, part_of, tasks_of
from benchmarking.rows import SimulatedRow
from benchmarking.simulated import Cell
from lightning_spindle.costs import A800, AnalyticCosts
from lightning_spindle.planner import PLANNERS
from lightning_spindle.planner.placement import Policy
from lightning_spindle.planner.spindle import Reading, plan_spindle
from lightning_spindle.simulate import simulate
from tests.support.workloads import composed
from tests.test_baselines import graph_of

SMALL = {
    "scaling": [{"workload": "ofasys", "tasks": [2], "devices": [4]}],
    "end_to_end": [{"workload": "ofasys", "tasks": [2, 3], "devices": [2, 4]}],
    "utilisation": [{"workload": "ofasys", "tasks": [2], "devices": [4]}],
    "breakdown": [{"workload": "ofasys", "tasks": [2], "devices": [4]}],
    "optimality": [{"workload": "ofasys", "tasks": [2], "devices": [4]}],
    "planning": {"workload": "ofasys", "devices": [2, 4], "tasks": [1, 2], "devices_by_tasks": 4},
    "placement": [{"workload": "ofasys", "tasks": [3], "devices": [16]}],
    "dynamic": {
        "workload": "ofasys",
        "devices": 4,
        "phases": [{"tasks": [0, 2], "steps": 10}, {"tasks": [1, 3], "steps": 20}],
    },
    "single_task": [{"workload": "ofasys", "tasks": 2, "devices": 4}],
    "memory": [{"workload": "ofasys", "tasks": [2], "devices": [4]}],
}


MEMORY_BYTES: dict[str, Callable[[AnalyticCosts], int | None]] = {
    "ofasys": lambda costs: costs.cluster.memory_bytes,
    "multitask_clip": lambda costs: int(execute(Setting(zero=3), costs).memory_bytes) + 1,
    "qwen_val": lambda costs: 1,
}
"""By the cells' workload: enough for all, for DeepSpeed alone, for nobody."""


def cases_of(workload: str) -> dict[str, Any]:
    """The same cases of another workload."""
    return {
        name: [{**case, "workload": workload} for case in cases]
        if isinstance(cases, list)
        else {**cases, "workload": workload}
        for name, cases in SMALL.items()
    }


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of small cells, whose graphs are handmade; all else is real."""
    made: dict[tuple[str, int, int], Cell] = {}

    def cell_of(given: dict[str, Any]) -> Cell:
        name, tasks = given["workload"]["name"], given["workload"]["tasks"] or 3
        devices = given["cluster"]["devices"]
        costs = AnalyticCosts(graph_of(*"abc"[:tasks]), A800.cluster(devices), A800)
        cluster = replace(costs.cluster, memory_bytes=MEMORY_BYTES[name](costs))
        cell = Cell(name, tasks, "a800", replace(costs, cluster=cluster))
        return made.setdefault((name, tasks, devices), cell)

    monkeypatch.setattr("benchmarking.figures.suite.cell_of", cell_of)
    return {**composed("mode=figures", "planner.time_limit_s=0.1"), "cases": SMALL}


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def days_since(started: date) -> set[str]:
    return {started.isoformat(), date.today().isoformat()}


def test_every_figure_is_a_table_a_picture_and_a_text(config: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert config["figures"] == list(FIGURES)
    config["into"], started = str(tmp_path / "figures"), date.today()
    assert benchmark.figures(config, tmp_path, tmp_path / "results.csv")
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == sorted(
        ["report.md", *(f"{name}.{ending}" for name in FIGURES for ending in ("csv", "png"))]
    )
    for name in FIGURES:
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        rows = read(tmp_path / "figures" / f"{name}.csv")
        assert {row["mode"] for row in rows} == {"measured" if name == "planning" else "simulated"}
        assert {row["cluster"] for row in rows} == {"a800"}
        assert {row["date"][:10] for row in rows} <= days_since(started)
    text = (tmp_path / "figures" / "report.md").read_text()
    assert text.startswith("Figures of ")
    for part in text.split("\n## ")[1:]:
        assert ("Measured: wall clock" in part) == part.startswith("planning\n")
        assert ("Simulated on" in part) == (not part.startswith("planning\n"))
    assert text.count("\n| ") > 3 * len(FIGURES)
    assert "FAILED" not in text


def test_a_figure_that_fails_is_told_of_and_the_others_are_made(
    config: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    cases = {**SMALL, "scaling": [{"workload": "quickstart", "tasks": [2], "devices": [4]}]}
    said: list[str] = []
    given = {**config, "cases": cases, "figures": ["scaling", "memory"]}
    assert not make_figures(given, tmp_path, said.append)
    assert "scaling: FAILED: ValueError: no figures are made of 'quickstart'" in said[0]
    assert "FAILED: ValueError: no figures are made of 'quickstart'" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "memory.png").exists()
    with pytest.raises(ValueError, match="leave workload and planner out"):
        make_figures(composed("mode=figures", "planner=search"), tmp_path, said.append)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (["speed"], "there is no figure speed; there are scaling, end_to_end"),
        ("speed", "there is no figure speed; there are"),
        (["memory", 3], "there is no figure 3; there are"),
        (None, "there is no figure None; there are"),
        ([], r"figures=\[\] asks for no figure; there are scaling, end_to_end"),
    ],
)
def test_figures_that_there_are_not(asked: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        names_of(asked)


def test_one_figure_may_be_asked_for_by_its_name() -> None:
    assert names_of("memory") == names_of(["memory"]) == ["memory"]


def test_figures_of_what_fits_nowhere_fail_one_by_one(config: dict[str, Any], tmp_path: Path) -> None:
    """Each says why; those that do not look at memory are made; nothing of an earlier time is left."""
    pytest.importorskip("matplotlib")
    (tmp_path / "memory.png").write_text("of another time")
    said: list[str] = []
    assert not make_figures({**config, "cases": cases_of("qwen_val")}, tmp_path, said.append)
    parts = dict(part.split("\n", 1) for part in (tmp_path / "report.md").read_text().split("\n## ")[1:])
    lines = dict(zip(FIGURES, said, strict=True))
    assert list(parts) == list(FIGURES)
    made = {"scaling", "placement"}
    for name in set(FIGURES) - made:
        assert f"{name}: FAILED: ValueError: " in lines[name]
        assert "\nFAILED: ValueError: " in parts[name]
        for told in (parts[name], lines[name]):
            assert "on 4 devices" in told or "on 16 devices" in told or "on 2 devices" in told
            assert "does not fit" in told
        assert not (tmp_path / f"{name}.png").exists()
    for name in made:
        assert "FAILED" not in parts[name]
        assert (tmp_path / f"{name}.png").exists()
    assert "* Spindle's placement, QWen-VAL, 3 tasks on 16 devices: " in parts["placement"]


@pytest.mark.parametrize("part", ["draw", "tell"])
def test_a_defect_in_one_figure_leaves_the_others_be(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    pytest.importorskip("matplotlib")

    def broken(_: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(memory, part, broken)
    said: list[str] = []
    assert not make_figures({**config, "figures": ["memory", "scaling"]}, tmp_path, said.append)
    assert "memory: FAILED: IndexError: list index out of range" in said[0]
    assert "## memory\n\nFAILED: IndexError: list" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "scaling.png").exists()


def test_systems_that_are_left_out_are_listed(config: dict[str, Any], tmp_path: Path) -> None:
    """Only DeepSpeed fits, divided by ZeRO 3."""
    pytest.importorskip("matplotlib")
    names = ["end_to_end", "utilisation", "breakdown", "single_task", "memory"]
    said: list[str] = []
    given = {**config, "cases": cases_of("multitask_clip"), "figures": names}
    assert make_figures(given, tmp_path, said.append)
    for name, part in zip(names, (tmp_path / "report.md").read_text().split("\n## ")[1:], strict=True):
        refused = part.split("Refused:\n\n")[1].splitlines()
        assert "DeepSpeed" in part
        for system in ("seq", "spindle"):
            assert any(re.match(rf"\* {system}, .*does not fit", line) for line in refused), (name, refused)
        assert not any(line.startswith("* deepspeed") for line in refused)
        assert len(set(refused)) == len(refused)
    assert all("refused (see report.md)" in line for line in said)


def test_full_cases_are_the_paper_s() -> None:
    """Its 17 cells, and nothing that there is not."""
    suite = Suite(composed("mode=figures"))
    cells = {
        (case["workload"], tasks, devices)
        for case in suite.cases("end_to_end")
        for tasks in case["tasks"]
        for devices in case["devices"]
    }
    assert cells == {key[:3] for key in SPEEDUPS}
    assert len(cells) == 17
    assert set(suite.config["cases"]) == set(FIGURES)


@pytest.fixture
def suite(config: dict[str, Any]) -> Suite:
    return Suite(config)


def test_results_are_of_the_cell_that_was_asked_for(suite: Suite) -> None:
    """Also of cells that nobody keeps."""
    whole = suite.cell("ofasys", 4)
    names = tasks_of(whole)
    for count in (1, 2, 3, 2, 1):
        assert suite.result(part_of(whole, names[:count]), "seq").row.tasks == count
    assert suite.result(whole, "seq") is suite.result(whole, "seq")


@pytest.mark.parametrize("system", ["deepspeed", "seq", "spindle", "optimus"])
def test_utilisation_accounts_for_every_operation(suite: Suite, system: str) -> None:
    cell = suite.cell("ofasys", 4, 3)
    result = suite.result(cell, system)
    assert result.timeline is not None
    span_s, peak = result.timeline.span_s, cell.costs.kind.flops_per_s
    worked = utilisation.worked_of(cell, result)
    rows = cell.costs.example_rows
    expected = sum(
        (1 + cell.costs.passes(o.name, True)) * cell.costs.work(o.name, rows(o.task)).flops
        for o in cell.graph.operators
    )
    by_device = utilisation.by_device(worked, cell, span_s)
    assert sum(share for _, share in by_device) * span_s * peak == pytest.approx(expected)
    bin_s = span_s / 7.5
    over_time = utilisation.over_time(worked, cell, span_s, bin_s)
    widths_s = [bin_s] * 7 + [bin_s / 2]
    found = sum(share * width_s for (_, share), width_s in zip(over_time, widths_s, strict=True))
    assert found * peak * 4 == pytest.approx(expected)
    assert all(0 < share <= 1 for _, share in utilisation.by_metaop(worked, cell))


def test_parts_of_an_iteration_add_up(suite: Suite) -> None:
    for system in ("deepspeed", "spindle"):
        timeline = suite.result(suite.cell("ofasys", 4, 2), system).timeline
        assert timeline is not None
        parts = parts_ms(timeline)
        assert len(parts) == len(PARTS)
        assert sum(parts) == pytest.approx(timeline.span_s * 1e3)


def test_transfers_beside_computing_count(suite: Suite) -> None:
    for row in placement.rows(suite):
        assert row.transfer_share is not None
        assert row.exposed_share is not None
        assert row.transfer_share >= row.exposed_share >= 0
    cell = suite.cell("ofasys", 16, 3)
    plan = plan_spindle(cell.problem, reading=Reading(policy=Policy.SEQUENTIAL))
    timeline = simulate(cell.step.program(plan), cell.costs)
    assert placement.transfer_share(timeline) > 0


def test_free_links_leave_the_computing(suite: Suite) -> None:
    for row in optimality.rows(suite):
        assert row.bound_ms * 0.999 <= row.computing_ms < row.iteration_ms
        assert row.over_c_star("iteration_ms") > row.over_c_star("computing_ms")


def test_a_left_out_sample_is_not_known_to_its_curve(suite: Suite) -> None:
    rows = scaling.rows(suite)
    assert {row.n for row in rows} == {1, 2, 4}
    assert all(row.left_out_ms is None for row in rows)  # two others remain
    wide = [{"workload": "ofasys", "tasks": [2], "devices": [16]}]
    rows = scaling.rows(Suite({**suite.config, "cases": {**SMALL, "scaling": wide}}))
    assert all(row.left_out_ms is not None for row in rows)
    assert any(abs(row.left_out_ms - row.ms) > abs(row.fitted_ms - row.ms) for row in rows if row.left_out_ms)


def test_phases_add_up(suite: Suite) -> None:
    rows = dynamic.rows(suite)
    for system in COMPARED:
        own = [row for row in rows if row.system == system]
        assert [(row.first, row.last, row.steps) for row in own] == [(0, 2, 10), (1, 3, 20)]
        whole = suite.cell("ofasys", 4)
        alone = suite.result(part_of(whole, tasks_of(whole)[1:]), system).row
        assert own[1].iteration_ms == pytest.approx(alone.simulated_ms, rel=0.2)
        assert own[1].seconds == pytest.approx(own[1].planning_s + 20 * own[1].iteration_ms / 1e3)
        assert (own[0].planning_s > 0) == (system in PLANNERS)


def row_of(system: str, devices: int, speedup: float | None, tasks: int = 4) -> ComparedRow:
    planner, name = (system, "spindle") if system in PLANNERS else ("", system)
    base = SimulatedRow("", "simulated", "ofasys", tasks, "a800", devices, name, planner, "")
    given = {field: getattr(base, field) for field in SimulatedRow.__dataclass_fields__}
    time_ms = 100.0 / speedup if speedup else None
    error = "" if speedup else "ValueError: too small"
    return ComparedRow(**{**given, "simulated_ms": time_ms, "error": error}, speedup=speedup)


def test_orderings_are_counted() -> None:
    rows = [
        row_of(s, 8, v) for s, v in {"deepspeed": 1.0, "uniform": 0.8, "optimus": 1.2, "spindle": 1.4}.items()
    ]
    rows += [
        row_of(s, 16, v)
        for s, v in {"deepspeed": 1.0, "uniform": 1.1, "optimus": 0.9, "spindle": 1.05}.items()
    ]
    rows += [row_of("deepspeed", 32, 1.0), row_of("spindle", 32, None)]
    lines = orderings(rows).splitlines()
    where = "OFASys, 4 tasks on"
    assert (
        f"* Spindle (planner spindle) is ahead of all other systems: in 1 of 3; not: {where} 16; {where} 32"
        in lines
    )
    assert (
        f"* Optimus is between DeepSpeed and Spindle (planner spindle): in 1 of 2; not: {where} 16" in lines
    )
    assert f"* Uniform is behind DeepSpeed: in 1 of 2; not: {where} 16" in lines
    assert f"* Spindle's gain (planner spindle) grows with devices: in 0 of 1; not: {where} 16" in lines


@pytest.mark.parametrize(
    "change", [lambda rows: rows, lambda rows: [replace(r, cluster="h200") for r in rows]]
)
def test_speedups_say_what_they_are(change: Callable[[Any], Any]) -> None:
    pytest.importorskip("matplotlib")
    rows = change([row_of("deepspeed", 8, 1.0), row_of("spindle", 8, 1.4), row_of("search", 8, None)])
    figure = speedup_figure(rows, {("ofasys", 4, 8, "spindle"): 1.53})
    (axes,) = [axes for axes in figure.axes if axes.get_visible()]
    assert "simulated" in figure.get_suptitle()
    assert rows[0].cluster in figure.get_suptitle()
    assert (axes.get_title(), axes.get_xlabel()) == ("OFASys, 4 tasks", "devices")
    assert axes.get_ylabel() == "speedup over DeepSpeed"
    assert {text.get_text() for text in axes.texts} == {"1.40", "refused"}
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels == {
        SYSTEMS["spindle"].label,
        SYSTEMS["search"].label,
        "DeepSpeed = 1",
        "reported by the paper",
    }
    with pytest.raises(ValueError, match="no rows to draw"):
        speedup_figure([])
