"""Small objects between ranks, and proof that ranks agree. All functions are collective."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_spindle.runtime.failures import PeerError
from lightning_spindle.runtime.transport import Transport, everyone

_MEETING_TAG = 2**29 + 1


def broadcast_object(obj: Any, transport: Transport, device: torch.device, source: int = 0) -> Any:
    """``obj`` of rank ``source`` on every rank (tensors in it come on the CPU)."""
    if transport.size == 1:
        return obj
    ranks = everyone(transport)
    data = _pack(obj) if transport.rank == source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    transport.broadcast(size, source, ranks).wait()
    buffer = data.to(device) if transport.rank == source else _buffer(size, device)
    transport.broadcast(buffer, source, ranks).wait()
    return obj if transport.rank == source else _unpack(buffer)


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], transport: Transport, source: int = 0, chunk_bytes: int = 8 * 2**20
) -> None:
    """Overwrites ``tensors`` with those of rank ``source``, many in one call, on every rank."""
    if transport.size == 1:
        return
    ranks = everyone(transport)
    for chunk in _chunks(tensors, chunk_bytes):
        flat = torch.cat([t.detach().reshape(-1) for t in chunk])
        transport.broadcast(flat, source, ranks).wait()
        at = 0
        for t in chunk:
            t.detach().copy_(flat[at : at + t.numel()].view(t.shape))
            at += t.numel()


def _chunks(tensors: Sequence[torch.Tensor], chunk_bytes: int) -> list[list[torch.Tensor]]:
    """Tensors of one dtype each, up to ``chunk_bytes`` (a larger tensor goes alone)."""
    filling: dict[torch.dtype, list[torch.Tensor]] = {}
    chunks: list[list[torch.Tensor]] = []
    for t in tensors:
        chunk = filling.setdefault(t.dtype, [])
        if chunk and sum(c.nbytes for c in chunk) + t.nbytes > chunk_bytes:
            chunks.append(chunk)
            filling[t.dtype] = chunk = []
        chunk.append(t)
    return chunks + list(filling.values())


def gather_objects(obj: Any, transport: Transport, device: torch.device, tag: int = 0) -> list[Any] | None:
    """Every rank's object on rank 0, in order of ranks (tensors in others' on the CPU); None elsewhere.

    Tensors travel one by one, so that no rank holds more than one of them twice.
    """
    if transport.rank != 0:
        outline, tensors = _outlined(obj)
        data = _pack(outline).to(device)
        transport.send(torch.tensor([data.numel()], dtype=torch.int64, device=device), 0, tag).wait()
        transport.send(data, 0, tag).wait()
        for tensor in tensors:
            transport.send(_bytes_of(tensor.to(device)), 0, tag).wait()
        return None
    found = [obj]
    for rank in range(1, transport.size):
        size = torch.empty(1, dtype=torch.int64, device=device)
        transport.receive(size, rank, tag).wait()
        buffer = _buffer(size, device)
        transport.receive(buffer, rank, tag).wait()
        found.append(_filled(_unpack(buffer), partial(_received, transport, rank, device, tag)))
    return found


@dataclass(frozen=True, slots=True)
class _Outline:
    """Stands for a tensor that travels by itself."""

    shape: torch.Size
    dtype: torch.dtype


def _outlined(obj: Any) -> tuple[Any, list[torch.Tensor]]:
    """``obj`` with outlines in the place of plain tensors, and those tensors."""
    leaves, spec = tree_flatten(obj)
    plain = [v for v in leaves if _is_plain(v)]
    return tree_unflatten([_Outline(v.shape, v.dtype) if _is_plain(v) else v for v in leaves], spec), plain


def _is_plain(value: Any) -> bool:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return plain and value.numel() > 0


def _filled(outline: Any, tensor_like: Callable[[_Outline], torch.Tensor]) -> Any:
    return tree_map(lambda v: tensor_like(v) if isinstance(v, _Outline) else v, outline)


def _received(
    transport: Transport, source: int, device: torch.device, tag: int, outline: _Outline
) -> torch.Tensor:
    tensor = torch.empty(outline.shape, dtype=outline.dtype, device=device)
    transport.receive(_bytes_of(tensor), source, tag).wait()
    return tensor.cpu()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory (of a copy where it is not contiguous); backends do not move every dtype."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def number_of_rank_zero(transport: Transport, device: torch.device, number: int) -> int:
    """Rank 0's number on every rank. All ranks leave together: it serves as a barrier."""
    table = torch.tensor([number if transport.rank == 0 else 0], dtype=torch.int64, device=device)
    transport.all_reduce(table, everyone(transport)).wait()
    return int(table.item())


def meet(what: str, transport: Transport, device: torch.device) -> None:
    """Returns where every rank has called it; messages, so that no other collective pairs with it.

    Raises:
        PeerError: within the transport's limit, naming ``what``.
    """
    token = torch.zeros(1, dtype=torch.int64, device=device)
    try:
        if transport.rank != 0:
            transport.send(token, 0, _MEETING_TAG).wait()
        for rank in range(1, transport.size) if transport.rank == 0 else ():
            transport.receive(token, rank, _MEETING_TAG).wait()
    except PeerError as e:
        raise PeerError(f"{what}: {e}") from e


def require_agreement(what: str, text: str, transport: Transport, device: torch.device) -> None:
    """Returns where ``text`` is the same on all ranks.

    Raises:
        ValueError: on every rank, naming those that differ from rank 0.
    """
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    table = torch.zeros(transport.size, dtype=torch.int64, device=device)
    table[transport.rank] = digest
    transport.all_reduce(table, everyone(transport)).wait()
    digests = table.tolist()
    different = [rank for rank, d in enumerate(digests) if d != digests[0]]
    if different:
        line = _first_difference(text, broadcast_object(text, transport, device))
        lines = broadcast_object(gather_objects(line, transport, device, _MEETING_TAG), transport, device)
        here, there = lines[different[0]]
        raise ValueError(
            f"{what}: ranks {different} do not have what rank 0 has. The first difference on rank "
            f"{different[0]} is {here!r}, where rank 0 has {there!r}. Every rank must build the same model, "
            f"data and plan; look for code that depends on the rank, on unseeded randomness or on the order "
            f"of a set"
        )


def _first_difference(text: str, other: str) -> tuple[str, str]:
    """The first line in which two texts differ, cut to what can be read."""
    for mine, theirs in zip_longest(text.splitlines(), other.splitlines(), fillvalue=""):
        if mine != theirs:
            at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), 0)
            first = max(0, at - 60)
            return mine[first : first + 160], theirs[first : first + 160]
    return "", ""


def _pack(obj: Any) -> torch.Tensor:
    stream = io.BytesIO()
    torch.save(obj, stream)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def _unpack(buffer: torch.Tensor) -> Any:
    # Written by our own ranks, so that it need not be restricted to weights.
    return torch.load(io.BytesIO(buffer.cpu().numpy().tobytes()), map_location="cpu", weights_only=False)


def _buffer(size: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(int(size.item()), dtype=torch.uint8, device=device)
