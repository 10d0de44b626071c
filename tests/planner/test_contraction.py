from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from lightning_spindle.graph import Flow, Layout, Operator, OperatorGraph, Value
from lightning_spindle.planner.contraction import contract
from tests.planner.graphs import GraphBuilder, clip, ofasys, qwenval


@pytest.mark.parametrize(
    ("graph", "metaops", "levels"),
    [
        (clip(4), 12, 2),  # two towers and a loss for each task
        (clip(7), 21, 2),
        (clip(10), 30, 2),
        (ofasys(4), 12, 3),  # adaptor, encoder, decoder; the text adaptor joins the encoder
        (ofasys(7), 19, 3),  # infilling and structure have no adaptor of their own
        (qwenval(), 10, 3),  # encoders, language models, heads
    ],
)
def test_metaops_of_the_papers_workloads(graph, metaops, levels):
    found = contract(graph)
    assert len(found.metaops) == metaops
    assert len(found.levels) == levels


def test_layers_names_and_flows_of_a_task():
    found = contract(clip(1))
    assert {(m.name, len(m.layers), m.level, m.batch) for m in found.metaops} == {
        ("text-audio/text", 24, 0, 128),
        ("text-audio/audio", 12, 0, 128),
        ("text-audio/loss", 1, 1, 128),
    }
    text = found.metaop("text-audio/text")
    assert text.layers[0] == ("text-audio/text.stem", "text-audio/text.blocks.0")
    assert text.layers[1] == ("text-audio/text.blocks.1",)
    assert text.layers[-1] == ("text-audio/text.blocks.23", "text-audio/text.norm")
    assert text.layer_flow_bytes == 1 << 20
    assert found.flows[0] == Flow("text-audio/audio", "text-audio/loss", (1 << 20) // 8)


def test_without_light_operators_only_the_two_criteria_count():
    found = contract(clip(1), light=-1)
    assert sorted(len(m.layers) for m in found.metaops) == [1, 1, 1, 1, 1, 12, 24]


def test_a_decoder_is_one_metaop_though_all_layers_read_the_encoder():
    found = contract(ofasys(1))
    assert {m.name: len(m.layers) for m in found.metaops} == {
        "caption/vision": 18,
        "caption/encoder": 12,
        "caption/decoder.blocks": 12,
    }
    assert Flow("caption/encoder", "caption/decoder.blocks", (1 << 20) // 8) in found.flows
    assert len(contract(ofasys(1), shared_inputs=False).metaops) > 2 + 10


def test_whole_and_everywhere_operators():
    """A loss that couples samples stays apart; metrics, which run on every rank, are left out."""
    b = GraphBuilder()
    end = b.tower("t", "net", 3)
    loss = b.add("t", "loss", "loss", [end], flops=0.0, layout=Layout.WHOLE)
    b.add("t", "accuracy", "accuracy", [end, loss], flops=0.0, layout=Layout.EVERYWHERE)
    found = contract(b.build())
    assert [(m.name, m.layout) for m in found.metaops] == [
        ("t/net", Layout.SPLIT),
        ("t/loss", Layout.WHOLE),
    ]


def test_a_light_operator_between_two_goes_where_less_is_left_to_send():
    b = GraphBuilder()
    at = b.tower("t", "a", 3, size=1000, norm=False)
    at = b.add("t", "squeeze", "squeeze", [at], flops=1.0, size=10)
    b.tower("t", "b", 2, [at], stem=False)
    found = contract(b.build())
    assert {len(m.layers) for m in found.metaops} == {2, 3}
    assert "t/squeeze" in found.metaops[0].layers[-1]
    assert found.flows[0].bytes == 10


def test_pinned_operators_stay_apart():
    values = tuple(Value(v, 0, 1, 8, True) for v in ("a", "b"))
    operators = (
        Operator("t/a", "t", "x", Layout.SPLIT, (), ("a",), forward_flops=9.0),
        Operator("t/b", "t", "x", Layout.WHOLE, ("a",), ("b",), pin="buffer"),
        Operator("t/c", "t", "x", Layout.WHOLE, ("b",), (), pin="buffer", after=("t/b",)),
    )
    found = contract(OperatorGraph(operators, values))
    assert [(m.name, len(m.layers), m.pin) for m in found.metaops] == [("t/a", 1, None), ("t", 2, "buffer")]


@st.composite
def graphs(draw) -> OperatorGraph:
    count = draw(st.integers(1, 14))
    operators, values = [], []
    for i in range(count):
        task = f"t{draw(st.integers(0, 1))}"
        inputs = [o.outputs[0] for o in operators if o.task == task and draw(st.integers(0, 2)) == 0]
        layout = draw(st.sampled_from([Layout.SPLIT, Layout.SPLIT, Layout.SPLIT, *Layout]))
        name = f"{task}/m.{i}" if draw(st.booleans()) else f"{task}/k{i}"
        values.append(Value(f"v{i}", 0, 1, draw(st.integers(1, 99)), True))
        flops = draw(st.sampled_from([0.0, 1.0, 10.0]))
        operators.append(
            Operator(
                name,
                task,
                draw(st.sampled_from("ab")),
                layout,
                tuple(inputs),
                (f"v{i}",),
                forward_flops=flops,
            )
        )
    return OperatorGraph(tuple(operators), tuple(values))


@settings(max_examples=300)
@given(graphs(), st.sampled_from([-1.0, 0.0, 0.25]), st.booleans(), st.randoms(use_true_random=False))
def test_contraction_keeps_the_graph(graph, light, shared_inputs, rng):
    found = contract(graph, light=light, shared_inputs=shared_inputs)
    operators = graph.operator_map()
    home = {name: (m.name, k) for m in found.metaops for k, layer in enumerate(m.layers) for name in layer}
    scheduled = [o.name for o in graph.operators if o.layout is not Layout.EVERYWHERE]
    assert sorted(home) == sorted(scheduled)  # every operator exactly once
    assert sum(len(layer) for m in found.metaops for layer in m.layers) == len(scheduled)

    order = {name: i for i, name in enumerate(n for m in found.metaops for layer in m.layers for n in layer)}
    level = {m.name: m.level for m in found.metaops}
    for name, before in graph.predecessors().items():
        for other in before:
            if name in home and other in home:
                assert order[other] < order[name]  # in an order in which they can run
                if home[other][0] != home[name][0]:
                    assert home[other][0] in found.metaop(home[name][0]).after
                    assert level[home[other][0]] < level[home[name][0]]
    for m in found.metaops:
        assert m.level == 1 + max((level[b] for b in m.after), default=-1)
        used = [operators[name] for layer in m.layers for name in layer]
        assert len({o.task for o in used}) == len({o.layout for o in used}) == 1
        if light < 0:
            assert len({o.signature for o in used}) == 1
    assert _shuffled(graph, rng, light, shared_inputs) == found


def _shuffled(graph: OperatorGraph, rng: random.Random, light: float, shared_inputs: bool):
    """The same graph, its operators in another order in which they can run."""
    before = graph.predecessors()
    waiting, order, done = list(graph.operators), [], set()
    while waiting:
        ready = [o for o in waiting if done.issuperset(before[o.name])]
        o = rng.choice(ready)
        waiting.remove(o)
        order.append(o)
        done.add(o.name)
    values = list(graph.values)
    rng.shuffle(values)
    return contract(OperatorGraph(tuple(order), tuple(values)), light=light, shared_inputs=shared_inputs)
