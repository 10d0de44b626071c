"""What a fault is, and how it is put in place."""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SITE = Path(__file__).parents[1] / "support" / "fault_site"
OURS = ("lightning_spindle", "tasks", "datamodules", "train", "benchmark", "benchmarking", "tests")


@dataclass(frozen=True, slots=True)
class Fault:
    """One function of ours replaced, and who must notice.

    ``target`` is ``"module:qualname"`` of a function, method, static or class method or property.
    ``body`` takes the original function and returns the faulty one. Each of ``tests`` is a pytest node id, of
    which at least one case must fail.
    """

    name: str
    target: str
    body: Callable[[Callable[..., Any]], Callable[..., Any]]
    tests: tuple[str, ...]


def put_in_place(fault: Fault) -> None:
    """Replace the fault's target in this process and in the Python processes it starts."""
    module_name, _, qualname = fault.target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *path, attribute = qualname.split(".")
    for part in path:
        owner = getattr(owner, part)
    held = vars(owner)[attribute]
    if isinstance(held, staticmethod | classmethod):
        replacement: Any = type(held)(_marked(fault.body(held.__func__), held.__func__))
    elif isinstance(held, property):
        assert held.fget is not None
        replacement = property(_marked(fault.body(held.fget), held.fget), held.fset, held.fdel)
    else:
        replacement = _marked(fault.body(held), held)
    setattr(owner, attribute, replacement)
    _exchange_in_modules(held, replacement)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(SITE) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, paths)])


def _marked(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement, leaving a mark for the runner when it is called."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if mark := os.environ.get("SPINDLE_FAULT_REACHED"):
            Path(mark).touch()
        return replacement(*args, **kwargs)

    return call


def _exchange_in_modules(held: Any, replacement: Any) -> None:
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] not in OURS:
            continue
        for key, value in list(vars(module).items()):
            if value is held:
                setattr(module, key, replacement)
            elif type(value) is dict:
                value.update({k: replacement for k, v in value.items() if v is held})
