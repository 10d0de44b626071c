"""``Trainer(strategy="spindle")``, without importing Lightning.

Lightning finds strategies by name in a registry that a package has to write to; there is no entry point.
Importing Lightning here to reach that registry would bring torch into processes that only plan. So the name
is written when both packages are there, in whichever order they come: at once if Lightning is imported
already, else right after it is. What is registered is a function, and ``SpindleStrategy`` (with the runtime
behind it) is imported when a Trainer asks for it.

Python has no public "after import" event; the standard way is a finder that steps aside for every module but
one. It removes itself when it has done its work.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "spindle"
_REGISTRY_MODULE = "lightning.pytorch.strategies"


def register_when_lightning_is_imported() -> None:
    """Register ``"spindle"`` now if Lightning is imported, else as soon as it is. May be repeated."""
    strategies = sys.modules.get(_REGISTRY_MODULE)
    if strategies is not None:
        _register(strategies)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register(strategies: ModuleType) -> None:
    registry = strategies.StrategyRegistry
    if NAME not in registry:
        registry.register(
            NAME, _make_strategy, description="Plans a multi-task model over all devices (Spindle)."
        )


def _make_strategy(**init_params: Any) -> Any:
    from lightning_spindle.strategy import SpindleStrategy

    return SpindleStrategy(**init_params)


class _AfterImport(MetaPathFinder):
    """Lets the other finders find Lightning's strategies, and registers ours when those have been run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY_MODULE:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader  # made for this one module
        execute = loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            _register(module)

        loader.exec_module = execute_and_register
        return spec
