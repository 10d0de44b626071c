"""C19 and C23: ranks start from the same weights and run the same plan, or all say why not."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_spindle import SpindleStrategy
from lightning_spindle.estimate.samples import Samples
from lightning_spindle.runtime import planning, session
from tests.support.fitting import assert_replicas, fit_once, random_plan
from tests.support.ranks import run_ranks, watch_ranks
from tests.support.scripts import run_script
from tests.support.small import (
    Given,
    Layer,
    Part,
    Sample,
    Small,
    metagraph,
    multi,
    placement,
    random_samples,
    together,
)


# ---------------------------------------------------------------------------------------------------- C19
class Late(Small):
    """Creates layers in ``configure_model``; has a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head: nn.Module | None = None

    def configure_model(self) -> None:
        if self.head is None:
            self.head = Layer(4, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        assert self.head is not None
        loss = ((self.head(self.norm(self.first(batch["x"]))) - batch["y"]) ** 2).mean()
        self.log("loss", loss)
        return loss


def late_model(seed: int, configured: bool = False) -> Any:
    torch.manual_seed(seed)
    tasks = {"a": Late(), "b": Late()}
    for task in tasks.values():
        task.norm.running_mean.fill_(float(seed))
        if configured:
            task.configure_model()
    return multi(tasks, "adamw")


def late_data() -> Any:
    return together(**{t: Given(random_samples(9, k, x=(3,), y=(1,)), [4, 3, 2]) for k, t in enumerate("ab")})


class Start(Callback):
    """This rank's live parameters and its buffers before the first step."""

    def __init__(self) -> None:
        self.state: dict[str, torch.Tensor] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            tensors = [*module.named_parameters(), *module.named_buffers()]
            self.state = {n: t.detach().clone() for n, t in tensors if t.device.type != "meta"}


GROUPS = {"a/": (0, 1), "b/": (2,), "b/first": (1, 2)}


def test_c19_ranks_start_from_rank_zeros_weights() -> None:
    """A seed a rank, layers made in ``configure_model``, a buffer filled with the rank: REPLICA at once."""
    plan = placement(metagraph(late_model(0, True), late_data()), 3, GROUPS)

    def rank(index: int, size: int) -> Any:
        start = Start()
        strategy = SpindleStrategy(plan=plan, operators=(Part,), timeline=False)
        options = {"seed": index, "max_steps": 3, "callbacks": [start]}
        return start, fit_once(lambda: late_model(index), late_data, strategy, size, **options)

    results = run_ranks(rank, 3)
    starts = [start.state for start, _ in results]
    for name, buffer in starts[0].items():
        if name.endswith("running_mean"):
            assert buffer.tolist() == [0.0] * 4, "rank 0's, not the last one's"
    for state in starts[1:]:
        for name in state.keys() & starts[0].keys():
            assert torch.equal(state[name], starts[0][name]), name
    shared = {n for n in starts[0].keys() & starts[1].keys() if not n.endswith(("mean", "var", "tracked"))}
    assert any("head" in name for name in shared), "late layers are among what two ranks hold"
    assert_replicas([fit for _, fit in results])


def test_c19_other_shapes_on_a_rank_are_refused_on_all() -> None:
    """A model that depends on the rank: an error that says so, and no hang."""

    def model(rank: int) -> Any:
        return multi({"a": Wide(3 + (rank == 1))})

    def data() -> Any:
        return together(a=Given(random_samples(4, 1, x=(3,), y=(1,)), [4]))

    def rank(index: int, size: int) -> None:
        fit_once(lambda: model(index), data, SpindleStrategy(profile_budget_s=0.2), size, max_steps=1)

    for outcome in watch_ranks(rank, 2, timeout_s=40, group_timeout_s=5):
        assert "the model: ranks [1] do not have" in (outcome.error or ""), outcome.describe()


class Wide(Small):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = Layer(3, width)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        return self.layer(batch["x"]).mean()


# ---------------------------------------------------------------------------------------------------- C23
class Digest(Callback):
    def __init__(self) -> None:
        self.digest = ""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.digest = trainer.strategy._session.planned.plan.digest()


def disagreeing(measure: Any, rank: int) -> Any:
    """A profiler that returns each rank times of its own."""

    def fake(*args: Any, **kwargs: Any) -> Samples:
        samples: Samples = measure(*args, **kwargs)
        skewed = {
            name: {
                rows: dataclasses.replace(time, forward_ms=time.forward_ms * (1 + 7 * rank * (k % 3)))
                for rows, time in times.items()
            }
            for k, (name, times) in enumerate(samples.operators.items())
        }
        return dataclasses.replace(samples, operators=skewed)

    return fake


def planned_digests(rank: int, size: int, launches: int) -> list[str]:
    """Fits under the planner where every rank measured other times; what each had for a plan."""
    original = planning.measure
    planning.measure = disagreeing(original, rank)
    found = []
    try:
        for launch in range(launches):
            digest = Digest()
            strategy = SpindleStrategy(profile_budget_s=0.3, timeline=False)
            options = {"seed": launch, "max_steps": 2, "callbacks": [digest], "devices": size}
            fit_once(lambda: late_model(0), late_data, strategy, **options)
            found.append(digest.digest)
    finally:
        planning.measure = original
    return found


def test_c23_ranks_that_measure_other_times_run_one_plan() -> None:
    digests = run_ranks(planned_digests, 3, 2, timeout_s=120)
    assert digests[0] == digests[1] == digests[2]
    assert all(digests[0])


SCRIPT = """
import os, sys
seed = str(int(os.environ["RANK"]) * 7 + 1)
if os.environ.get("PYTHONHASHSEED") != seed:
    os.environ["PYTHONHASHSEED"] = seed
    os.execv(sys.executable, [sys.executable, *sys.argv])
import warnings; warnings.simplefilter("ignore")
from tests.cases.test_c19_c23_agreement import planned_digests
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
digests = " ".join(planned_digests(rank, size, 1))
# Written in one piece: the ranks share the output, and torchrun's do not buffer.
sys.stdout.write(f"DIGESTS {seed} {hash('spindle')} {digests}\\n")
"""


def test_c23_interpreters_that_order_sets_differently_run_one_plan(tmp_path: Path) -> None:
    """Two launched ranks with PYTHONHASHSEED 1 and 8 and other measured times."""
    script = tmp_path / "hashes.py"
    script.write_text(SCRIPT)
    result = run_script(script, nproc=2, timeout_s=150).check()
    lines = re.findall(r"DIGESTS (\d+) (-?\d+) (.*)", result.stdout)
    assert {seed for seed, _, _ in lines} == {"1", "8"}
    assert len({hashed for _, hashed, _ in lines}) == 2, "the interpreters do hash differently"
    assert len({digests for _, _, digests in lines}) == 1
    assert len(lines[0][2].split()) == 1


@pytest.mark.parametrize(("how", "corrupt"), [("given", 0), ("given", 2), ("planned", 1)])
def test_c23_another_plan_on_one_rank_is_an_error_on_every_rank(how: str, corrupt: int) -> None:
    """Given another plan than the others, or one that changed on its way from rank 0."""
    graph = metagraph(late_model(0, True), late_data())
    plans = [random_plan(graph, 3, seed=int(rank == corrupt)) for rank in range(3)]
    assert len({plan.digest() for plan in plans}) == 2

    def rank(index: int, size: int) -> None:
        strategy = SpindleStrategy(plan=plans[index] if how == "given" else plans[0], operators=(Part,))
        planning.Planner.__call__ = lambda self, *_: session.Planned(plans[index], None)
        fit_once(lambda: late_model(0), late_data, strategy, size, max_steps=2)

    different = [corrupt] if corrupt else [1, 2]
    what = "SpindleStrategy's arguments" if how == "given" else "the plan"
    for outcome in watch_ranks(rank, 3, timeout_s=40, group_timeout_s=5):
        said = f"{what}: ranks {different} do not have what rank 0 has"
        assert said in (outcome.error or ""), outcome.describe()
