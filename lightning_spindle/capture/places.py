"""Where things are in a model, and objects sent by where they are."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class At:
    """The key of a dict that is number ``place`` of them."""

    place: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is: a "module", "parameter" or "buffer" by its name, or at the end of ``keys``.

    ``keys``: an attribute of the module ``path``, then keys of containers below it.
    """

    kind: str
    path: str
    keys: tuple[Any, ...] = ()

    @classmethod
    def attribute(cls, path: str, name: str) -> Place:
        """Of the module ``path``."""
        return cls("attribute", path, (name,))

    def below(self, key: Any) -> Place:
        """An entry of what is here."""
        return Place(self.kind, self.path, (*self.keys, key))

    @property
    def name(self) -> str:
        """As the user would write it after the model's name."""
        return ".".join(filter(None, (self.path, *map(str, self.keys[:1]))))

    def found(self, model: nn.Module) -> Any:
        """What is here in ``model``.

        Raises:
            LookupError: nothing is.
        """
        if self.kind == "parameter":
            return model.get_parameter(self.path)
        if self.kind == "buffer":
            return model.get_buffer(self.path)
        found: Any = model.get_submodule(self.path)
        for at, key in enumerate(self.keys):
            found = vars(found)[key] if at == 0 else found[_key(found, key)]
        return found


def _key(container: Any, key: Any) -> Any:
    return next(islice(container, key.place, None)) if isinstance(key, At) else key


def packed(obj: Any, places: Mapping[int, Place]) -> bytes:
    """``obj`` in bytes, where what has a place (by id) is only named; tensors without autograd.

    Raises:
        Exception: of pickle's or of an object's own, where something in it cannot be sent.
    """
    stream = io.BytesIO()
    _Packer(stream, places).dump(obj)
    return stream.getvalue()


def unpacked(data: bytes, model: nn.Module, device: torch.device) -> Any:
    """What was packed; what was named is what ``model`` has there.

    Tensors that were on the CPU are, others on ``device``.

    Raises:
        LookupError: ``model`` has nothing at a place that was named.
    """
    return _Unpacker(io.BytesIO(data), model, device).load()


class _Packer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, places: Mapping[int, Place]) -> None:
        super().__init__(stream)
        self._places = places

    def persistent_id(self, obj: Any) -> Place | None:
        return self._places.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
            return NotImplemented
        if obj.device.type == "meta" or obj.is_nested:
            return NotImplemented
        plain = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, obj.dtype, tuple(obj.shape), obj.device.type == "cpu")


class _Unpacker(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, model: nn.Module, device: torch.device) -> None:
        super().__init__(stream)
        self._model, self._device = model, device

    def persistent_load(self, pid: Place) -> Any:
        return pid.found(self._model)

    def find_class(self, module: str, name: str) -> Any:
        own = super().find_class(module, name)
        return partial(own, device=self._device) if own is _tensor else own


def _tensor(
    data: bytes, dtype: torch.dtype, shape: tuple[int, ...], on_cpu: bool, device: torch.device | None = None
) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape) if on_cpu or device is None else flat.reshape(shape).to(device)
