"""``BaseFinetuning`` compares the values of parameters, which may be elsewhere, with an optimizer's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning, Callback


@contextmanager
def completed_for_finetuning(
    callbacks: Iterable[Callback], complete: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Inside, hooks of finetuning callbacks that look at parameters run inside ``complete()``."""
    finetuning = [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
    for callback in finetuning:
        callback.on_train_epoch_start = _inside(complete, callback.on_train_epoch_start)
    try:
        yield
    finally:
        for callback in finetuning:
            vars(callback).pop("on_train_epoch_start", None)


def _inside(
    complete: Callable[[], AbstractContextManager[None]], call: Callable[..., None]
) -> Callable[..., None]:
    def called(*args: Any) -> None:
        with complete():
            call(*args)

    return called
