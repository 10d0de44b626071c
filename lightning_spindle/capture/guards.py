"""Checks inside pieces: a split mean must be a mean over rows on every batch, not on the example alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

_FUNCTIONS = (F.cross_entropy, F.nll_loss)
_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)


def guard(graph: fx.Graph, node: fx.Node, module: nn.Module | None, task: str) -> None:
    """Before a mean cross-entropy, ``node`` of ``graph``: raise where a label is ignored."""
    if isinstance(module, _MODULES):
        options: dict[str, Any] = {"reduction": module.reduction, "ignore_index": module.ignore_index}
    elif node.target in _FUNCTIONS:
        options = dict(node.kwargs)
    else:
        return
    given = list(node.args) + [node.kwargs[k] for k in ("input", "target") if k in node.kwargs]
    if options.get("reduction", "mean") == "mean" and len(given) > 1 and len(node.args) < 3:
        ignored = options.get("ignore_index", -100)
        with graph.inserting_before(node):
            graph.call_function(refuse_ignored, (given[1], ignored, task))


def refuse_ignored(target: torch.Tensor, ignored: int, task: str) -> None:
    """Raise where ``target`` has an ignored label.

    Raises:
        RuntimeError: a mean over the labels that count is no mean over rows, and the loss was split.
    """
    if target.is_floating_point():
        return
    message = (
        f"task {task!r}: a label equals ignore_index ({ignored}), which no label of the captured example "
        "did, so the loss was split over rows. Write the mean as cross_entropy(..., reduction='sum') / "
        f"(labels != {ignored}).sum(), or give ignore_index another value than the default: the loss then "
        "runs on whole batches"
    )
    if target.is_cuda:
        torch._assert_async((target != ignored).all(), message)  # no synchronisation
    elif bool((target == ignored).any()):
        raise RuntimeError(message)
