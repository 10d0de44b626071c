"""Timelines: shares and breakdowns by hand, and traces that load back."""

import itertools
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spindle.timeline import (
    Category,
    Event,
    MemorySample,
    Timeline,
    comparison,
    read_trace,
    timeline_trace,
)

F, B, T, S, W = Category.FORWARD, Category.BACKWARD, Category.TRANSFER, Category.SYNC, Category.WAIT


def event(rank: int, start: float, end: float, category: Category, task: str = "a") -> Event:
    return Event(rank, start, end, "F0", "a[0:1]", category, task)


def two_devices() -> Timeline:
    events = (
        event(0, 0.0, 4.0, F),
        event(0, 3.0, 6.0, T),  # 3 to 4 is hidden
        event(0, 4.0, 7.0, W),  # 4 to 6 is the transfer's
        event(0, 7.0, 10.0, B),
        event(1, 2.0, 4.0, F, "b"),
        event(1, 9.0, 10.0, S, ""),
    )
    return Timeline("predicted", 2, events)


def test_span_and_shares() -> None:
    timeline = two_devices()
    assert (timeline.start_s, timeline.end_s, timeline.span_s) == (0.0, 10.0, 10.0)
    assert timeline.busy_share(0) == pytest.approx(0.7)
    assert timeline.idle_share(0) == pytest.approx(0.3)
    assert timeline.busy_share(1) == pytest.approx(0.2)
    assert timeline.utilisation == pytest.approx(0.45)
    assert timeline.tasks == ("a", "b")


def test_the_breakdown_counts_each_moment_once() -> None:
    timeline = two_devices()
    assert {k: v for k, v in timeline.breakdown(0).items() if v} == {
        "forward": 4.0,
        "backward": 3.0,
        "transfer": 2.0,
        "wait": 1.0,
    }
    assert {k: v for k, v in timeline.breakdown(1).items() if v} == {"forward": 2.0, "sync": 1.0, "idle": 7.0}
    assert sum(timeline.breakdown().values()) == pytest.approx(20.0)


def test_seconds_by_task_count_every_event() -> None:
    assert two_devices().task_seconds() == {
        "a": {"forward": 4.0, "transfer": 3.0, "wait": 3.0, "backward": 3.0},
        "b": {"forward": 2.0},
    }


def test_an_empty_timeline_has_no_shares() -> None:
    timeline = Timeline("measured", 2, ())
    assert (timeline.span_s, timeline.busy_share(0), timeline.idle_share(1), timeline.utilisation) == (
        0,
        0,
        0,
        0,
    )
    assert set(timeline.breakdown().values()) == {0.0}
    assert timeline.peak_bytes(0) is None


