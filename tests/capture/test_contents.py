"""Attributes of modules: what changed in them is found, put back, and done to another copy of the model."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from lightning_spindle.capture.changes import Change, apply
from lightning_spindle.capture.contents import Contents
from lightning_spindle.capture.places import packed, unpacked

CPU = torch.device("cpu")


class Meter(dict[str, Any]):
    """Its constructor is its own."""

    def __init__(self) -> None:
        super().__init__(n=0)


@dataclass
class Run:
    losses: list[float]


class Pair(NamedTuple):
    first: list[int]
    second: torch.Tensor


class Holder(nn.Module):
    """Holds things of all kinds, some of them in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("buffer", torch.zeros(2))
        self.none: Any = None
        self.number, self.tensor = 1, torch.zeros(2)
        self.alias, self.part = self.tensor, self.tensor[:1]
        self.list: list[Any] = [torch.ones(1), 2]
        self.same_list = self.list
        self.nested: dict[str, Any] = {"a": [1], "b": {"c": torch.zeros(())}, "d": ([], torch.zeros(1))}
        self.entry = self.nested["b"]
        self.ordered = OrderedDict(a=1, b=2)
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.set, self.deque = {1, 2}, deque([torch.zeros(1), torch.ones(1)], maxlen=2)
        self.pair, self.meter, self.run = Pair([1], torch.zeros(1)), Meter(), Run([1.0])
        self.array, self.sparse = np.zeros(3), torch.eye(2).to_sparse()
        self.wide, self.meta = torch.zeros(1).expand(3), torch.zeros(2, device="meta")
        self.of_parameters: dict[Any, Any] = {p: [0] for p in self.linear.parameters()}
        self.buffers_too = [self.buffer]
        self.itself: list[Any] = [1]
        self.itself.append(self.itself)
        deep: list[Any] = []
        for _ in range(3000):
            deep = [deep, deep]
        self.deep = deep


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mean, self.cat = Holder(), MeanMetric(), CatMetric()


def model_in(inference: bool) -> Any:
    torch.manual_seed(0)
    with torch.inference_mode(inference):
        return Model()


def assigned(h: Any) -> None:
    h.none, h.number, h.new = "text", h.number + 1, {"x": torch.ones(2)}
    h.run = Run([2.0])


def filled(h: Any) -> None:
    h.list.append(torch.ones(3))
    h.nested["a"].append(2)
    h.nested["e"] = h.nested.get("e", 0) + 1
    h.set.add(len(h.set) + 3)
    h.deque.append(torch.full((1,), 5.0))
    h.itself.append(3)
    h.counts["x"] += 1
    h.meter["n"] += 1
    h.pair.first.append(4)
    h.of_parameters[h.linear.weight].append(1)


def replaced(h: Any) -> None:
    h.list[0] = 5
    h.list.pop()
    h.nested.pop("a", None)
    h.ordered.move_to_end(next(iter(h.ordered)))
    h.set.clear()
    h.deque.rotate()


def written(h: Any) -> None:
    h.tensor += 1
    h.list[0].mul_(4)
    h.nested["b"]["c"] += 2
    h.nested["d"][0].append(torch.ones(2))
    h.nested["d"][1].fill_(3)
    h.pair.second.add_(1)
    h.array += 1
    h.deque[1].add_(1)


def moved(h: Any) -> None:
    """What is new holds what was there before, and twice the same."""
    both = [h.tensor]
    h.first, h.second = {"x": both, "y": both}, h.nested["b"]
    h.weights = list(h.linear.parameters())
    h.seen = [h.buffer, h.list, h.linear]
    h.list.append(h.entry)


def removed(h: Any) -> None:
    vars(h).pop("number", None)


CASES = [assigned, filled, replaced, written, moved, removed]
INFERENCE = pytest.mark.parametrize("inference", [False, True], ids=["counted", "inference"])


def state(holder: Any) -> list[tuple[str, Any]]:
    """What the attributes hold, with numbers for what is the same."""
    numbers: dict[int, int] = {}
    known = {id(v): name for name, v in (*holder.named_parameters(), *holder.named_modules())}
    own = {k: v for k, v in vars(holder).items() if k not in nn.Module().__dict__ and k != "deep"}
    return [(name, plain(own[name], numbers, known)) for name in sorted(own)]


