"""What importing the package brings in, and that the strategy is found by name in either import order."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_spindle

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "lightning", "torchmetrics", "hydra", "matplotlib", "sklearn")

needs_strategy = pytest.mark.skipif(
    importlib.util.find_spec("lightning_spindle.strategy") is None, reason="no strategy in this build"
)


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["lightning_spindle", "lightning_spindle.planner"])
def test_importing_the_planner_brings_no_torch(module: str) -> None:
    loaded = run_python(f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])")
    assert loaded == ""


PURE = ["graph", "cluster", "costs", "plan", "timeline", "program", "simulate", "planner"]


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_bring_no_torch(name: str) -> None:
    module = f"lightning_spindle.{name}"
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"no {module} in this build")
    loaded = run_python(f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])")
    assert loaded == ""


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning_spindle, lightning.pytorch.strategies as s",
        "import lightning.pytorch.strategies as s, lightning_spindle",
        "import lightning_spindle.planner, lightning as L; s = L.pytorch.strategies",
        "import lightning as L, lightning_spindle; s = L.pytorch.strategies",
    ],
    ids=["spindle-first", "lightning-first", "planner-first", "top-level"],
)
def test_strategy_is_registered_in_either_import_order(imports: str) -> None:
    code = f"""
import sys
{imports}
assert "spindle" in s.StrategyRegistry.available_strategies()
assert "lightning_spindle.strategy" not in sys.modules, "the strategy is imported when a Trainer asks for it"
assert not [f for f in sys.meta_path if type(f).__module__.startswith("lightning_spindle")]
assert type(s.__spec__.loader).__name__ == type(s.__loader__).__name__ == "SourceFileLoader"
assert "exec_module" not in vars(s.__loader__)
"""
    run_python(code)


def test_registering_twice_keeps_what_is_there() -> None:
    code = """
import importlib, lightning.pytorch.strategies as s
mine = lambda: "mine"
s.StrategyRegistry.register("spindle", mine)
import lightning_spindle
importlib.reload(lightning_spindle)
assert s.StrategyRegistry["spindle"]["strategy"] is mine
"""
    run_python(code)


@needs_strategy
def test_trainer_finds_the_strategy_by_name() -> None:
    code = """
import lightning_spindle
import lightning as L
trainer = L.Trainer(strategy="spindle", accelerator="cpu", devices=1, logger=False)
assert type(trainer.strategy) is lightning_spindle.SpindleStrategy, trainer.strategy
"""
    run_python(code)


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
