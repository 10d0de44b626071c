from __future__ import annotations

import csv
from xml.etree import ElementTree

import pytest

from lightning_spindle.planner import PLANNERS
from lightning_spindle.planner.growth import Measurement, draw, main, measure_all, synthetic


def test_synthetic_problems_are_the_same_each_time():
    assert synthetic(7, 16) == synthetic(7, 16)
    assert [len(synthetic(m, 8).metaops) for m in (1, 10, 30)] == [1, 10, 30]


def test_growth_writes_a_table_and_a_picture(tmp_path, capsys):
    assert (
        main(
            ["--out", str(tmp_path), "--devices", "2", "4", "--metaops", "4", "--planners", "spindle", "seq"]
        )
        == 0
    )
    rows = list(csv.DictReader((tmp_path / "growth.csv").open()))
    assert [(r["planner"], r["devices"]) for r in rows] == [
        ("spindle", "2"),
        ("spindle", "4"),
        ("seq", "2"),
        ("seq", "4"),
    ]
    assert all(float(r["seconds"]) > 0 and float(r["peak_mib"]) > 10 for r in rows)
    drawn = ElementTree.parse(tmp_path / "growth.svg").getroot()
    assert len(drawn.findall(".//{*}polyline")) == 2
    assert "4 devices    4 MetaOps" in capsys.readouterr().out


def test_the_picture_is_higher_where_planning_takes_longer():
    found = [Measurement("seq", d, 10, s, 50.0, 1.0, 1) for d, s in ((8, 0.01), (64, 0.1), (1024, 1.0))]
    line = ElementTree.fromstring(draw(found)).find(".//{*}polyline")
    assert line is not None
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights == sorted(heights, reverse=True)


@pytest.mark.parametrize("planner", list(PLANNERS))
def test_planning_30_metaops_on_64_devices_takes_a_second(planner):
    (found,) = measure_all([planner], [64], [30])  # in a process of its own: this one's heap is large
    assert found.seconds <= 1.5  # measured: at most 1.0 on an idle core
    assert found.peak_mib < 1024
