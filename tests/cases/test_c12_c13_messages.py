"""C12 and C13: messages between the same ranks keep apart, and their shapes follow the batch."""

import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_spindle.graph import Value
from lightning_spindle.program import Edge, Instruction, Kind
from lightning_spindle.runtime.messages import Messenger
from lightning_spindle.runtime.transport import ProcessGroupTransport
from tests.support.fitting import assert_same_fit, fit_once, plain_fit
from tests.support.ranks import run_threads, watch_ranks
from tests.support.small import (
    Given,
    Layer,
    Part,
    Sample,
    Small,
    forced_fit,
    metagraph,
    multi,
    placement,
    random_samples,
    together,
)

CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------------- C12
def messenger(group: Any) -> Messenger:
    def no_subgroup(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        return None

    return Messenger(ProcessGroupTransport(group, no_subgroup, timeout=timedelta(seconds=10)), CPU)


def test_c12_receives_posted_in_another_order_than_sends() -> None:
    """Values and gradients of two edges, all of one shape, posted in opposite orders: each is itself."""
    value, rows = Value("v", 0, 1, 36, True), (0, 3)
    posts = [
        Instruction(Kind.ACTIVATION, 0),
        Instruction(Kind.ACTIVATION, 1),
        Instruction(Kind.GRADIENT, 0),
        Instruction(Kind.GRADIENT, 1),
    ]

    def rank(index: int, size: int, group: Any) -> Any:
        ours = messenger(group)
        # A gradient has one number more, which says that there is one: all messages are of one size.
        shapes = {Kind.ACTIVATION: (3, 3), Kind.GRADIENT: (2, 4)}
        tensors = {i: torch.full(shapes[i.kind], 1.0 + k) for k, i in enumerate(posts)}
        for at in range(2):  # the first round carries the headers, in one order on both ends
            order = posts if index == 0 or at == 0 else posts[::-1]
            received = {}
            for i in order:
                activation = i.kind is Kind.ACTIVATION
                if index == 0 and activation:
                    ours.send_value(i, Edge(i.index, "v", 0, 1, True), value, tensors[i], rows, 1, ())
                elif index == 0:
                    ours.send_gradient(i, tensors[i], tensors[i], 1)
                elif activation:
                    received[i] = ours.receive_value(i, value, rows, 0, ())
                else:
                    received[i] = ours.receive_gradient(i, tensors[i], rows, 0)
            found = {i: r.tensor() for i, r in received.items()}
            ours.finish()
        return found, tensors

    _, (found, expected) = run_threads(rank, 2)
    for instruction, tensor in expected.items():
        assert torch.equal(found[instruction], tensor), instruction


class Tower(Part):
    """Passes a wide value on; its weight shows which task's value came through it."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Top(Tower):
    """Of another kind, so that the two do not make one MetaOp."""


class Across(Small):
    """Two towers with a value between them that is as wide as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Tower(1.0), Top(0.5)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        seen = self.second(self.first(batch["x"])).mean()
        self.log("seen", seen)
        return seen


class Stream(LightningDataModule):
    """Batches of two rows of a constant, of the given widths."""

    def __init__(self, constant: float, widths: Sequence[int]) -> None:
        super().__init__()
        self.batches = [{"x": torch.full((2, width), constant)} for width in widths]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Streamed(self.batches), batch_size=None)


class Streamed(IterableDataset[Sample]):
    def __init__(self, batches: list[Sample]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.batches)


WIDE = 2 * 2**20  # 32 MB in two rows of float64


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("widths", [[4, WIDE], [4] * 20])
def test_c12_equal_shapes_cross(widths: list[int], order: str) -> None:
    """A goes 0 to 1 while B goes 1 to 0, forward and back: 32 MB once, small ones 20 times."""

    def model() -> Any:
        return multi({task: Across() for task in order})

    def data() -> Any:
        return together(**{task: Stream({"a": 1.0, "b": 2.0}[task], widths) for task in order})

    reference = plain_fit(model, data, max_steps=len(widths))
    assert reference.steps[0]["logged"] == {"a/seen": 0.5, "b/seen": 1.0}
    groups = {"a/first": (0,), "a/": (1,), "b/first": (1,), "b/": (0,)}
    assert_same_fit(forced_fit(model, data, 2, groups, max_steps=len(widths)), reference)


