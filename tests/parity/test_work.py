"""Work is really divided: what each rank computes, sends and holds in a fit is what the plan says of it.

All batches have the same shapes but for their rows, so that the example's FLOPs and bytes hold for each.
"""

import functools
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_spindle.capture.flops import flop_counter
from lightning_spindle.capture.pieces import Capture
from lightning_spindle.graph import Layout, MetaGraph
from lightning_spindle.plan import ExecutionPlan
from lightning_spindle.planner.contraction import contract
from lightning_spindle.program import Instruction, Kind, Program, holders, lower, place_plan, spread
from lightning_spindle.runtime.engine import Engine, Iteration, TaskBatch
from lightning_spindle.runtime.session import TRAIN
from lightning_spindle.runtime.transport import LocalTransport, ProcessGroupTransport
from lightning_spindle.strategy import SpindleStrategy
from lightning_spindle.work import Work, rank_work
from tests.support.fitting import captured, placed, random_plan
from tests.support.ranks import run_ranks
from tests.support.small import Given, Small, multi, random_samples, together

WIDTH, LENGTH, ITEM_BYTES = 8, 5, 8
SIZES = {"pair": [8, 8, 3], "score": [6, 6, 1], "solo": [4, 4, 2]}
FULL, RAGGED = 1, 2
"""Batches that are watched: the second, whose messages need no headers any more, and the short last one."""


class Tower(nn.Module):
    """Attention layers over a sequence, and their mean."""

    def __init__(self, inputs: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, WIDTH)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True) for _ in range(layers)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


class Pair(Small):
    """Contrastive: its loss sees all rows."""

    def __init__(self, image: Tower, text: Tower) -> None:
        super().__init__()
        self.image, self.text = image, text

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        a, b = F.normalize(self.image(batch["x"]), dim=-1), F.normalize(self.text(batch["y"]), dim=-1)
        loss = F.cross_entropy(a @ b.t(), torch.arange(len(a)))
        self.log("loss", loss)
        return loss


class Score(Small):
    """A regression on one tower, which the pairs may share."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower, self.head = tower, nn.Linear(WIDTH, 1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.head(self.tower(batch["x"])).square().mean()


def model() -> Any:
    torch.manual_seed(0)
    text = Tower(3, 2)
    return multi({"pair": Pair(Tower(4, 3), text), "score": Score(text), "solo": Score(Tower(2, 2))}, "adamw")


def data() -> Any:
    shapes = {
        "pair": {"x": (LENGTH, 4), "y": (LENGTH, 3)},
        "score": {"x": (LENGTH, 3)},
        "solo": {"x": (LENGTH, 2)},
    }
    return together(
        **{
            task: Given(random_samples(sum(sizes), k, **shapes[task]), sizes)
            for k, (task, sizes) in enumerate(SIZES.items())
        }
    )


def rows_of(batch: int) -> dict[str, int]:
    return {task: sizes[batch] for task, sizes in SIZES.items()}


@dataclass
class Counts:
    """What a rank did in one iteration, as seen from outside."""

    flops: float = 0.0
    messages: dict[str, Counter[Kind]] = field(default_factory=dict)
    bytes: dict[str, Counter[Kind]] = field(default_factory=dict)
    summed_bytes: int = 0
    broadcast_bytes: int = 0


def watch_transport(transport: ProcessGroupTransport, counts: Counts) -> None:
    """Counts what goes through a transport from now on."""
    counts.messages = {"sent": Counter(), "received": Counter()}
    counts.bytes = {"sent": Counter(), "received": Counter()}
    plain = ProcessGroupTransport

    def counted(way: str, call: Any) -> Any:
        def message(tensor: torch.Tensor, peer: int, tag: int) -> Any:
            kind = Kind.ACTIVATION if tag % 2 else Kind.GRADIENT
            counts.messages[way][kind] += 1
            counts.bytes[way][kind] += tensor.nbytes
            return call(transport, tensor, peer, tag)

        return message

    def all_reduce(tensor: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        counts.summed_bytes += tensor.nbytes
        return plain.all_reduce(transport, tensor, ranks)

    def broadcast(tensor: torch.Tensor, source: int, ranks: tuple[int, ...]) -> Any:
        counts.broadcast_bytes += tensor.nbytes
        return plain.broadcast(transport, tensor, source, ranks)

    transport.broadcast = broadcast  # type: ignore[method-assign]
    transport.send = counted("sent", plain.send)  # type: ignore[method-assign]
    transport.receive = counted("received", plain.receive)  # type: ignore[method-assign]
    transport.all_reduce = all_reduce  # type: ignore[method-assign]


class Watch(Callback):
    """Counts the work of some batches, from their start until their end."""

    def __init__(self) -> None:
        self.counts: dict[int, Counts] = {}
        self.live: dict[str, int] = {}
        self.program: Program | None = None
        self._counter: FlopCounterMode | None = None

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        counts = self.counts[index] = Counts()
        if isinstance(trainer.strategy, SpindleStrategy):
            session = trainer.strategy._session
            assert session is not None
            self.program = session.steps[TRAIN].program
            watch_transport(trainer.strategy._transport, counts)  # type: ignore[arg-type]
        self._counter = flop_counter()
        self._counter.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        assert self._counter is not None
        self._counter.__exit__(None, None, None)
        # A copy: what comes after the last batch is no work of it.
        self.counts[index] = replace(self.counts[index], flops=float(self._counter.get_total_flops()))
        self.live = {n: p.nbytes for n, p in module.named_parameters() if p.device.type != "meta"}


def watched_fit(
    devices: int, plan: ExecutionPlan | None = None, plain: bool = False, **options: Any
) -> list[Watch]:
    def rank(index: int, size: int) -> Watch:
        seed_everything(7, verbose=False)
        watch = Watch()
        given = {"plan": plan, "profile_budget_s": 0.2, "planner": "spindle", "timeline": False, **options}
        strategy = "auto" if plain else SpindleStrategy(**given)
        Trainer(
            accelerator="cpu",
            devices=size,
            precision="64-true",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tempfile.gettempdir(),
            strategy=strategy,
            callbacks=[watch],
        ).fit(model(), data())
        watch._counter = None
        return watch

    return run_ranks(rank, devices, timeout_s=120.0, init_group=devices > 1)


@functools.cache
def one_process() -> Watch:
    return watched_fit(1, plain=True)[0]


@functools.cache
def capture() -> Capture:
    double = model().double()
    source = data()
    for given in source.datamodules.values():
        given.samples = [{k: v.double() for k, v in sample.items()} for sample in given.samples]
    return captured(double, source)


@functools.cache
def metagraph() -> MetaGraph:
    return contract(capture().graph)


class _OperatorCounter(Engine):
    """Counts each run's backward; every run is one operator."""

    flops: dict[str, float]

    def _execute(self, instruction: Instruction, *args: Any, **kwargs: Any) -> None:
        with flop_counter() as counter:
            super()._execute(instruction, *args, **kwargs)
        if instruction.kind is Kind.BACKWARD:
            (name,) = self.program.runs[instruction.index].operators
            self.flops[name] = float(counter.get_total_flops())


