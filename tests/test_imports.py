"""What importing the package brings in, and that the strategy is found by name in either import order."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_spindle
from lightning_spindle import _registration

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "lightning", "torchmetrics", "hydra", "matplotlib", "sklearn")


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PURE = ["graph", "cluster", "costs", "plan", "timeline", "program", "simulate", "planner"]


def test_the_pure_part_brings_no_torch() -> None:
    code = f"""
import importlib, sys
for name in ("", *(f".{{name}}" for name in {PURE})):
    importlib.import_module("lightning_spindle" + name)
    loaded = [heavy for heavy in {HEAVY} if heavy in sys.modules]
    assert not loaded, f"lightning_spindle{{name}} brings {{loaded}}"
"""
    run_python(code)


def test_importing_the_planner_alone_brings_no_torch() -> None:
    run_python("import sys, lightning_spindle.planner; assert 'torch' not in sys.modules")


@pytest.mark.parametrize(
    "imports",
    ["import lightning_spindle.planner, lightning", "import lightning, lightning_spindle"],
    ids=["planner-first", "lightning-first"],
)
def test_strategy_is_registered_in_either_import_order(imports: str) -> None:
    code = f"""
import sys
{imports}
s = lightning.pytorch.strategies
assert "spindle" in s.StrategyRegistry.available_strategies()
assert "lightning_spindle.strategy" not in sys.modules, "the strategy is imported when a Trainer asks for it"
assert not [f for f in sys.meta_path if type(f).__module__.startswith("lightning_spindle")]
assert type(s.__spec__.loader).__name__ == type(s.__loader__).__name__ == "SourceFileLoader"
assert "exec_module" not in vars(s.__loader__)
trainer = lightning.Trainer(strategy="spindle", accelerator="cpu", devices=1, logger=False)
assert type(trainer.strategy) is lightning_spindle.SpindleStrategy, trainer.strategy
"""
    run_python(code)


def test_registering_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch import strategies

    registry = type(strategies.StrategyRegistry)()
    monkeypatch.setattr(strategies, "StrategyRegistry", registry)
    registry.register("spindle", dict)
    _registration.register_when_lightning_is_imported()
    _registration.register_when_lightning_is_imported()
    assert registry["spindle"]["strategy"] is dict


def test_exports_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(Path(lightning_spindle.__file__).read_text())
    seen = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == set(lightning_spindle._HOMES)
    assert seen | {"__version__"} == set(lightning_spindle.__all__)
    assert seen <= set(dir(lightning_spindle))


@pytest.mark.parametrize("name", sorted(lightning_spindle._HOMES))
def test_exports_resolve(name: str) -> None:
    if importlib.util.find_spec(lightning_spindle._HOMES[name]) is None:
        pytest.skip(f"no {lightning_spindle._HOMES[name]} in this build")
    assert getattr(lightning_spindle, name).__name__.split(".")[-1] == name


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Spindel'"):
        _ = lightning_spindle.Spindel