def plain(value: Any, numbers: dict[int, int], known: dict[int, str]) -> Any:
    """Something that compares by content."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Run):
        return value.losses
    if not isinstance(value, (torch.Tensor, np.ndarray, dict, list, tuple, deque)):
        return value
    if id(value) in numbers:
        return numbers[id(value)]
    numbers[id(value)] = len(numbers)
    if isinstance(value, torch.Tensor):
        return ("meta",) if value.is_meta else (value.layout, value.to_dense().tolist())
    if isinstance(value, np.ndarray):
        return ("array", value.tolist())
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return type(value), [(plain(k, numbers, known), plain(v, numbers, known)) for k, v in items]


def changed_by(model: Any, change: Callable[[Any], Any], clones: bool = False) -> Contents:
    before = Contents(model, clones=clones)
    with before.watched(thoroughly=False):
        change(model.inner)
    return before


def done_elsewhere(contents: Contents, other: nn.Module) -> list[Change]:
    """The changes, sent and done to another copy."""
    changes = contents.changes()
    apply(unpacked(packed(changes, contents.places()), other, CPU))
    return changes


@INFERENCE
@pytest.mark.parametrize("change", CASES)
def test_changes_done_to_another_copy_make_it_the_same(
    change: Callable[[Any], None], inference: bool
) -> None:
    """Also of tensors of inference mode, which count no writes. What is the same stays the same."""
    model, other = model_in(inference), model_in(inference)
    with torch.inference_mode(inference):
        for _ in range(1 if change is replaced else 2):
            found = done_elsewhere(changed_by(model, change), other)
            assert state(other.inner) == state(model.inner)
        assert found or change is removed
        assert changed_by(model, lambda h: None).changes() == []
        for holder in (model.inner, other.inner):  # as a hook of every rank does
            holder.tensor += 1
            holder.nested["b"]["c"] += 1
        assert state(other.inner) == state(model.inner)


@INFERENCE
@pytest.mark.parametrize("change", CASES)
def test_changes_are_put_back(change: Callable[[Any], None], inference: bool) -> None:
    model = model_in(inference)
    model.inner.not_a_number = torch.tensor([float("nan")])
    before = str(state(model.inner))
    with torch.inference_mode(inference):
        contents = changed_by(model, change, clones=True)
    assert {c.name.partition(".")[0] for c in contents.changes()} == {"inner"}
    contents.put_back()
    assert str(state(model.inner)) == before
    assert Contents(model, clones=True).changes() == []


def test_a_tensor_that_was_resized() -> None:
    model, other = model_in(False), model_in(False)
    done_elsewhere(changed_by(model, lambda h: h.tensor.resize_(3).fill_(2.0)), other)
    assert other.inner.alias.tolist() == [2.0, 2.0, 2.0]
    changed_by(model, lambda h: h.tensor.resize_(1), clones=True).put_back()
    assert model.inner.alias.tolist() == [2.0, 2.0, 2.0]


def test_metrics_are_followed_with_their_lists() -> None:
    model, other = model_in(False), model_in(False)
    for value in (1.0, 2.0, 5.0):
        contents = Contents(model, clones=False)
        for metric in (model.mean, model.cat):
            metric(torch.tensor([value, value]))
        done_elsewhere(contents, other)
    assert other.mean.compute() == model.mean.compute() == pytest.approx(8 / 3)
    assert torch.equal(other.cat.compute(), model.cat.compute())
    assert other.mean.update_count == 3


def test_a_list_sends_what_is_new_in_it() -> None:
    model = model_in(False)
    model.inner.list.extend(torch.zeros(1000) for _ in range(50))
    contents = changed_by(model, lambda h: h.list.append(torch.zeros(1)))
    (change,) = contents.changes()
    assert (change.kept, change.count) == (52, 52)
    assert len(packed(change, contents.places())) < 1000
    contents = changed_by(model, lambda h: h.list.pop(0))
    assert len(packed(contents.changes(), contents.places())) < 20_000


def test_names_and_what_was_empty_before() -> None:
    contents = changed_by(model_in(False), assigned)
    assert {(c.name, c.fresh) for c in contents.changes()} == {
        ("inner.none", True),
        ("inner.number", False),
        ("inner.new", True),
        ("inner.run", False),
    }


def test_writes_that_tensors_do_not_count() -> None:
    """Through ``.data``: seen where copies are kept, or each operation is looked at."""
    model = model_in(False)
    for clones in (False, True):
        contents = Contents(model, clones=clones)
        with contents.watched(thoroughly=True):
            model.inner.nested["d"][1].data.add_(1)
        (change,) = contents.changes()
        assert change.hidden
        assert change.name == "inner.nested"


def test_who_reaches_what_was_changed() -> None:
    model = model_in(False)
    model.mean.shared = model.inner.nested["d"]
    contents = changed_by(model, written)
    reaching = [contents.reaching(c) for c in contents.changes()]
    assert reaching.count({"inner", "mean"}) == 2
    assert reaching.count({"inner"}) == len(reaching) - 2


def test_a_copy_that_was_not_the_same_is_an_error() -> None:
    model, other = model_in(False), model_in(False)
    other.inner.list.append(3)
    message = r"inner\.(same_)?list was not the same on all ranks.*3 entries, not 2"
    with pytest.raises(ValueError, match=message):
        done_elsewhere(changed_by(model, lambda h: h.list.append(1)), other)
    del other.inner.nested["a"]
    with pytest.raises(LookupError):
        done_elsewhere(changed_by(model, lambda h: h.nested["a"].clear()), other)