# ---------------------------------------------------------------------------------------------------- C13
class Text(Small):
    """A tower over padded sequences and one over their pooled values."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.pooled = Layer(3, 4), Layer(4, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        hidden = self.tokens(batch["x"])
        loss = F.mse_loss(self.pooled(hidden).mean(1), batch["y"])
        self.log("loss", loss)
        return loss


def pad(samples: list[Sample]) -> dict[str, torch.Tensor]:
    x = nn.utils.rnn.pad_sequence([s["x"] for s in samples], batch_first=True)
    return {"x": x, "y": torch.stack([s["y"] for s in samples])}


LENGTHS, SIZES = [5, 9, 3, 9, 5], [4, 4, 3, 1, 4]


def text_data(lengths: Sequence[int] = LENGTHS, sizes: Sequence[int] = SIZES) -> Any:
    samples: list[Sample] = []
    for at, (length, rows) in enumerate(zip(lengths, sizes, strict=True)):
        for row in range(rows):
            samples += random_samples(1, 100 * at + row, x=(max(1, length - row), 3), y=(1,))
    image = random_samples(sum(sizes), 9, x=(5, 3), y=(1,))
    return together(text=Given(samples, sizes, pad), image=Given(image, sizes))


def text_model() -> Any:
    torch.manual_seed(0)
    return multi({"text": Text(), "image": Text()}, "adamw")


APART = {"text/tokens": (0,), "text/": (1,), "image/": (1,), "image/pooled": (0, 1)}


@pytest.mark.parametrize("groups", [APART, {"text/tokens": (0, 1), "text/": (1, 0), "image/": (0, 1)}])
def test_c13_lengths_and_rows_change(groups: dict[str, tuple[int, ...]]) -> None:
    """Lengths 5, 9, 3, 9, 5 and batches of 4, 4, 3, 1, 4 rows beside a task of fixed length."""
    ours = forced_fit(text_model, text_data, 2, groups, max_steps=5)
    assert_same_fit(ours, plain_fit(text_model, text_data, max_steps=5))


class Flat(Small):
    """Tokens of all rows behind each other, as before the loss of a language model, which couples them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.middle, self.head = Layer(3, 4), Layer(4, 4), Layer(4, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        tokens = self.tokens(batch["x"]).view(-1, 4)
        loss = self.head(self.middle(tokens)).var()
        self.log("loss", loss)
        return loss


def flat_model() -> Any:
    torch.manual_seed(0)
    return multi({"text": Flat(), "image": Text()})


@pytest.mark.parametrize("middle", [(1,), (1, 2), (2, 1, 0)])
def test_c13_tokens_of_rows_of_any_length_are_cut_by_rows(middle: tuple[int, ...]) -> None:
    """Lengths 5, 9, 3, 9, 5 make 5, 9 and 3 entries a row, whatever the example had."""
    groups = {"text/": (0,), "text/tokens": (2, 0), "text/middle": middle, "image/": (0, 1)}
    ours = forced_fit(flat_model, text_data, 3, groups, max_steps=5)
    assert_same_fit(ours, plain_fit(flat_model, text_data, max_steps=5))


class Similar(Small):
    """The similarities of all pairs of rows go through a layer: a value whose every dimension is the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.calibrate = Layer(3, 4), Layer(1, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        z = self.tower(batch["x"])
        scores = self.calibrate((z @ z.t()).unsqueeze(-1)).squeeze(-1)
        loss = F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
        self.log("loss", loss)
        return loss


def similar_model() -> Any:
    torch.manual_seed(0)
    return multi({"pairs": Similar()})


def similar_data() -> Any:
    return together(pairs=Given(random_samples(12, 8, x=(3,)), [4, 3, 1, 4]))


def test_c13_a_value_of_rows_by_rows_changes_with_the_rows() -> None:
    groups = {"pairs/": (1,), "pairs/tower": (0,), "pairs/calibrate": (0,), "pairs/loss": (1,)}
    ours = forced_fit(similar_model, similar_data, 2, groups, max_steps=4)
    assert_same_fit(ours, plain_fit(similar_model, similar_data, max_steps=4))


def test_c13_a_wrong_shape_plan_is_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends remember a form that is not the tensor's: errors name task, value and edge; nothing hangs."""
    graph = metagraph(text_model(), text_data())
    plan = placement(graph, 2, {"text/": (1,), "text/tokens": (0,), "image/": (1,)})
    original = Messenger.send_value, Messenger.receive_value

    def corrupt(messenger: Messenger) -> None:
        for key, form in messenger._forms.items():
            object.__setattr__(form, "shape", (*form.shape[:-1], form.shape[-1] + 3))
            messenger._forms[key] = form

    def send(self: Messenger, *args: Any) -> None:
        corrupt(self)
        original[0](self, *args)

    def receive(self: Messenger, *args: Any) -> Any:
        corrupt(self)
        return original[1](self, *args)

    monkeypatch.setattr(Messenger, "send_value", send)
    monkeypatch.setattr(Messenger, "receive_value", receive)

    def rank(index: int, size: int) -> None:
        from lightning_spindle.strategy import SpindleStrategy

        strategy = SpindleStrategy(plan=plan, operators=(Part,), timeout=timedelta(seconds=5))
        # The same shapes twice: the second time both ends go by what they remember.
        fit_once(text_model, lambda: text_data([5, 5, 5], [4, 4, 4]), strategy, size, max_steps=3)

    outcomes = watch_ranks(rank, 2, timeout_s=40, group_timeout_s=5)
    assert not any(o.hung for o in outcomes)
    for outcome in outcomes:
        assert outcome.error is not None, outcome.describe()
        assert "InstructionError" in outcome.error
        assert re.search(r"edge \d, value text/tasks_text_tokens", outcome.error), outcome.error
    assert any("the receiver expects" in str(o.error) for o in outcomes)
