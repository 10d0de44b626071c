"""A model of three tasks whose operator graph is written by hand: what the engine is tested on.

Tasks "pair" (contrastive, couples samples) and "score" (regression) share the text encoder
and a scale parameter; "plain" is alone. Everything is in float64.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lightning_spindle.capture.pieces import (
    BatchLayout,
    Capture,
    LeafLayout,
    LeafRef,
    Piece,
    Source,
    ValueRef,
)
from lightning_spindle.graph import (
    Layout,
    MetaGraph,
    MetaOp,
    Operator,
    OperatorGraph,
    Parameter,
    Reduction,
    Result,
    Value,
)
from lightning_spindle.plan import Configuration, ExecutionPlan, Run
from lightning_spindle.runtime.engine import TaskBatch

WIDTH = 6
ROWS = {"pair": 7, "score": 5, "plain": 3}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Handmade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.ModuleList([Block(), Block()])
        self.text = nn.ModuleList([Block(), Block()])
        self.plain = nn.ModuleList([Block()])
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.double()

    def losses(self, batches: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        found = {}
        for task, batch in batches.items():
            found[task] = getattr(self, f"_{task}")(batch)
        return found

    def encode(self, blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = block(x)
        return x

    def _pair(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return contrast(self.encode(self.image, batch["x"]), self.encode(self.text, batch["y"]), self.scale)

    def _score(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return ((self.encode(self.text, batch["x"]) * self.scale - batch["y"]) ** 2).mean()

    def _plain(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.encode(self.plain, batch["x"]).abs().mean()


def contrast(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t() * scale.exp()
    target = torch.arange(logits.shape[0])
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def batches(step: int, rows: Mapping[str, int] = ROWS) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        task: {k: torch.randn(n, WIDTH, dtype=torch.float64, generator=generator) for k in ("x", "y")}
        for task, n in rows.items()
        if n
    }


def task_batches(given: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, TaskBatch]:
    return {t: TaskBatch(len(b["x"]), pytree.tree_leaves(b)) for t, b in given.items()}


X, Y = LeafRef(0), LeafRef(1)


def capture(model: Handmade) -> Capture:
    """The capture of ``Handmade``, as if it had been traced."""
    operators: list[Operator] = []
    values: list[Value] = []
    pieces: dict[str, Piece] = {}
    names = {id(p): n for n, p in model.named_parameters()}

    def add(
        name: str,
        sources: tuple[Source, ...],
        call: Callable[..., Any],
        *uses: nn.Module | nn.Parameter,
        layout: Layout = Layout.SPLIT,
        scalar: bool = False,
    ) -> ValueRef:
        used = [p for u in uses for p in ([u] if isinstance(u, nn.Parameter) else u.parameters())]
        inputs = tuple(s.name for s in sources if isinstance(s, ValueRef))
        output = f"{name}:out"
        task = name.split("/")[0]
        operators.append(
            Operator(
                name,
                task,
                type(uses[0]).__name__ if uses else "loss",
                layout,
                inputs,
                (output,),
                tuple(names[id(p)] for p in used),
            )
        )
        dim = None if scalar else 0
        values.append(Value(output, dim, 1, ROWS[task] * WIDTH * 8, True))
        pieces[name] = Piece(name, sources, (output,), lambda: lambda *args: (call(*args),))
        return ValueRef(output)

    image = add("pair/image.0", (X,), model.image[0], model.image[0])
    image = add("pair/image.1", (image,), model.image[1], model.image[1])
    text = add("pair/text.0", (Y,), model.text[0], model.text[0])
    text = add("pair/text.1", (text,), model.text[1], model.text[1])
    add(
        "pair/loss",
        (image, text),
        lambda a, b: contrast(a, b, model.scale),
        model.scale,
        layout=Layout.WHOLE,
        scalar=True,
    )
    score = add("score/text.0", (X,), model.text[0], model.text[0])
    score = add("score/text.1", (score,), model.text[1], model.text[1])
    add(
        "score/loss",
        (score, Y),
        lambda z, y: ((z * model.scale - y) ** 2).mean(),
        model.scale,
        scalar=True,
    )
    plain = add("plain/plain.0", (X,), model.plain[0], model.plain[0])
    add("plain/loss", (plain,), lambda z: z.abs().mean(), scalar=True)
    parameters = tuple(
        Parameter(n, p.numel() * 8, p.requires_grad, "float64") for n, p in model.named_parameters()
    )
    results = (
        Result("pair", "loss", "pair/loss:out", Reduction.WHOLE),
        Result("score", "loss", "score/loss:out", Reduction.MEAN),
        Result("plain", "loss", "plain/loss:out", Reduction.MEAN),
    )
    graph = OperatorGraph(tuple(operators), tuple(values), parameters, results, tuple(ROWS.items()))
    spec = pytree.tree_structure({"x": 0, "y": 0})
    layout = BatchLayout(spec, (LeafLayout(0), LeafLayout(0)))
    return Capture(graph, pieces, dict.fromkeys(ROWS, layout))


METAOPS = {
    "pair/image": (2, ()),
    "pair/text": (2, ()),
    "pair/loss": (1, ("pair/image", "pair/text")),
    "score/text": (2, ()),
    "score/loss": (1, ("score/text",)),
    "plain/plain": (1, ()),
    "plain/loss": (1, ("plain/plain",)),
}


def metagraph() -> MetaGraph:
    return MetaGraph(
        tuple(
            MetaOp(
                name,
                name.split("/")[0],
                tuple((name if name.endswith("loss") else f"{name}.{k}",) for k in range(layers)),
                after,
                ROWS[name.split("/")[0]],
                len(after) and 1,
                Layout.WHOLE if name == "pair/loss" else Layout.SPLIT,
            )
            for name, (layers, after) in METAOPS.items()
        )
    )


def forced_plan(devices: int, where: Mapping[str, Any]) -> ExecutionPlan:
    """A plan that runs MetaOps one after another; ``where`` maps each to its devices.

    A MetaOp may map to a list of device groups, one for each layer.
    """
    runs: list[Run] = []
    for name, (layers, _) in METAOPS.items():
        groups = where[name] if isinstance(where[name], list) else [where[name]]
        step = layers // len(groups)
        for k, group in enumerate(groups):
            at = float(len(runs))
            runs.append(Run(name, k * step, (k + 1) * step, group, at, at + 1, Configuration(len(group))))
    return ExecutionPlan("forced", devices, tuple(runs), float(len(runs)))
