"""The engine on a hand-written graph, under forced plans, with sends that block."""

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spindle.program import ProgramRun, holders, lower, place_plan
from lightning_spindle.runtime.engine import Engine
from lightning_spindle.runtime.transport import ProcessGroupTransport
from lightning_spindle.simulate import check_deadlock
from tests.support import handmade
from tests.support.handmade import ROWS, Handmade, forced_plan, metagraph
from tests.support.ranks import run_threads

WEIGHTS = {"pair": 1.0, "score": 0.5, "plain": 2.0}
STEPS = 5
RAGGED = [ROWS, {"pair": 2, "score": 3, "plain": 1}, {"pair": 4, "score": 0, "plain": 2}, ROWS, ROWS]


def everywhere(group: Any) -> dict[str, Any]:
    return {name: (group[:1] if name == "pair/loss" else group) for name in handmade.METAOPS}


Placement = tuple[int, dict[str, Any]]
"""A number of devices, and the devices of each MetaOp (as ``forced_plan`` takes them)."""

PLACEMENTS: dict[str, Placement] = {
    "one device": (1, everywhere((0,))),
    "data parallel 2": (2, everywhere((0, 1))),
    "data parallel 3": (3, everywhere((0, 1, 2))),
    "data parallel 4": (4, everywhere((0, 1, 2, 3))),
    "a task each": (
        3,
        everywhere((0,)) | {"score/text": (1,), "score/loss": (1,), "plain/plain": (2,), "plain/loss": (2,)},
    ),
    "towers apart": (2, everywhere((0,)) | {"pair/text": (1,), "score/text": (1,)}),
    "loss on its own device": (3, everywhere((0, 1)) | {"pair/loss": (2,), "score/loss": (2,)}),
    "growing groups": (
        4,
        everywhere((0, 1, 2, 3)) | {"pair/image": (0,), "pair/text": (0, 1), "score/text": [(3,), (0, 2)]},
    ),
    "shrinking, crossing groups": (
        4,
        everywhere((1, 3))
        | {
            "pair/image": [(0, 1, 2), (3, 2)],
            "pair/text": [(2, 0), (0, 2)],
            "score/loss": (0, 1, 2),
            "pair/loss": (3,),
        },
    ),
    "shared encoder, overlapping groups": (
        4,
        everywhere((0,)) | {"pair/text": (0, 1), "score/text": [(1, 2), (3,)], "plain/plain": (0, 1, 2, 3)},
    ),
    "layers of one MetaOp apart": (
        3,
        everywhere((2, 0)) | {"pair/image": [(0,), (1,)], "pair/text": [(2, 1, 0), (1,)]},
    ),
    "reversed order of devices": (3, everywhere((2, 1, 0)) | {"score/loss": (0, 1, 2)}),
    "an idle device": (4, everywhere((0, 2))),
}


def optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@functools.cache
def initial_model() -> Handmade:
    """Built once: the default generator is shared by ranks that are threads."""
    torch.manual_seed(0)
    return Handmade()


def reference(
    opt: str, rows: list[Mapping[str, int]]
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    model = copy.deepcopy(initial_model())
    stepper = optimizer(opt, model.parameters())
    history = []
    for step, row in enumerate(rows):
        losses = model.losses(handmade.batches(step, row))
        stepper.zero_grad()
        sum(WEIGHTS[t] * loss for t, loss in losses.items()).backward()
        stepper.step()
        history.append({t: loss.item() for t, loss in losses.items()})
    return dict(model.named_parameters()), history


def build_runs(placement: Placement) -> tuple[ProgramRun, ...]:
    devices, where = placement
    return place_plan(forced_plan(devices, where), metagraph(), handmade.capture(initial_model()).graph)


def build_engine(
    transport: ProcessGroupTransport,
    placement: Placement,
    kind: type[Engine] = Engine,
    groups: int | None = None,
) -> tuple[Engine, dict[str, torch.nn.Parameter]]:
    """One rank's engine on a model of its own, and the parameters that the rank holds."""
    devices, _ = placement
    model = copy.deepcopy(initial_model())
    capture = handmade.capture(model)
    runs = build_runs(placement)
    held = holders([(runs, capture.graph)])
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    program = lower(runs, capture.graph, devices, held, trainable=names, groups=groups)
    check_deadlock(program)
    transport.prepare(program.groups())
    mine = {n: p for n, p in model.named_parameters() if transport.rank in held.get(n, ())}
    operators = [o for r in program.runs if transport.rank in r.devices for o in r.operators]
    engine = kind(
        program,
        capture,
        {name: capture.pieces[name].build() for name in operators},
        mine,
        transport,
        torch.device("cpu"),
    )
    return engine, mine


def train_rank(
    transport: ProcessGroupTransport,
    placement: Placement,
    opt: str,
    rows: list[Mapping[str, int]],
    groups: int | None = None,
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], list[set[str]]]:
    """One rank's training; returns the parameters that it holds, the losses it saw, what had gradients."""
    engine, mine = build_engine(transport, placement, groups=groups)
    history, used = [], []
    stepper = optimizer(opt, mine.values()) if mine else None
    for step, row in enumerate(rows):
        iteration = engine.forward(
            handmade.task_batches(handmade.batches(step, row)), index=step, batch_idx=step
        )
        history.append({r.task: float(v) for r, v in iteration.results.items()})
        if stepper:
            stepper.zero_grad()
        engine.backward(iteration, WEIGHTS, sync=True)
        used.append({n for n, p in mine.items() if p.grad is not None})
        if stepper:
            stepper.step()
    return {n: p.detach() for n, p in mine.items()}, history, used


