"""What couples the samples of a batch, written so that Spindle can divide it over devices.

In one process, and under any other strategy, ``gather_batch`` and ``batch_sum`` are the identity and
``batch_rows`` counts. Under Spindle the devices of an operator have a part of the batch's rows each, and
what compares rows with each other would have to run whole, on one device. Where a step says by these
functions what it needs of the other rows, every device computes its own rows of the loss. Losses and
gradients are those of one process either way.

A contrastive loss, and a mean over the tokens that count:

>>> import torch.nn.functional as F
>>> def contrastive(a, b):  # a, b: [rows, features]
...     labels = batch_rows(a)
...     of_a, of_b = a @ gather_batch(b).t(), b @ gather_batch(a).t()
...     return (F.cross_entropy(of_a, labels) + F.cross_entropy(of_b, labels)) / 2
>>> contrastive(torch.eye(2), torch.eye(2)).item()
0.3132616...
>>> def token_mean(logits, labels):  # [rows, tokens, classes] and [rows, tokens]; -100 is ignored
...     loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
...     return batch_sum(loss) / batch_sum((labels != -100).sum())
>>> token_mean(torch.zeros(2, 2, 3), torch.tensor([[0, 1], [2, -100]])).item()
1.098612...
"""

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary


def gather_batch(x: torch.Tensor) -> torch.Tensor:
    """``x`` with the rows of the whole batch: for what compares each sample with all others.

    Guarantees: rows are in the batch's order, wherever they were computed, and gradients flow back to
    there. What is computed from gathered tensors alone is computed on one device.

    >>> gather_batch(torch.tensor([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    if has_torch_function_unary(x):
        return handle_torch_function(gather_batch, (x,), x)
    return x


def batch_sum(x: torch.Tensor) -> torch.Tensor:
    """``x``, a sum over rows, over the rows of the whole batch: for a mean over what is not a row.

    >>> batch_sum(torch.tensor(3.0)).item()
    3.0
    """
    if has_torch_function_unary(x):
        return handle_torch_function(batch_sum, (x,), x)
    return x


def batch_rows(x: torch.Tensor) -> torch.Tensor:
    """The numbers in the whole batch, from 0, of the entries of ``x``'s first dimension; int64.

    They are the labels of a contrastive loss: the column of ``gather_batch(x)`` that belongs to each row of
    ``x``. ``torch.arange(len(x))`` counts the same in one process, but says nothing of the other rows: a loss
    that uses it with gathered rows runs whole, on one device.

    >>> batch_rows(torch.zeros(3, 5)).tolist()
    [0, 1, 2]
    """
    if has_torch_function_unary(x):
        return handle_torch_function(batch_rows, (x,), x)
    return torch.arange(len(x), device=x.device)
