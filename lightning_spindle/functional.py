"""Marks in a task's own code where samples of a batch are coupled.

Both functions are the identity under every strategy, and Spindle handles them as it handles
any other operation: what couples samples after them is run whole, on one device. They change
no number today. They say what is meant, so that code written with them can be divided over
devices once the runtime gathers and sums there, without a change.
"""

import torch


def gather_batch(x: torch.Tensor) -> torch.Tensor:
    """``x`` with the rows of the whole batch: for what compares each sample with all others.

    >>> gather_batch(torch.tensor([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    return x


def batch_sum(x: torch.Tensor) -> torch.Tensor:
    """``x``, a sum over rows, over the rows of the whole batch: for a mean over what is not a row.

    >>> batch_sum(torch.tensor(3.0)).item()
    3.0
    """
    return x