def on_ranks(
    devices: int, call: Callable[[ProcessGroupTransport], Any], blocking_sends: bool = True
) -> list[Any]:
    """``call`` with the transport of each rank, a thread; by rank."""
    initial_model()
    store = dist.HashStore()
    limit = timedelta(seconds=10)

    def rank(index: int, size: int, group: Any) -> Any:
        def subgroup(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
            if index not in ranks:
                return None
            scope = dist.PrefixStore(str(ranks), store)
            return dist.ProcessGroupGloo(scope, ranks.index(index), len(ranks), limit)

        transport = ProcessGroupTransport(group, subgroup, timeout=limit, blocking_sends=blocking_sends)
        transport.prepare([])
        return call(transport)

    return run_threads(rank, devices)


def run(
    placement: Placement,
    opt: str = "adamw",
    rows: list[Mapping[str, int]] | None = None,
    groups: int | None = None,
) -> list[Any]:
    return on_ranks(placement[0], lambda t: train_rank(t, placement, opt, rows or [ROWS] * STEPS, groups))


def assert_parity(
    placement: Placement, opt: str, rows: list[Mapping[str, int]], groups: int | None = None
) -> None:
    expected, losses = reference(opt, rows)
    ranks = run(placement, opt, rows, groups)
    seen: dict[str, torch.Tensor] = {}
    for parameters, history, _ in ranks:
        for ours, theirs in zip(history, losses, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-9, atol=1e-9)
            assert torch.equal(seen.setdefault(name, value), value), f"holders of {name} differ"
    trained = {n for n in expected if not n.startswith("unused")}
    assert seen.keys() == trained


@pytest.mark.parametrize("opt", ["sgd", "adamw"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_parity(placement: str, opt: str) -> None:
    """C01, C06, C18: gradients do not depend on how many ranks hold what."""
    assert_parity(PLACEMENTS[placement], opt, [ROWS] * STEPS)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_parity_with_ragged_batches(placement: str) -> None:
    """C02, C03: fewer rows than devices, changing rows, an idle task."""
    assert_parity(PLACEMENTS[placement], "adamw", RAGGED)


@pytest.mark.parametrize("placement", ["data parallel 3", "growing groups"])
def test_parity_of_runs_in_pieces(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer goes back by itself, so that its gradients are summed beside the others' backward."""
    whole = len(build_runs(PLACEMENTS[placement]))
    monkeypatch.setattr(sys.modules[__name__], "place_plan", functools.partial(place_plan, piece_bytes=1))
    assert len(build_runs(PLACEMENTS[placement])) > whole
    assert_parity(PLACEMENTS[placement], "adamw", RAGGED)


@pytest.mark.parametrize("groups", [0, 1])
def test_parity_where_devices_add_zeros_for_parameters_that_they_do_not_hold(groups: int) -> None:
    """The pool of parameter device groups is full: sums go over wider groups."""
    assert_parity(
        PLACEMENTS["shared encoder, overlapping groups"],
        "adamw",
        [{"pair": 5, "score": 7, "plain": 3}, {"pair": 4, "score": 2, "plain": 0}],
        groups,
    )


def test_idle_parameters_have_no_gradient() -> None:
    """C03, M10: a parameter that nothing used keeps grad None on all of its holders."""
    rows = [{"pair": 4, "score": 2, "plain": 0}]
    for parameters, _, used in run(PLACEMENTS["data parallel 3"], rows=rows):
        assert {n for n in parameters if n.startswith("plain")}
        assert not any(n.startswith("plain") for n in used[0])
        assert any(n.startswith("text") for n in used[0])


@st.composite
def placements(draw: st.DrawFn, max_devices: int = 5) -> Placement:
    """Any devices in any order for each MetaOp, or for each of its layers."""
    devices = draw(st.integers(1, max_devices))

    def group() -> tuple[int, ...]:
        return tuple(draw(st.permutations(range(devices)))[: draw(st.integers(1, devices))])

    where: dict[str, Any] = {}
    for name, (layers, _) in handmade.METAOPS.items():
        where[name] = [group() for _ in range(layers)] if layers > 1 and draw(st.booleans()) else group()
    return devices, where | {"pair/loss": where["pair/loss"][:1]}


# From idle tasks and fewer rows than devices to more.
any_rows = st.fixed_dictionaries({task: st.integers(0, 9) for task in ROWS}).filter(lambda r: any(r.values()))


@settings(max_examples=25)
@given(placements(), st.lists(any_rows, min_size=2, max_size=3))
def test_parity_of_random_placements(placement: Placement, rows: list[Mapping[str, int]]) -> None:
    """C02, C03, NOHANG: whatever runs where and however many rows there are, sends that block included."""
    assert_parity(placement, "adamw", rows)


def test_parity_on_eight_ranks() -> None:
    """Groups of 8, 5, 4, 3, 2 and 1 of 8 ranks, aligned and not; 7, 5 and 3 rows, then fewer."""
    everyone = tuple(range(8))
    where = everywhere(everyone) | {
        "pair/image": [(4, 5, 6, 7), (1, 3, 5, 7, 0)],
        "pair/text": [everyone, (6, 2)],
        "pair/loss": (7,),
        "score/text": [(0, 1, 2, 3), (7, 6, 5)],
        "score/loss": (3, 4),
        "plain/plain": (2,),
    }
    assert_parity((8, where), "adamw", RAGGED)
