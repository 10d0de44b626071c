"""Tensors between two shards: their shape, their tag, and whether there is anything in them.

A receiver must know a message's shape beforehand: gloo leaves the tail of a larger buffer
untouched and ends the process where the buffer is smaller. Where the shape follows from
shapes that both ends know (each hosts the task and so has its batch), both remember it from
the first message of that kind; else a small header goes ahead. The sender checks every
tensor against what the receiver expects before it sends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_spindle.graph import Value
from lightning_spindle.program import Edge, Instruction, Kind
from lightning_spindle.runtime.rows import Rows, entries_per_row
from lightning_spindle.runtime.transport import Pending, Transport

Signature = tuple[Any, ...]

_HEADER = 12
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True, slots=True)
class _Form:
    """A message's dtype and shape; the dimension of rows has the entries of one row."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def sized(self, value: Value, rows: Rows) -> tuple[int, ...]:
        if value.dim is None:
            return self.shape
        full = list(self.shape)
        full[value.dim] *= rows[1] - rows[0]
        return tuple(full)


@dataclass(slots=True)
class Received:
    """A message on its way in: ``tensor()`` waits for it and gives its content.

    None is what a gradient message says where nothing used the value.
    """

    rows: Rows
    buffer: torch.Tensor
    pending: Pending
    shape: tuple[int, ...] | None = None

    def tensor(self) -> torch.Tensor | None:
        self.pending.wait()
        if self.shape is None:
            return self.buffer
        return self.buffer[:-1].view(self.shape) if self.buffer[-1] else None


@dataclass(slots=True)
class Messenger:
    """Sends and receives the values and gradients of a program's edges.

    Activation and gradient of edge e carry the tags 2e + 1 and 2e + 2, so that two values
    between the same two ranks never change places.
    """

    transport: Transport
    device: torch.device
    outgoing: list[Pending] = field(default_factory=list)
    _forms: dict[tuple[Instruction, Signature], _Form] = field(default_factory=dict)

    def send_value(
        self,
        instruction: Instruction,
        edge: Edge,
        value: Value,
        tensor: torch.Tensor,
        rows: Rows,
        to: int,
        signature: Signature,
    ) -> None:
        """Sends rows of a value; the caller cut them out of its own.

        Raises:
            ValueError: the tensor has another shape or dtype than the receiver expects.
        """
        tensor = tensor.detach().contiguous()
        tag = tag_of(instruction)
        form = self._forms.get((instruction, signature))
        if form is None or value.dynamic:
            form = _form(tensor, value, rows)
            self._forms[(instruction, signature)] = form
            self._post(_encode(form).to(self.device), to, tag)
        if form.dtype != tensor.dtype or form.sized(value, rows) != tuple(tensor.shape):
            raise ValueError(
                f"edge {edge.index}, value {edge.value}: {tensor.dtype} {tuple(tensor.shape)} is to be sent, "
                f"the receiver expects {form.dtype} {form.sized(value, rows)}; its shape depends on "
                f"values and not only on the batch's shapes"
            )
        self._post(tensor, to, tag)

    def receive_value(
        self,
        instruction: Instruction,
        value: Value,
        rows: Rows,
        source: int,
        signature: Signature,
    ) -> Received:
        """Posts the receive; the form is known, or read from the header first."""
        form = self._forms.get((instruction, signature))
        if form is None or value.dynamic:
            header = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
            self.transport.receive(header, source, tag_of(instruction)).wait()
            form = _decode(header.tolist())
            self._forms[(instruction, signature)] = form
        buffer = torch.empty(form.sized(value, rows), dtype=form.dtype, device=self.device)
        return Received(rows, buffer, self.transport.receive(buffer, source, tag_of(instruction)))

    def send_gradient(
        self, instruction: Instruction, gradient: torch.Tensor | None, like: torch.Tensor, to: int
    ) -> None:
        """Sends a gradient shaped as ``like``, or the word that there is none."""
        buffer = torch.zeros(like.numel() + 1, dtype=like.dtype, device=like.device)
        if gradient is not None:
            buffer[:-1].view(like.shape).copy_(gradient)
            buffer[-1] = 1
        self._post(buffer, to, tag_of(instruction))

    def receive_gradient(
        self, instruction: Instruction, like: torch.Tensor, rows: Rows, source: int
    ) -> Received:
        """Posts the receive of a gradient shaped as ``like``, the rows of the value it belongs to."""
        buffer = torch.empty(like.numel() + 1, dtype=like.dtype, device=like.device)
        pending = self.transport.receive(buffer, source, tag_of(instruction))
        return Received(rows, buffer, pending, tuple(like.shape))

    def finish(self) -> None:
        """Waits until everything sent has left; tensors live until then."""
        for pending in self.outgoing:
            pending.wait()
        self.outgoing.clear()

    def _post(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        self.outgoing.append(self.transport.send(tensor, to, tag))


def tag_of(instruction: Instruction) -> int:
    """The tag of a message: no other between the same two ranks has it."""
    return 2 * instruction.index + (1 if instruction.kind is Kind.ACTIVATION else 2)


def _form(tensor: torch.Tensor, value: Value, rows: Rows) -> _Form:
    shape = list(tensor.shape)
    if value.dim is not None:
        shape[value.dim] = entries_per_row(tensor, value, rows)
    return _Form(tensor.dtype, tuple(shape))


def _encode(form: _Form) -> torch.Tensor:
    if len(form.shape) > _HEADER - 2:
        raise ValueError(f"a value of {len(form.shape)} dimensions cannot be sent (limit {_HEADER - 2})")
    numbers = [_DTYPES.index(form.dtype), len(form.shape), *form.shape]
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64)


def _decode(numbers: list[int]) -> _Form:
    dtype, dimensions, *shape = numbers
    return _Form(_DTYPES[dtype], tuple(shape[:dimensions]))
