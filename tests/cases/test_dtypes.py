"""Losses, logged values and gradients have the types that steps give them, whatever the parameters have."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_spindle.plan import Configuration, ExecutionPlan, Run
from tests.support.fitting import assert_same_fit, plain_fit, spindle_fit, without_gradients
from tests.support.small import Given, Layer, Part, Sample, Small, forced_fit, multi, random_samples, together

CLASSES = 3


class Net(Part):
    """A backbone, and a head of another type where ``head`` says so."""

    def __init__(self, backbone: torch.dtype | None = None) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(3, 4, dtype=backbone), nn.Linear(4, CLASSES)
        if backbone is not None:
            self.backbone.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x.to(self.backbone.weight.dtype)).to(self.head.weight.dtype))


class Classify(Small):
    """A loss of type ``loss`` and logged values of every kind; ``whole``: its step cannot be taken apart."""

    def __init__(self, loss: torch.dtype, backbone: torch.dtype | None = None, whole: bool = False) -> None:
        super().__init__()
        self.net, self.loss, self.whole = Net(backbone), loss, whole

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch["x"])
        loss = F.cross_entropy(logits.to(self.loss), batch["y"])
        if not self.whole or self.trainer.global_step >= 0:
            self.log("loss", loss, on_epoch=True)
        single = logits.float().mean() / 3
        self.log("single", single, on_epoch=True)
        self.log("double", single.double() / 3, on_epoch=True)
        self.log("half", single.to(torch.bfloat16))
        self.log("whole", batch["y"].sum() * 0 + 1001, on_epoch=True)
        self.log("same", torch.full((), 1001), on_epoch=True)
        self.log("number", 0.8371, on_epoch=True)
        self.log("classes", 1001)
        return loss


class InShards(Small):
    """What is logged can be made of shards' values."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(torch.bfloat16)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch["x"])
        self.log("single", logits.mean() / 3)
        self.log("sum", batch["y"].sum())
        self.log("same", torch.full((), 1001))
        self.log("number", 1001)
        return F.cross_entropy(logits, batch["y"])


def data() -> Any:
    return together(a=one(1), b=one(2))


def one(seed: int = 1) -> Given:
    """Samples of three inputs and a class, in batches of 3 and 1."""
    samples = random_samples(10, seed, x=(3,))
    return Given([{**s, "y": torch.tensor(i % CLASSES)} for i, s in enumerate(samples)], [3, 3, 3, 1])


def single_of_half(whole: bool) -> Any:
    """Tasks that compute their loss in float32, of a model to be made bfloat16."""
    torch.manual_seed(0)
    tasks = {"a": Classify(torch.float32, whole=whole), "b": Classify(torch.float32)}
    return multi(tasks, weights={"a": 0.3, "b": 0.7})


def frozen_half() -> Any:
    """The model's first parameter is a frozen bfloat16 one."""
    torch.manual_seed(0)
    tasks = {"a": Classify(torch.float32, torch.bfloat16), "b": Classify(torch.float32)}
    return multi(tasks, weights={"a": 0.3})


def of_types(a: torch.dtype, b: torch.dtype) -> Any:
    torch.manual_seed(0)
    return multi({"a": Classify(a), "b": Classify(b)}, weights={"a": 0.3, "b": 0.7})


def options(precision: str) -> dict[str, Any]:
    return {"precision": precision, "max_epochs": 1, "max_steps": -1, "accumulate_grad_batches": 3}


def check(make_model: Any, devices: int, precision: str) -> None:
    """Equal to the last digit, where each task is on one device."""
    groups = {"a/": (devices - 1,), "b/": (0,)}
    ours = forced_fit(make_model, data, devices, groups, **options(precision))
    assert_same_fit(ours, plain_fit(make_model, data, **options(precision)), tolerance=0.0)


@pytest.mark.filterwarnings("ignore:.*cannot be taken apart")
@pytest.mark.parametrize(("devices", "whole"), [(1, False), (2, False), (2, True)])
def test_losses_in_single_precision_of_a_model_in_half(devices: int, whole: bool) -> None:
    check(lambda: single_of_half(whole), devices, "bf16-true")


def test_a_frozen_backbone_in_half_precision() -> None:
    check(frozen_half, 2, "32-true")


def test_a_value_of_shards() -> None:
    """An integer is not cut where two thirds and a third of it are a digit less than all of it."""

    def model() -> Any:
        torch.manual_seed(0)
        return multi({"a": InShards(), "b": InShards()}, weights={"a": 0.3})

    ours = forced_fit(model, data, 2, {"a/": (0, 1), "b/": (1, 0)}, **options("32-true"))
    reference = plain_fit(model, data, **options("32-true"))
    assert_same_fit(without_gradients(ours), without_gradients([reference])[0], tolerance=1e-6)


@pytest.mark.parametrize(
    "types",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
    ],
)
def test_the_total_of_losses_of_several_types(types: tuple[torch.dtype, torch.dtype]) -> None:
    check(lambda: of_types(*types), 2, "32-true")


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-true"])
def test_other_precisions(precision: str) -> None:
    check(lambda: of_types(torch.float32, torch.float16), 2, precision)


@pytest.mark.filterwarnings("ignore:.*cannot be taken apart")
@pytest.mark.parametrize("whole", [False, True])
def test_a_module_of_its_own(whole: bool) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        return Classify(torch.float32, whole=whole)

    ours = spindle_fit(model, one, 1, strategy={"operators": (Part,)}, **options("bf16-true"))
    assert_same_fit(ours, plain_fit(model, one, **options("bf16-true")), tolerance=0.0)


class Divided(Small):
    """Its loss is divided by a size, which the shards have alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(7, 1, last=True)

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.layer(batch["x"]), batch["y"]) / batch["x"].shape[1]


def test_a_number_of_shards() -> None:
    """Seven times two thirds and a third is less than seven."""

    def model() -> Any:
        torch.manual_seed(0)
        return Divided()

    def sevens() -> Given:
        return Given(random_samples(10, 1, x=(7,), y=(1,)), [3, 3, 3, 1])

    both = Run("task/layer", 0, 1, (0, 1), 0, 1, Configuration(2))
    strategy = {"plan": ExecutionPlan("forced", 2, (both,), 1.0), "operators": (Part,)}
    ours = spindle_fit(model, sevens, 2, strategy=strategy)
    assert_same_fit(ours, plain_fit(model, sevens))
