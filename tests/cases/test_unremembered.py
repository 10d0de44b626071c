"""What a step that runs as one operator cannot do to the model: others could not have it, or not in time."""

from typing import Any

import pytest
import torch
from torchmetrics import CatMetric

from tests.strategy.ending import assert_all_ended, watch_fit
from tests.support.branching import EPOCHS, Branching, data, model
from tests.support.fitting import assert_same_fit, plain_fit
from tests.support.small import Layer, Part, Small, forced_fit, metagraph, multi, placement

pytestmark = pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")


class Sealed(Branching):
    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.kept = {"text": lambda: "cannot be sent"}


class Unlike(Branching):
    """Its hook does not do the same on every rank."""

    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach())

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == self.rank:
            self.losses.clear()


class UnlikeToo(Unlike):
    rank = 1


class Loose(Branching):
    """Logs a metric that the model does not have."""

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        metric = CatMetric()
        metric.update(loss)
        self.log("loose", metric)


class Late(Branching):
    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.act = torch.nn.Tanh()


class Hidden(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.average = {"loss": torch.zeros(())}

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.average["loss"].data.mul_(0.9).add_(loss)


class HiddenInFits(Hidden):
    """Capture cannot run it."""

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        if self.trainer.global_step >= 0:
            super().remember(when, y, loss)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Sealed, r"task a: its step keeps in tasks\.a\.kept what cannot be sent"),
        (Unlike, r"tasks\.a\.losses was not the same on all ranks"),
        (UnlikeToo, r"tasks\.a\.losses was not the same on all ranks"),
        (Late, r"adds, replaces or removes tasks\.a\.act"),
        (Hidden, r"writes to tasks\.a\.average through \.data"),
        (HiddenInFits, r"writes to tasks\.a\.average through \.data"),
        (Loose, r"logs under 'loose' a torchmetrics object that is no attribute of the model"),
    ],
    ids=["Sealed", "Unlike", "UnlikeToo", "Late", "Hidden", "HiddenInFits", "Loose"],
)
def test_what_other_ranks_cannot_have_is_refused(kind: type[Small], message: str) -> None:
    outcomes = watch_fit(2, lambda rank: model(kind), lambda rank: data())
    assert_all_ended(outcomes, message)


class Counting(Layer):
    """Counts its calls; has a cache that is made once."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.calls, self.cache = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.ones(1)
        return super().forward(x) * self.cache


class Sharing(Branching):
    def __init__(self, shared: Counting, counts: bool) -> None:
        super().__init__()
        self.tower, self.counts = shared, counts

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.tower.calls += self.counts


def sharing(counts: bool) -> Any:
    torch.manual_seed(0)
    shared = Counting()
    return multi({"a": Sharing(shared, counts), "b": Sharing(shared, False)})


def test_changes_in_a_module_of_two_tasks_are_refused() -> None:
    outcomes = watch_fit(2, lambda rank: sharing(True), lambda rank: data())
    assert_all_ended(
        outcomes, r"task 'a': training_step changes tasks\.a\.tower\.calls, which another task has"
    )


class Pooling(Branching):
    """Counts in an object that another task has too."""

    def __init__(self, pool: dict[str, Any]) -> None:
        super().__init__()
        self.pool = {"inner": pool}

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.pool["inner"]["sum"] += loss.detach()


def test_changes_in_what_two_tasks_hold_are_refused() -> None:
    def pooling() -> Any:
        torch.manual_seed(0)
        pool = {"sum": torch.zeros(())}
        return multi({"a": Pooling(pool), "b": Pooling(pool)})

    outcomes = watch_fit(2, lambda rank: pooling(), lambda rank: data())
    assert_all_ended(outcomes, r"task 'a': training_step changes tasks\.a\.pool, which another task has")


class Setting(Branching):
    """The first one sets what both read."""

    def __init__(self, shared: Counting) -> None:
        super().__init__()
        self.shared = shared

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        if self.shared.cache is None:
            self.shared.cache = loss.detach()


def test_what_two_tasks_set_differently_is_refused() -> None:
    def setting() -> Any:
        torch.manual_seed(0)
        shared = Counting()
        return multi({"a": Setting(shared), "b": Setting(shared)})

    plan = placement(metagraph(setting(), data()), 2, {"a/": (1,), "b/": (0,)})
    strategy = {"plan": plan, "operators": (Part,)}
    outcomes = watch_fit(2, lambda rank: setting(), lambda rank: data(), lambda rank: strategy)
    assert_all_ended(
        outcomes, r"tasks\.a\.shared\.cache was None, and two steps .* to other values: a/step, b/step"
    )


def test_a_cache_in_a_module_of_two_tasks_is_filled() -> None:
    reference = plain_fit(lambda: sharing(False), data, **EPOCHS)
    ours = forced_fit(lambda: sharing(False), data, 2, {"a/": (1,), "b/": (0,)}, **EPOCHS)
    assert_same_fit(ours, reference)
