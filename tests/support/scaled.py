"""The hand-written graphs of the paper's workloads at the paper's sizes: FLOPs, activations, parameters."""

from dataclasses import replace

from lightning_spindle.graph import OperatorGraph, Reduction, Result
from tests.planner.graphs import clip

GFLOP = 10.0
"""Of one unit of the builder's FLOPs: a vision layer of 128 samples has 1,000."""
KEPT = 12
"""Bytes that an operator keeps for each byte of its output."""


def multitask_clip(tasks: int) -> OperatorGraph:
    """Multitask-CLIP's first tasks: towers of transformer layers and a loss over each whole batch.

    Outputs of a layer are 64 MB for a batch of 128, parameters of an operator 16 MB.
    """
    graph = clip(tasks)
    losses = {o.outputs[0]: o.task for o in graph.operators if o.name.endswith("/loss")}
    values = [
        replace(v, dim=None, bytes=4) if v.name in losses else replace(v, bytes=64 * v.bytes)
        for v in graph.values
    ]
    sizes = {v.name: v.bytes for v in values}
    operators = [
        replace(o, forward_flops=o.forward_flops * GFLOP * 1e9, activation_bytes=KEPT * sizes[o.outputs[0]])
        for o in graph.operators
    ]
    return replace(
        graph,
        operators=tuple(operators),
        values=tuple(values),
        parameters=tuple(replace(p, bytes=16 * p.bytes) for p in graph.parameters),
        results=tuple(Result(task, "loss", name, Reduction.WHOLE) for name, task in losses.items()),
    )
