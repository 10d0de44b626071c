"""What can come from the values of given tensors, whatever they happen to be on an example."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_spindle.capture.provenance import independent

TABLE = torch.arange(12.0).reshape(3, 4)


def _written_through_a_view(x: Tensor) -> Tensor:
    table = TABLE.clone()
    table[1:].add_(x[:2])
    return table


def _assigned(x: Tensor) -> Tensor:
    table = TABLE.clone()
    table[0] = x[0]
    return table


def _out(x: Tensor) -> Tensor:
    table = torch.empty(3, 4)
    torch.mul(x, 0.0, out=table)
    return table.view(12)


FREE: dict[str, Callable[[Tensor], Any]] = {
    "table": lambda x: TABLE[: x.shape[1] - 1].t(),
    "positions": lambda x: torch.arange(len(x), dtype=x.dtype)[:, None] - torch.arange(x.size(1)),
    "zeros": lambda x: torch.zeros(x.shape, dtype=x.dtype, device=x.device),
    "by dimensions": lambda x: TABLE * x.numel() if x.dim() == 2 and x.is_floating_point() else x,
    "none": lambda x: None,
}
BOUND: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "a limit": lambda x: (x > 1e6).any(),
    "no share of it": lambda x: TABLE + 0 * x,
    "a view": lambda x: x.view(-1)[:0],
    "where": lambda x: torch.where(torch.isinf(x).any(), 1.0, 2.0),
    "written through a view": _written_through_a_view,
    "assigned": _assigned,
    "out": _out,
    "item": lambda x: TABLE * (x[0, 0].item() > 1e6),
    "a condition": lambda x: TABLE if x.sum() < 1e6 else x,
    "tolist": lambda x: torch.tensor([row[0] > 1e6 for row in x.tolist()]),
    "numpy": lambda x: torch.from_numpy(x.numpy().clip(0, 0)),
    "equal": lambda x: TABLE * torch.equal(x, x),
    "chance": lambda x: torch.rand(4) * 0,
    "dropout": lambda x: F.dropout(TABLE, 0.5),
}


@pytest.mark.parametrize("case", FREE)
def test_shapes_are_no_values(case: str) -> None:
    x = torch.ones(3, 4)
    assert independent(lambda: (FREE[case](x), x + 1), [x]) == [True, False]


@pytest.mark.parametrize("case", BOUND)
def test_values_that_an_example_does_not_show(case: str) -> None:
    x = torch.ones(3, 4)
    assert independent(lambda: BOUND[case](x), [x]) == [False]