@functools.cache
def backward_flops() -> dict[str, float]:
    """Of each operator on the whole batch, alone."""
    graph = capture().graph
    runs = spread(graph, 1)
    program = lower(runs, graph, 1, holders([(runs, graph)]), trainable=[p.name for p in graph.parameters])
    callables = {name: piece.build() for name, piece in capture().pieces.items()}
    engine = _OperatorCounter(program, capture(), callables, {}, LocalTransport(), torch.device("cpu"))
    engine.flops = {}
    samples = {task: given.samples[: SIZES[task][0]] for task, given in data().datamodules.items()}
    batches = {
        task: TaskBatch(len(own), [torch.stack([s[k].double() for s in own]) for k in own[0]])
        for task, own in samples.items()
    }
    iteration: Iteration = engine.forward(batches, index=0, batch_idx=0)
    engine.backward(iteration, dict.fromkeys(SIZES, 1.0), sync=True)
    return engine.flops


def expected(program: Program, batch: int) -> tuple[Work, ...]:
    return rank_work(program, capture().graph, rows_of(batch), backward_flops=backward_flops())


def assert_divided(ranks: list[Watch], plan: ExecutionPlan | None) -> None:
    program = ranks[0].program
    assert program is not None
    graph = capture().graph
    for batch in (FULL, RAGGED):
        works = expected(program, batch)
        for rank, (watch, work) in enumerate(zip(ranks, works, strict=True)):
            ours, where = watch.counts[batch], f"batch {batch}, rank {rank}"
            for way, traffic in (("sent", work.sent), ("received", work.received)):
                for kind in (Kind.ACTIVATION, Kind.GRADIENT):
                    flags = traffic[kind].count if kind is Kind.GRADIENT else 0
                    assert ours.messages[way][kind] == traffic[kind].count, f"{where}: {way} {kind}"
                    wanted = traffic[kind].bytes + flags * ITEM_BYTES
                    assert ours.bytes[way][kind] == wanted, f"{where}: {way} {kind}"
            flags = sum(len(b.parameters) for b in program.buckets if rank in b.devices)
            # Every result with who has it, every task's rows, and the digest of what must be alike.
            exchange = (2 * len(graph.results) + len({o.task for o in graph.operators}) + 1) * 8
            # Whether there is a gradient, of each parameter that some rank does not hold.
            shown = sum(len(holders) < program.devices for holders in program.holders.values())
            assert ours.summed_bytes == work.summed.bytes + flags * ITEM_BYTES + exchange + shown, where
            assert ours.broadcast_bytes == work.broadcast.bytes, where
            if batch == FULL:
                assert ours.flops == pytest.approx(work.flops, rel=0.01), where
        total = sum(watch.counts[batch].flops for watch in ranks)
        assert total == pytest.approx(one_process().counts[batch].flops, rel=0.01), f"batch {batch}"
    for rank, (watch, work) in enumerate(zip(ranks, expected(program, FULL), strict=True)):
        assert set(watch.live) == set(work.parameters), f"rank {rank}"
        assert sum(watch.live.values()) == work.parameter_bytes, f"rank {rank}"
        if plan is not None:
            assert set(watch.live) == planned_parameters(plan, rank), f"rank {rank}"


