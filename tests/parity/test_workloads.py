"""PARITY of the workloads' small settings, two layers a stack: two or three ranks equal one process."""

import pytest

from tests.support.fitting import assert_same_fit, metagraph_of, plain_fit, spindle_fit
from tests.support.library_fits import spread
from tests.support.workloads import data_of, model_of, shallow, size_of

STEPS = 2


@pytest.mark.parametrize(
    ("workload", "tasks", "devices"),
    [("multitask_clip", 5, 2), ("ofasys", 4, 2), ("qwen_val", None, 2), ("qwen_val", None, 3)],
)
def test_small_workloads(workload: str, tasks: int | None, devices: int) -> None:
    """Every third MetaOp on all ranks, the others on one each: shared modules are on some ranks only.

    The first five tasks of Multitask-CLIP have all modalities, and each tower but two in several of them; the
    first four of OFASys all of its adaptors.
    """
    size = shallow(size_of(workload, "small"))
    plan = spread(metagraph_of(model_of(size, tasks), data_of(size, tasks)), devices)
    ours = spindle_fit(
        lambda: model_of(size, tasks),
        lambda: data_of(size, tasks),
        devices,
        strategy={"plan": plan},
        max_steps=STEPS,
    )
    reference = plain_fit(lambda: model_of(size, tasks), lambda: data_of(size, tasks), max_steps=STEPS)
    assert_same_fit(ours, reference)
