"""The fault table's machinery: what is replaced, and that only a failed test counts as noticed."""

import importlib
import sys
from functools import reduce
from pathlib import Path

import pytest

from tests.faults import FAULTS, Fault, apply_fault
from tests.faults.bodies import changes_result, does_nothing, passes_through, returns
from tests.faults.fault import OURS
from tests.faults.judging import ROOT, judge

VICTIM = """
def double(x):
    return 2 * x

class Box:
    def __init__(self): self.content = 3
    def open(self): return self.content
    @staticmethod
    def size(): return 7
    @classmethod
    def make(cls): return cls()
    @property
    def weight(self): return 11

HANDLERS = {"double": double}
"""


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    (tmp_path / "victim.py").write_text(VICTIM)
    (tmp_path / "user.py").write_text("from victim import double\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tests.faults.fault.OURS", ("victim", "user"))
    monkeypatch.setenv("PYTHONPATH", "")
    yield importlib.import_module("victim")
    for name in ("victim", "user"):
        sys.modules.pop(name, None)


def apply(target: str, body: object) -> None:
    apply_fault("x", [Fault("x", target, body, ())])  # type: ignore[arg-type]


def test_a_function_is_exchanged_wherever_it_is_held(victim: object) -> None:
    user = importlib.import_module("user")
    apply("victim:double", changes_result(lambda y: y + 1))
    assert victim.double(4) == user.double(4) == victim.HANDLERS["double"](4) == 9  # type: ignore[attr-defined]


def test_members_of_classes_are_replaced(victim: object) -> None:
    box = victim.Box  # type: ignore[attr-defined]
    apply("victim:Box.open", passes_through(0))
    apply("victim:Box.size", returns(8))
    apply("victim:Box.make", does_nothing)
    apply("victim:Box.weight", returns(12))
    instance = box()
    assert instance.open() is instance
    assert (box.size(), instance.size(), box.make(), instance.weight) == (8, 8, None, 12)


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="no fault is named 'nonesuch'"):
        apply_fault("nonesuch")


def test_every_fault_names_a_function_of_ours_and_tests_that_exist() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert fault.target.startswith(OURS), fault
        assert fault.tests, fault
        module, _, names = fault.target.partition(":")
        assert reduce(getattr, names.split("."), importlib.import_module(module)), fault
        for test in fault.tests:
            file, _, function = test.partition("::")
            assert (ROOT / file).is_file(), test
            assert f"def {function.partition('::')[2] or function}".split("[")[0] in (ROOT / file).read_text()


CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from tests.faults import Fault, apply_fault
from tests.faults.bodies import returns
import os
def pytest_configure(config):
    if name := os.environ.get("SPINDLE_FAULT"):
        apply_fault(name, [Fault(name, "shop:price", returns(0), ())])
"""
TESTS = """
import shop, subprocess, sys
def test_notices(): assert shop.price() == 5
def test_does_not(): assert shop.price() in (0, 5)
def test_does_not_call(): pass
class TestGroup:
    def test_notices(self): assert shop.price() == 5
def test_red_without_calling(): assert False
def test_hangs():
    import time; time.sleep(60)
"""


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        (["test_notices"], ""),
        (["TestGroup::test_notices", "test_notices"], ""),
        (["test_does_not"], "not noticed by test_shop.py::test_does_not"),
        (["test_notices", "test_does_not"], "not noticed by test_shop.py::test_does_not"),
        (["test_does_not_call"], "not noticed by test_shop.py::test_does_not_call (never called)"),
        (["test_red_without_calling"], "red, but the replacement was never called"),
        (["test_absent"], "pytest ended with 4, not with a failed test"),
        (["test_hangs"], "still running after 3 s"),
    ],
)
def test_only_a_failed_test_counts(tmp_path: Path, tests: list[str], problem: str) -> None:
    (tmp_path / "shop.py").write_text("def price(): return 5\n")
    (tmp_path / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    (tmp_path / "test_shop.py").write_text(TESTS)
    nodes = tuple(f"test_shop.py::{test}" for test in tests)
    limit = 3.0 if tests == ["test_hangs"] else 100.0
    verdict = judge(Fault("free", "shop:price", returns(0), nodes), root=tmp_path, timeout_s=limit)
    assert verdict.problem == problem, verdict.output
