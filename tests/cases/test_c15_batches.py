"""C15: whatever a batch is built of is taken apart and put together, and its rows stay together."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from transformers.modeling_outputs import BaseModelOutput
from transformers.tokenization_utils_base import BatchEncoding

from lightning_spindle.capture import BatchLayout, batch_layout, flatten, take_rows, unflatten
from lightning_spindle.capture.layout import layout_like
from tests.strategy.ending import assert_all_ended, watch_fit
from tests.support.fitting import assert_same_fit, plain_fit
from tests.support.small import Given, Layer, Small, forced_fit, multi, together

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Plain:
    x: Any
    rest: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    rest: Any = dataclasses.field(default=None, kw_only=True)


# ------------------------------------------------------------------- any tree, any parts
def rows_of(kind: str, rows: int) -> Any:
    """A leaf of ``rows`` rows, told apart by its entries; or one without rows."""
    numbers = torch.arange(float(rows))
    return {
        "tensor": numbers[:, None] * 10 + torch.arange(2.0),
        "second": torch.arange(3.0)[:, None] * 100 + numbers,
        "twice": torch.arange(2.0 * rows),
        "strings": [f"row {i}" for i in range(rows)],
        "tuple of strings": tuple(f"row {i}" for i in range(rows)),
        "numbers": list(range(rows)),
        "nothing": [None] * rows,
        "ragged": [torch.full((i % 3, 4), float(i)) for i in range(rows)],
        "records": [{"boxes": torch.full((1,), float(i)), "name": f"{i}"} for i in range(rows)],
        "scalar": 0.07,
        "word": "text",
        "flag": True,
        "absent": None,
        "number": torch.tensor(1.5),
        "weights": torch.arange(10.0),
    }[kind]


KINDS = [*("tensor", "second", "twice", "strings", "tuple of strings", "numbers", "nothing"), "ragged",
         *("records", "scalar", "word", "flag", "absent", "number", "weights")]  # fmt: skip
CONTAINERS = {
    "dict": lambda a, b: {"a": a, "b": b},
    "ordered": lambda a, b: OrderedDict(a=a, b=b),
    "mapping": lambda a, b: UserDict({"a": a, "b": b}),
    "encoding": lambda a, b: BatchEncoding({"a": a, "b": b}),
    "list": lambda a, b: [{"inner": a}, b],
    "tuple": lambda a, b: (a, {"inner": b}),
    "named": Pair,
    "plain": Plain,
    "frozen": lambda a, b: Frozen(a, rest=b),
    "output": lambda a, b: BaseModelOutput(last_hidden_state=a, hidden_states={"inner": b}),
}
trees = st.recursive(
    st.sampled_from(KINDS),
    lambda inner: st.tuples(st.sampled_from(sorted(CONTAINERS)), inner, inner),
    max_leaves=6,
)


def built(tree: Any, rows: int) -> Any:
    if isinstance(tree, str):
        return rows_of(tree, rows)
    kind, a, b = tree
    return CONTAINERS[kind](built(a, rows), built(b, rows))


def joined(parts: list[list[Any]], layout: BatchLayout) -> list[Any]:
    """The leaves of parts that follow each other, as one."""
    whole = []
    for leaves, of in zip(zip(*parts, strict=True), layout.leaves, strict=True):
        if of.dim is None:
            whole.append(leaves[0])
        elif isinstance(leaves[0], torch.Tensor):
            whole.append(torch.cat(leaves, of.dim))
        else:
            whole.append([entry for leaf in leaves for entry in leaf])
    return whole


def assert_equal(a: Any, b: Any) -> None:
    """Equal in type and content."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, (dict, UserDict)):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_equal(getattr(a, field.name), getattr(b, field.name))
    else:
        assert a == b


@settings(max_examples=150, deadline=None)
@given(tree=trees, rows=st.integers(1, 7), cuts=st.lists(st.integers(0, 7), max_size=3))
def test_c15_parts_make_the_batch(tree: Any, rows: int, cuts: list[int]) -> None:
    whole = ("tuple", "tensor", tree)  # something has rows
    batch = built(whole, rows)
    layout = batch_layout(batch, lambda items: built(whole, len(items)), [0] * rows)
    leaves, spec = flatten(batch, layout.lists)
    assert spec == layout.spec
    assert layout.rows(leaves) == rows
    assert len(layout.names) == len(set(layout.names)) == len(leaves)
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    parts = [take_rows(leaves, layout, a, b) for a, b in pairwise(edges)]
    assert_equal(unflatten(joined(parts, layout), spec), batch)
    for (first, last), part in zip(pairwise(edges), parts, strict=True):
        if last > first:
            own = layout.rows(part)
            assert own == last - first
    other = built(whole, rows + 2)
    assert flatten(other, layout.lists)[1] == spec, "the number of rows is no part of the structure"