def planned_parameters(plan: ExecutionPlan, rank: int) -> set[str]:
    """Those of the layers that the plan puts on a rank, without the lowering's help."""
    operators = capture().graph.operator_map()
    return {
        p
        for run in plan.runs
        if rank in run.devices
        for layer in metagraph().metaop(run.metaop).layers[run.first : run.last]
        for name in layer
        for p in operators[name].parameters
    }


def test_the_expectation_alone_is_one_process() -> None:
    """What capture and the division rest on: each operator's FLOPs, added, are the plain fit's."""
    graph = capture().graph
    assert not capture().coarse
    assert {o.layout for o in graph.operators} == {Layout.SPLIT, Layout.WHOLE}
    assert {p.dtype for p in graph.parameters} == {"float64"}
    forward = sum(o.forward_flops for o in graph.operators)
    assert forward + sum(backward_flops().values()) == one_process().counts[FULL].flops
    estimated = rank_work(
        lower(
            place_plan(placed(metagraph(), 1, lambda name: (0,)), metagraph(), graph),
            graph,
            1,
            {},
            trainable=[p.name for p in graph.parameters],
        ),
        graph,
    )[0]
    assert estimated.forward_flops == forward
    # Two products for each of forward's: a little less, for inputs that need no gradient.
    assert estimated.backward_flops == pytest.approx(sum(backward_flops().values()), rel=0.1)


@pytest.mark.parametrize("devices", [2, 4])
def test_planned(devices: int) -> None:
    assert_divided(watched_fit(devices), None)


@pytest.mark.parametrize("seed", range(3))
def test_forced(seed: int) -> None:
    devices = 2 + seed % 3
    plan = random_plan(metagraph(), devices, seed)
    assert_divided(watched_fit(devices, plan), plan)


def test_data_parallel() -> None:
    """Everything on all ranks: each does its share of the rows, and holds all parameters of split layers."""
    plan = placed(metagraph(), 4, lambda name: (0, 1, 2, 3))
    ranks = watched_fit(4, plan)
    assert_divided(ranks, plan)
    flops = [watch.counts[FULL].flops for watch in ranks]
    assert max(flops) < 0.5 * sum(flops)
    assert all(set(watch.live) == set(ranks[0].live) for watch in ranks)


@pytest.mark.parametrize("seed", range(2))
def test_sharded_optimizer_state(seed: int) -> None:
    """The new values of all that is shared are broadcast, each once."""
    devices = 2 + 2 * seed
    plan = random_plan(metagraph(), devices, seed)
    ranks = watched_fit(devices, plan, shard_optimizer_state=True)
    assert_divided(ranks, plan)
    program = ranks[0].program
    assert program is not None
    shared = {p for bucket in program.buckets for p in bucket.parameters}
    assert shared
    assert {p for b in program.broadcasts for p in b.parameters} == shared


def test_tasks_apart() -> None:
    """A task each: only the shared tower's gradients travel; each rank holds its own tasks alone."""
    home = {"pair": 0, "score": 1, "solo": 2}
    plan = placed(metagraph(), 3, lambda name: (home[name.split("/")[0]],))
    ranks = watched_fit(3, plan)
    assert_divided(ranks, plan)
    assert not any(watch.counts[FULL].messages["sent"] for watch in ranks)
    assert set(ranks[0].live) & set(ranks[2].live) == set()
    # Shared: the tower by its first task's name.
    assert {n for n in ranks[1].live if n in ranks[0].live} == {n for n in ranks[0].live if ".text." in n}
