"""Spindle for PyTorch Lightning: multi-task models planned and trained over many devices.

Everything here is imported on first use, so that ``import lightning_spindle.planner`` needs neither torch
nor Lightning. ``Trainer(strategy="spindle")`` works once this package has been imported, before or after
Lightning (see ``_registration``).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_spindle import _registration

if TYPE_CHECKING:
    from lightning_spindle import functional
    from lightning_spindle.data import MultiTaskDataModule
    from lightning_spindle.module import MultiTaskModule
    from lightning_spindle.runtime.inspection import inspect
    from lightning_spindle.strategy import SpindleStrategy
    from lightning_spindle.task import SpindleTask

__version__ = "0.1.0"
__all__ = [
    "MultiTaskDataModule",
    "MultiTaskModule",
    "SpindleStrategy",
    "SpindleTask",
    "__version__",
    "functional",
    "inspect",
]

# Exported name → the module it lives in (a submodule is its own name).
_HOMES = {
    "MultiTaskDataModule": "lightning_spindle.data",
    "MultiTaskModule": "lightning_spindle.module",
    "SpindleStrategy": "lightning_spindle.strategy",
    "SpindleTask": "lightning_spindle.task",
    "functional": "lightning_spindle.functional",
    "inspect": "lightning_spindle.runtime.inspection",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lightning_spindle' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = home if home.__name__ == f"lightning_spindle.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_registration.register_when_lightning_is_imported()
