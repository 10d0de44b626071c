"""Pictures: they are written for any timeline, and say what is missing where matplotlib is."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_spindle.plots import COLOURS, HATCHES, timeline_figure
from lightning_spindle.timeline import Category, Event, Timeline


def timeline(devices: int, tasks: int, each: int = 8) -> Timeline:
    categories = list(Category)
    events = tuple(
        Event(
            r,
            0.01 * k,
            0.01 * k + 0.009,
            f"F{k}",
            "label",
            categories[k % len(categories)],
            f"task{k % tasks}",
        )
        for r in range(devices)
        for k in range(each)
    )
    return Timeline("predicted", devices, events)


@pytest.mark.parametrize(("devices", "tasks"), [(1, 1), (4, 3), (40, 12)])
def test_a_figure_is_written(tmp_path: Path, devices: int, tasks: int) -> None:
    pytest.importorskip("matplotlib")
    predicted = timeline(devices, tasks)
    measured = replace(predicted, source="measured", iteration=3)
    path = timeline_figure(predicted, measured, tmp_path / "timeline.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_one_panel_is_left_out_where_a_timeline_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    both = timeline_figure(timeline(2, 1), timeline(2, 1), tmp_path / "both.svg").read_text()
    one = timeline_figure(timeline(2, 1), None, tmp_path / "one.svg").read_text()
    assert (both.count('id="axes_'), one.count('id="axes_')) == (2, 1)


def test_an_empty_timeline_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert timeline_figure(Timeline("measured", 2, ()), None, tmp_path / "t.png").exists()


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no timeline to draw"):
        timeline_figure(None, None, tmp_path / "t.png")


def test_missing_matplotlib_is_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning_spindle\[plots\]'"):
        timeline_figure(timeline(2, 1), None, tmp_path / "t.png")


def test_every_category_has_its_own_colour() -> None:
    assert set(COLOURS) == set(Category)
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert len(set(HATCHES)) == len(HATCHES)
