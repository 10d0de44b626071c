"""Operator graphs of the paper's workloads, written by hand, and random ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_spindle.graph import Layout, Operator, OperatorGraph, Parameter, Value

MB = 1 << 20


@dataclass
class GraphBuilder:
    """Adds operators one at a time; each gives one value, called like itself."""

    operators: list[Operator] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    def add(self, task, module, signature, inputs=(), flops=1.0, size=MB, layout=Layout.SPLIT, shared=True):
        name = f"{task}/{module}"
        parameter = module if shared else name
        self.parameters.setdefault(parameter, Parameter(parameter, MB, True))
        self.values.append(Value(name, 0, 1, size, True))
        self.operators.append(
            Operator(name, task, signature, layout, tuple(inputs), (name,), (parameter,), flops)
        )
        return name

    def tower(self, task, module, layers, inputs=(), flops=100.0, stem=True, norm=True, size=MB, cross=()):
        """A stem, blocks (which all read ``cross``) and a final norm, as transformers have them."""
        at = list(inputs)
        if stem:
            at = [self.add(task, f"{module}.stem", f"{module}.stem", at, flops / 50, size)]
        for i in range(layers):
            at = [self.add(task, f"{module}.blocks.{i}", f"{module}.block", [*at, *cross], flops, size)]
        if norm:
            at = [self.add(task, f"{module}.norm", f"{module}.norm", at, flops / 100, size // 8)]
        return at[0]

    def build(self) -> OperatorGraph:
        return OperatorGraph(
            tuple(self.operators),
            tuple(self.values),
            tuple(self.parameters.values()),
            rows=tuple(self.rows.items()),
        )


_TOWERS = {"vision": 32, "text": 24, "audio": 12, "thermal": 12, "depth": 12, "motion": 6}
_CLIP = [
    "text-audio",
    "vision-depth",
    "audio-thermal",
    "motion-thermal",
    "vision-text",
    "vision-audio",
    "depth-text",
    "thermal-text",
    "vision-thermal",
    "motion-text",
]


def clip(tasks: int) -> OperatorGraph:
    """Multitask-CLIP: two towers and a contrastive loss for each task."""
    b = GraphBuilder()
    for pair in _CLIP[:tasks]:
        ends = [b.tower(pair, m, _TOWERS[m]) for m in pair.split("-")]
        b.add(pair, "loss", "clip", ends, flops=1.0, layout=Layout.WHOLE)
        b.rows[pair] = 128
    return b.build()


_OFASYS = {
    "caption": (("vision", 18),),
    "speech": (("audio", 2),),
    "motion": (("motion", 2),),
    "grounding": (("vision", 18), ("text", 0)),
    "infilling": (("text", 0),),
    "structure": (("text", 0),),
    "vqa": (("vision", 18), ("text", 0)),
}


def ofasys(tasks: int) -> OperatorGraph:
    """OFASys: adaptors (text: an embedding, light), an encoder and a decoder that reads its output."""
    b = GraphBuilder()
    for task in list(_OFASYS)[:tasks]:
        ends = []
        for module, layers in _OFASYS[task]:
            if layers:
                ends.append(b.tower(task, module, layers))
            else:
                ends.append(b.add(task, f"{module}.embed", "embed", flops=0.0))
        at = b.tower(task, "encoder", 12, ends, stem=False)
        at = b.tower(task, "decoder", 12, cross=[at])
        b.add(task, "head", "head", [at], flops=10.0)
        b.rows[task] = 128
    return b.build()


def qwenval() -> OperatorGraph:
    """QWen-VAL: vision and audio encoders, a resampler, the language model."""
    b = GraphBuilder()
    for task, modules in {"vl": ("vision",), "al": ("audio",), "val": ("vision", "audio")}.items():
        ends = [b.add(task, "embed", "embed", flops=0.0)]
        for module in modules:
            end = b.tower(task, module, {"vision": 48, "audio": 32}[module])
            if module == "vision":
                end = b.add(task, "resampler", "resampler", [end], flops=20.0)
            ends.append(end)
        at = b.tower(task, "llm", 32, ends, stem=False, flops=400.0)
        b.add(task, "head", "head", [at], flops=800.0)
        b.rows[task] = 64
    return b.build()