# ------------------------------------------------------------------------ the case's own batch
def sample(i: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(i)
    return {
        "image": torch.randn(3, generator=draw) + i,
        "caption": f"row {i}",
        "id": i,
        "boxes": torch.full((1 + i % 3, 2), float(i)),
    }


WEIGHTS = torch.linspace(0.5, 1.5, 6)


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The class weights have as many entries as some batches have rows."""
    return {
        "image": torch.stack([s["image"] for s in samples]),
        "captions": [s["caption"] for s in samples],
        "ids": [s["id"] for s in samples],
        "meta": {"source": None},
        "temperature": 0.07,
        "scale": torch.tensor(2.0),
        "weights": WEIGHTS,
        "boxes": [s["boxes"] for s in samples],
    }


class Mixed(Small):
    """Uses everything in the batch, and checks that rows belong together."""

    checked = False

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Layer(3, 6), Layer(6, 6, last=True)

    def features(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.head(self.encoder(batch["image"]))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        x = self.features(batch) / batch["temperature"] * batch["scale"]
        assert batch["meta"]["source"] is None
        loss = (x * batch["weights"]).square().mean()
        self.log("loss", loss)
        return loss


class Checked(Mixed):
    """Looks at captions and boxes row by row, which runs as one operator with all rows."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        total = super().training_step(batch, batch_idx)
        for i, caption, boxes in zip(batch["ids"], batch["captions"], batch["boxes"], strict=True):
            assert caption == f"row {i}"
            assert bool((boxes == i).all())
            total = total + 0.01 * boxes.sum()
        assert len(batch["image"]) == len(batch["captions"])
        return total


def data(sizes: list[int]) -> Any:
    return together(t=Given([sample(i) for i in range(sum(sizes))], sizes, collate))


def model(kind: type[Mixed]) -> Any:
    torch.manual_seed(0)
    return multi({"t": kind()}, "adamw")


@pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")
@pytest.mark.parametrize("kind", [Mixed, Checked])
def test_c15_strings_lists_flags_and_ragged_boxes_in_a_fit(kind: type[Mixed]) -> None:
    """A group of four; class weights of as many entries as there are rows stay whole."""
    sizes = [6, 5, 4]
    groups: dict[str, tuple[int, ...]] = {"t/": (0, 1, 2, 3)}
    ours = forced_fit(partial(model, kind), partial(data, sizes), 4, groups, max_steps=3)
    assert_same_fit(ours, plain_fit(partial(model, kind), partial(data, sizes), max_steps=3))


def test_c15_rows_belong_together_in_each_shard() -> None:
    samples = [sample(i) for i in range(6)]
    batch = collate(samples)
    layout = batch_layout(batch, collate, samples)
    leaves, _ = flatten(batch, layout.lists)
    for first, last in ((0, 2), (2, 3), (3, 5), (5, 6)):
        part = unflatten(take_rows(leaves, layout, first, last), layout.spec)
        assert part["captions"] == [f"row {i}" for i in part["ids"]]
        assert part["ids"] == list(range(first, last))
        assert torch.equal(part["image"], batch["image"][first:last])
        assert [float(boxes[0, 0]) for boxes in part["boxes"]] == part["ids"]
        assert part["weights"] is WEIGHTS
        assert part["temperature"] == 0.07


class Numbered(Small):
    """Batches are tuples of a tensor and a string a row, as torch collates them; the last has a row less."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Layer(3, 1, last=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, _ = batch
        loss = self.head(x).square().mean()
        self.log("loss", loss)
        return loss


def test_c15_tuples_of_strings_do_not_depend_on_the_rows() -> None:
    samples = [(torch.full((3,), float(i)), f"row {i}") for i in range(7)]
    batch = default_collate(samples)
    assert isinstance(batch[1], tuple)
    layout = batch_layout(batch, default_collate, samples)
    assert layout.names == ("[0]", "[1]")
    assert flatten(default_collate(samples[:3]))[1] == layout.spec

    def make() -> Any:
        torch.manual_seed(0)
        return multi({"t": Numbered()})

    given = lambda: together(t=Given(samples, [4, 3]))  # noqa: E731  # type: ignore[arg-type]
    ours = forced_fit(make, given, 2, {"t/": (0, 1)}, max_steps=2)
    assert_same_fit(ours, plain_fit(make, given, max_steps=2))


# ----------------------------------------------------------------------- what is ambiguous
def test_c15_ambiguous_leaves_are_refused_by_name() -> None:
    """Without a collate function rows lie in the leading dimension, which all tensors must share."""
    with pytest.raises(ValueError, match=r"\['boxes'\]\[0\] has 2 entries .* \['x'\] has 4"):
        batch_layout({"x": torch.ones(4, 2), "boxes": [torch.ones(2), torch.ones(4)]})
    with pytest.raises(ValueError, match=r"\.rest\['weights'\] has 3 entries"):
        batch_layout(Frozen(torch.ones(4), rest={"weights": torch.ones(3)}))
    odd = lambda items: {"x": torch.ones(len(items)), "odd": [torch.ones(1)] * (len(items) + 1)}  # noqa: E731
    with pytest.raises(ValueError, match=r"\['odd'\]: a list of 3 entries for 2 rows and 4 for 3"):
        batch_layout(odd([1, 2]), odd, [1, 2])


def test_c15_another_structure_is_read_by_the_first_one() -> None:
    samples = [sample(i) for i in range(6)]
    known = batch_layout(collate(samples), collate, samples)
    batch = {key: value for key, value in collate(samples).items() if key != "weights"} | {
        "new": torch.ones(6, 2)
    }
    layout = layout_like(batch, known)
    leaves, _ = flatten(batch, layout.lists)
    assert layout.rows(leaves) == 6
    assert dict(zip(layout.names, layout.leaves, strict=True))["['new']"].dim == 0
    with pytest.raises(ValueError, match=r"\['new'\] has 5 entries .* 6 rows"):
        layout_like(batch | {"new": torch.ones(5)}, known)


def test_c15_rows_that_do_not_agree_are_an_error_on_every_rank() -> None:
    def uneven(samples: list[Any]) -> dict[str, Any]:
        batch = collate(samples)
        return batch if samples[0]["id"] < 4 else {**batch, "captions": batch["captions"][:-1]}

    outcomes = watch_fit(
        2,
        lambda rank: model(Mixed),
        lambda rank: together(t=Given([sample(i) for i in range(8)], [4, 4], uneven)),
    )
    assert_all_ended(outcomes, "task t", r"have \[3, 4\] rows")
