"""Losses that couple samples, divided over devices by ``gather_batch``, ``batch_rows`` and ``batch_sum``.

The same steps in one plain process, where all three are what they say of one tensor, are the reference.
"""

import functools
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

from lightning_spindle.capture.errors import CaptureWarning
from lightning_spindle.estimate.passes import TaskPasses
from lightning_spindle.functional import batch_rows, batch_sum, gather_batch
from lightning_spindle.graph import Layout, OperatorGraph, Reading
from lightning_spindle.planner.contraction import contract
from lightning_spindle.program import Kind, ProgramRun, holders, lower
from lightning_spindle.strategy import SpindleStrategy
from lightning_spindle.work import rank_work
from tests.parity.test_work import Watch
from tests.support.fitting import assert_same_fit, captured, fit_once, plain_fit, spindle_fit
from tests.support.ranks import run_ranks
from tests.support.small import (
    Given,
    Layer,
    Part,
    Sample,
    Small,
    Validated,
    forced_fit,
    metagraph,
    multi,
    placement,
    random_samples,
    together,
)

IGNORED = -100


class Contrast(Small):
    """CLIP: every image against all texts and the other way round, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(3, 4), Layer(2, 4)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        a, b = F.normalize(self.a(batch["x"]), dim=-1), F.normalize(self.b(batch["y"]), dim=-1)
        labels = batch_rows(a)
        of_a = self.scale.exp() * a @ gather_batch(b).t()
        of_b = self.scale.exp() * b @ gather_batch(a).t()
        loss = (F.cross_entropy(of_a, labels) + F.cross_entropy(of_b, labels)) / 2
        self.log("loss", loss)
        self.log("accuracy", (of_a.argmax(1) == labels).to(of_a.dtype).mean())
        return loss

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        z = self.a(batch["x"])
        self.log("near", (z @ gather_batch(z).t()).mean())


class Repelling(Small):
    """One encoder, whose rows are compared with each other, labels gathered with them; gathered rows go on.

    The second layer sees what depends on all rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Layer(3, 4), Layer(4, 4, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        z = self.encoder(batch["x"])
        label = (batch["y"][:, 0] > 0).long()
        alike = label[:, None] == gather_batch(label)[None]
        near = torch.cdist(z, gather_batch(z).mul(0.5)).square()
        mixed = self.head(torch.softmax(-near, dim=1) @ gather_batch(z))
        other = batch_rows(z)[:, None] != torch.arange(len(alike.t()))
        loss = (near * alike * other).mean(1).mean() + mixed.square().mean()
        self.log("loss", loss)
        return loss


class Tokens(Small):
    """A mean over the tokens whose labels count, and a figure of each row beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Layer(3, 4), Layer(4, 3, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        logits = self.head(self.encoder(batch["x"]))
        labels = torch.where(batch["y"] > 0.5, IGNORED, (batch["y"] > 0).long())
        counted = batch_sum((labels != IGNORED).sum())
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = batch_sum(loss) / counted
        self.log("loss", loss)
        self.log("tokens", counted.to(loss.dtype))
        self.log("size", logits.square().mean())
        return loss


class Branching(Small):
    """Decides by the number of rows that it gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Layer(3, 4)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        z = self.a(batch["x"])
        return (z @ gather_batch(z).t()).mean() if len(gather_batch(z)) < 99 else z.mean()


def model(*tasks: type[Small]) -> Any:
    torch.manual_seed(0)
    return multi({task.__name__.lower(): task() for task in tasks}, "adamw")


def loader(task: type[Small], seed: int, sizes: list[int]) -> Given:
    if task is Tokens:
        return Given(random_samples(sum(sizes), seed, x=(5, 3), y=(5,)), sizes)
    validation = random_samples(5, seed + 1, x=(3,))
    return Validated(random_samples(sum(sizes), seed, x=(3,), y=(2,)), sizes, validation=validation)


def data(*tasks: type[Small]) -> Any:
    """Ragged: at times fewer rows than devices."""
    return together(**{t.__name__.lower(): loader(t, k, [6, 5, 1, 3]) for k, t in enumerate(tasks)})


def graph_of(*tasks: type[Small]) -> OperatorGraph:
    capture = captured(model(*tasks), data(*tasks), operators=(Part,))
    assert not capture.coarse
    return capture.graph


@functools.cache
def reference(*tasks: type[Small]) -> Any:
    return plain_fit(lambda: model(*tasks), lambda: data(*tasks))


@pytest.mark.parametrize("task", [Contrast, Repelling])
def test_a_loss_of_all_pairs_is_split(task: type[Small]) -> None:
    graph = graph_of(task)
    assert {o.layout for o in graph.operators} == {Layout.SPLIT}
    assert {v.dim for v in graph.values if v.reading is Reading.GATHERED} == {0}


def test_a_mean_over_tokens_is_summed_where_the_tokens_are() -> None:
    """Only the division of two numbers is left for one device, or for each."""
    graph = graph_of(Tokens)
    summed = [v for v in graph.values if v.reading is Reading.SUMMED]
    assert [v.shape for v in summed] == [(), ()]
    operators, producers = graph.operator_map(), graph.producers()
    assert {operators[producers[v.name]].layout for v in summed} == {Layout.SPLIT}


def test_a_condition_on_gathered_rows_makes_a_step_one_operator() -> None:
    """An operator that checked it on its own rows would find another number."""
    with pytest.warns(CaptureWarning, match="depends on sizes"):
        capture = captured(model(Branching), data(Branching), operators=(Part,))
    assert list(capture.coarse) == ["branching/step"]


CASES = {
    "one": (1, {"": (0,)}, [Contrast, Repelling, Tokens]),
    "together": (3, {"": (0, 1, 2)}, [Contrast, Repelling, Tokens]),
    "four": (4, {"": (3, 1, 0, 2)}, [Contrast]),
    "four-tokens": (4, {"": (0, 1, 2, 3)}, [Tokens]),
    "apart": (3, {"": (2, 0), "contrast/a": (0, 1), "contrast/b": (2,)}, [Contrast]),
    "other-order": (2, {"": (1, 0), "repelling/encoder": (0, 1)}, [Repelling]),
    "elsewhere": (4, {"": (2, 3, 0), "tokens/encoder": (0, 1)}, [Tokens]),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str) -> None:
    devices, groups, tasks = CASES[case]
    ours = forced_fit(lambda: model(*tasks), lambda: data(*tasks), devices, groups)
    assert_same_fit(ours, reference(*tasks))


def test_planned() -> None:
    """On measured costs; ``seq`` gives each operator every device that divides its rows."""
    make, given, strategy = (
        lambda: model(Contrast, Tokens),
        lambda: data(Contrast, Tokens),
        {"planner": "seq"},
    )
    assert_same_fit(spindle_fit(make, given, 2, strategy=strategy), reference(Contrast, Tokens))


class OneStep(LightningModule):
    """A module of its own over both loaders, whose losses it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.contrast, self.tokens = Contrast(), Tokens()

    def training_step(self, batch: dict[str, Sample], batch_idx: int) -> torch.Tensor:
        x, y = batch["contrast"]["x"], batch["contrast"]["y"]
        a, b = self.contrast.a(x), self.contrast.b(y)
        logits, labels = self.tokens.head(self.tokens.encoder(batch["tokens"]["x"])), batch["tokens"]["y"]
        error = batch_sum((logits.sum(-1) - labels).square()[labels > 0].sum()) / batch_sum(
            (labels > 0).sum()
        )
        return F.cross_entropy(a @ gather_batch(b).t(), batch_rows(a)) + error.sqrt()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_step_over_several_loaders() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return OneStep()

    ours = spindle_fit(make, lambda: data(Contrast, Tokens), 3, strategy={"planner": "seq"})
    assert_same_fit(ours, plain_fit(make, lambda: data(Contrast, Tokens)))


def test_only_features_travel() -> None:
    """Each of four devices sends its rows of both features to each other one, and gets gradients back."""
    devices, rows, width, item_bytes = 4, 8, 4, 8

    def given() -> Any:
        return together(contrast=loader(Contrast, 0, [rows] * 3))

    plan = placement(metagraph(model(Contrast), given()), devices, {"": tuple(range(devices))})

    def rank(index: int, size: int) -> Watch:
        watch, strategy = Watch(), SpindleStrategy(plan=plan, operators=(Part,), timeline=False)
        fit_once(lambda: model(Contrast), given, strategy, devices=size, max_epochs=1, callbacks=[watch])
        watch._counter = None
        return watch

    ranks = run_ranks(rank, devices, timeout_s=120.0)
    messages, own_bytes = 2 * (devices - 1), rows // devices * width * item_bytes
    for watch in ranks:
        counts = watch.counts[1]  # a second batch needs no headers
        for way in ("sent", "received"):
            assert counts.messages[way] == {Kind.ACTIVATION: messages, Kind.GRADIENT: messages}
            # An entry of each gradient says whether there is one.
            assert counts.bytes[way] == {
                Kind.ACTIVATION: messages * own_bytes,
                Kind.GRADIENT: messages * (own_bytes + item_bytes),
            }
        assert counts.flops == ranks[0].counts[1].flops > 0
    program = ranks[0].program
    assert program is not None
    for work in rank_work(program, graph_of(Contrast), {"contrast": rows}):
        for traffic in (work.sent[Kind.ACTIVATION], work.received[Kind.GRADIENT]):
            assert traffic.bytes == messages * own_bytes // 2  # captured in float32


def meeting(graph: OperatorGraph) -> list[tuple[str, str]]:
    """Each operator that gives a value and one that reads it from the whole batch."""
    values, producers = graph.value_map(), graph.producers()
    return [
        (producers[v], o.name)
        for o in graph.operators
        for v in o.inputs
        if values[v].reading is not Reading.OWN
    ]


def test_a_producer_and_who_gathers_its_rows_are_never_one_run() -> None:
    graph = graph_of(Contrast, Repelling, Tokens)
    for light in (0.25, 100.0):
        home = {o: m.name for m in contract(graph, light=light).metaops for layer in m.layers for o in layer}
        assert all(home[giver] != home[reader] for giver, reader in meeting(graph))


def test_a_run_that_gathers_from_itself_is_refused() -> None:
    graph = graph_of(Contrast)
    giver, reader = meeting(graph)[0]
    others = [o.name for o in graph.operators if o.name not in (giver, reader)]
    runs = [(o,) for o in others] + [(giver, reader)]
    placed = [
        ProgramRun(i, names[0], "contrast", names, (0, 1), Layout.SPLIT) for i, names in enumerate(runs)
    ]
    with pytest.raises(ValueError, match=r"invalid plan: .* of the whole batch, and is in the same run"):
        lower(placed, graph, 2, holders([(placed, graph)]), trainable=None)


def test_measured_against_all_rows() -> None:
    """A pass over some rows times them against the whole batch's, as an iteration would."""
    single = model(Contrast)
    capture = captured(single, data(Contrast), operators=(Part,))
    loss = next(o for o in capture.graph.operators if o.name == "contrast/loss")
    callables = {name: piece.build() for name, piece in capture.pieces.items()}
    seen: list[list[int]] = []

    def watched(*arguments: Any) -> Any:
        seen.append(sorted(len(a) for a in arguments if isinstance(a, torch.Tensor)))
        return built(*arguments)

    built, callables[loss.name] = callables[loss.name], watched
    draw = torch.Generator().manual_seed(1)
    leaves = [torch.randn(7, 3, generator=draw), torch.randn(7, 2, generator=draw)]
    parameters = dict(single.named_parameters())
    passes = TaskPasses("contrast", capture, callables, parameters, leaves, torch.device("cpu"))
    passes.run(7)
    passes.run(2)
    assert seen[1] == [2] * (len(seen[0]) - 2) + [7, 7]
