"""``BaseFinetuning`` compares the values of parameters, which may be elsewhere, with an optimizer's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning, Callback

_HOOK = "on_train_epoch_start"


@contextmanager
def completed_for_finetuning(
    callbacks: Iterable[Callback], complete: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Inside, hooks of finetuning callbacks that look at parameters run inside ``complete()``.

    Afterwards the callbacks have what they had, be it a hook of their own.
    """
    before = [
        (callback, vars(callback).copy()) for callback in callbacks if isinstance(callback, BaseFinetuning)
    ]
    for callback, _ in before:
        setattr(callback, _HOOK, _inside(complete, getattr(callback, _HOOK)))
    try:
        yield
    finally:
        for callback, own in before:
            delattr(callback, _HOOK)
            if _HOOK in own:
                setattr(callback, _HOOK, own[_HOOK])


def _inside(
    complete: Callable[[], AbstractContextManager[None]], call: Callable[..., None]
) -> Callable[..., None]:
    def called(*args: Any) -> None:
        with complete():
            call(*args)

    return called