@pytest.mark.parametrize(
    ("source", "events", "message"),
    [
        ("guessed", (), "source 'guessed' is none of predicted, measured, emulated"),
        ("predicted", (event(2, 0, 1, F),), r"on a device outside 0\.\.1"),
        ("predicted", (event(-1, 0, 1, F),), r"on a device outside 0\.\.1"),
        ("measured", (event(0, 2, 1, F),), "ends before it starts"),
        ("measured", (event(0, float("nan"), 1, F),), "ends before it starts"),
    ],
)
def test_impossible_timelines_are_refused(source: str, events: tuple[Event, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"invalid timeline: .*{message}"):
        Timeline(source, 2, events)  # type: ignore[arg-type]


def test_measured_clocks_are_moved_to_zero() -> None:
    timeline = Timeline("measured", 1, (event(0, 103.0, 104.0, B), event(0, 101.0, 102.0, F)), 7)
    moved = timeline.from_zero()
    assert [(e.start_s, e.end_s) for e in moved.events] == [(0.0, 1.0), (2.0, 3.0)]
    assert (moved.span_s, moved.iteration) == (timeline.span_s, 7)


def test_the_peak_is_the_largest_sample_of_a_device() -> None:
    memory = (
        MemorySample(0, 0.0, 5),
        MemorySample(0, 1.0, 9),
        MemorySample(0, 2.0, 3),
        MemorySample(1, 0.0, 2),
    )
    timeline = Timeline("predicted", 3, (), memory=memory)
    assert [timeline.peak_bytes(r) for r in range(3)] == [9, 2, None]


# -------------------------------------------------------------------------------------------- traces


def events(devices: int) -> st.SearchStrategy[Event]:
    return st.builds(
        lambda rank, start, length, category, task, label: Event(
            rank, start, start + length, "A1:0>2", label, category, task
        ),
        st.integers(0, devices - 1),
        st.floats(0, 100),
        st.floats(0, 10),
        st.sampled_from(Category),
        st.sampled_from(["", "image_text", "tâche"]),
        st.text(max_size=5),
    )


@given(st.lists(events(3), max_size=8), st.lists(events(5), max_size=8))
def test_traces_load_back(first: list[Event], second: list[Event]) -> None:
    memory = (MemorySample(0, 0.5, 12), MemorySample(2, 1.0, 7))
    given_ = (
        Timeline("predicted", 3, tuple(first), memory=memory),
        Timeline("measured", 5, tuple(second), 17),
    )
    loaded = read_trace(timeline_trace(*given_))
    assert len(loaded) == 2
    for a, b in zip(given_, loaded, strict=True):
        assert (a.source, a.devices, a.iteration, a.memory) == (b.source, b.devices, b.iteration, b.memory)
        assert len(a.events) == len(b.events)
        by_text = sorted(a.events, key=repr_of), sorted(b.events, key=repr_of)
        for x, y in zip(*by_text, strict=True):
            assert repr_of(x) == repr_of(y)
            assert (x.start_s, x.end_s) == pytest.approx((y.start_s, y.end_s), abs=1e-9)


def repr_of(e: Event) -> tuple[object, ...]:
    return (e.rank, e.category, e.task, e.label, e.instruction, round(e.start_s, 7), round(e.end_s, 7))


def test_a_trace_has_a_process_for_each_timeline_and_a_row_for_each_device() -> None:
    predicted = two_devices()
    measured = Timeline("measured", 2, predicted.events, 10)
    rows = json.loads(timeline_trace(predicted, measured))["traceEvents"]
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in rows if r["name"] == "thread_name"}
    assert {r["pid"]: r["args"]["name"] for r in rows if r["name"] == "process_name"} == {
        0: "predicted",
        1: "measured, iteration 10",
    }
    for pid in (0, 1):
        assert names[pid, 0] == "device 0"
        assert names[pid, 1] == "device 1"
        assert names[pid, 2] == "device 0, communication"
    drawn = [r for r in rows if r["ph"] == "X"]
    assert {(r["pid"], r["tid"]) for r in drawn} <= set(names)
    assert next(r for r in drawn if r["cat"] == "backward")["ts"] == 7e6
    assert next(r for r in drawn if r["cat"] == "backward")["dur"] == 3e6
    # Viewers drop complete events of one row that overlap without nesting.
    for row in names:
        own = sorted((r["ts"], r["dur"]) for r in drawn if (r["pid"], r["tid"]) == row)
        assert all(a + d <= b for (a, d), (b, _) in itertools.pairwise(own))


def test_one_timeline_alone_is_a_trace_too() -> None:
    assert read_trace(two_devices().to_chrome_trace()) == (two_devices(),)
    assert read_trace(timeline_trace(None, two_devices())) == (two_devices(),)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"timelines": [], "traceEvents": [{"name": "x"}]}'])
def test_other_files_are_no_traces(text: str) -> None:
    with pytest.raises(ValueError):
        read_trace(text)


def test_timelines_travel_between_processes() -> None:
    timeline = two_devices()
    timeline.on(0)
    assert pickle.loads(pickle.dumps(timeline)) == timeline


def test_the_comparison_has_a_line_for_each_category_in_use() -> None:
    measured = Timeline("measured", 2, (event(0, 0.0, 0.5, F), event(1, 0.0, 0.25, Category.DATA)))
    lines = comparison(two_devices(), measured).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "forward",
        "backward",
        "data",
        "transfer",
        "sync",
        "wait",
        "idle",
        "iteration",
    ]
    assert lines[1].split() == ["forward", "3000.00", "250.00"]
    assert lines[-1].split() == ["iteration", "10000.00", "500.00"]
