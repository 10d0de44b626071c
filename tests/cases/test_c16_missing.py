"""C16: a modality that is there in some batches only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.strategy.ending import assert_all_ended, watch_fit
from tests.support.fitting import Fit, assert_same_fit, plain_fit, spindle_fit, without_gradients
from tests.support.small import Given, Layer, Small, forced_fit, multi, random_samples, together

ROWS = 5
PRESENT, ABSENT, MIXED, ROWWISE, GROWING = "present", "absent", "mixed", "row by row", "growing"
PATTERN = (PRESENT, ABSENT, MIXED, ABSENT)


class Optional(Small):
    """Encodes an image where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = Layer(4, 3), Layer(3, 3)
        self.head = Layer(3, 1, last=True)

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        x = self.text(batch["text"])
        if batch["image"] is not None:
            x = x + self.image(batch["image"]) * batch["has"][:, None]
        return F.mse_loss(self.head(x), batch["y"])

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        if batch["image"] is not None:
            self.log("seen", batch["has"].mean())
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class Text(Small):
    """Has no images at all."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Layer(4, 1, last=True)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.head(batch["x"]), batch["y"])
        self.log("loss", loss)
        return loss


class Pictures(LightningDataModule):
    """Batches that have the image as ``pattern`` says; the last one has a row less."""

    def __init__(self, pattern: Sequence[str]) -> None:
        super().__init__()
        self.pattern = pattern

    def _loader(self, pattern: Sequence[str], seed: int) -> DataLoader[Any]:
        count = ROWS * len(pattern) - 1
        samples = random_samples(count, seed, text=(4,), image=(3,), y=(1,))

        def collate(indices: list[int]) -> dict[str, Any]:
            how = pattern[indices[0] // ROWS]
            batch: dict[str, Any] = {
                key: torch.stack([samples[i][key] for i in indices]) for key in ("text", "image", "y")
            }
            batch["has"] = torch.tensor([float(how == PRESENT or i % 2) for i in indices])
            if how == ABSENT:
                batch["image"] = batch["has"] = None
            if how == GROWING:
                batch["more"] = [batch["y"]] * (indices[0] // ROWS)
            if how == ROWWISE:
                batch["image"] = [
                    image if i % 2 else None for i, image in zip(indices, batch["image"], strict=True)
                ]
            return batch

        return DataLoader(range(count), ROWS, collate_fn=collate)  # type: ignore[arg-type]

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.pattern, 1)


class Validated(Pictures):
    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader((ABSENT, PRESENT), 2)


def model(optimizer: str) -> Any:
    torch.manual_seed(0)
    return multi({"pictures": Optional(), "text": Text()}, optimizer)


def data(pattern: Sequence[str], kind: type[Pictures] = Pictures) -> Any:
    return together(
        pictures=kind(pattern),
        text=Given(random_samples(3 * len(pattern), 3, x=(4,), y=(1,)), [3] * len(pattern)),
    )


ON_THREE = {"pictures/": (0,), "pictures/image": (1, 0), "pictures/head": (0, 1), "text/": (2, 1)}
"""Rank 2 does not read the pictures; they have to tell it which there are."""


def image_rests(fits: list[Fit], pattern: Sequence[str]) -> None:
    """Vision parameters have no gradient and do not move where no row has an image."""
    name = "tasks.pictures.image.linear.weight"
    for fit in fits:
        for at, how in enumerate(pattern):
            gradients, parameters = fit.steps[at]["gradients"], fit.steps[at]["parameters"]
            if name in gradients:
                assert (gradients[name] is None) == (how == ABSENT), (at, how)
                if how == ABSENT and at:
                    assert torch.equal(parameters[name], fit.steps[at - 1]["parameters"][name])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_c16_an_optional_image(optimizer: str) -> None:
    """Two epochs, validation in between; a rank that does not read the task runs the same variant."""
    make, given = partial(model, optimizer), partial(data, PATTERN, Validated)
    options: dict[str, Any] = {"max_epochs": 2, "max_steps": -1}
    ours = forced_fit(make, given, 3, ON_THREE, **options)
    reference = plain_fit(make, given, **options)
    assert_same_fit(ours, reference)
    image_rests([*ours, reference], PATTERN * 2)


@pytest.mark.parametrize("devices", [1, 2])
def test_c16_images_come_later(devices: int) -> None:
    """What the first batch does not have is placed by what it does have; all ranks held the parameters."""
    pattern = (ABSENT, PRESENT, PRESENT, ABSENT)
    make, given = partial(model, "adamw"), partial(data, pattern)
    groups = {"pictures/": (0,), "text/": (devices - 1,)}
    ours = forced_fit(make, given, devices, groups, max_steps=4)
    reference = plain_fit(make, given, max_steps=4)
    assert_same_fit(ours, reference)
    image_rests(ours, pattern)


def test_c16_with_accumulation() -> None:
    """The last step of a window has no image: it sums the image encoder's gradients of the others."""
    options = {"max_steps": 2, "accumulate_grad_batches": 2}
    for pattern in (PATTERN, (ABSENT, PRESENT, PRESENT, ABSENT)):
        make, given = partial(model, "sgd"), partial(data, pattern)
        groups = {**ON_THREE, "pictures/": (0, 1)}
        if pattern[0] == ABSENT:
            del groups["pictures/image"]
        ours = forced_fit(make, given, 3, groups, **options)
        reference = plain_fit(make, given, **options)
        assert_same_fit(without_gradients(ours), *without_gradients([reference]))


class Joined(LightningModule):
    """A module of its own, whose loss joins both tasks; the picture may be absent."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures, self.head = Optional(), Layer(4, 1, last=True)
        self.weight = torch.nn.Parameter(torch.tensor(0.5))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        text = F.mse_loss(self.head(batch["text"]["x"]), batch["text"]["y"])
        loss = self.weight * self.pictures.loss(batch["pictures"]) + text
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class JoinedData(LightningDataModule):
    def train_dataloader(self) -> Any:
        return {name: part.train_dataloader() for name, part in data(PATTERN).datamodules.items()}


@pytest.mark.parametrize("devices", [1, 3])
def test_c16_in_a_module_of_its_own(devices: int) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return Joined()

    ours = spindle_fit(make, JoinedData, devices, strategy={"planner": "optimus"}, max_steps=4)
    assert_same_fit(ours, plain_fit(make, JoinedData, max_steps=4))


class Coarse(Optional):
    """Cannot be traced where there is no image: that step runs as one operator, on one rank."""

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        if batch["image"] is None and float(batch["y"].sum()) > 1e9:
            return batch["y"].sum()
        return super().loss(batch)


def coarse_model(optimizer: str) -> Any:
    torch.manual_seed(0)
    return multi({"pictures": Coarse(), "text": Text()}, optimizer)


WHOLE_ONCE = (PRESENT, PRESENT, ABSENT, PRESENT, PRESENT)


@pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_c16_parameters_reach_the_rank_that_runs_the_whole_step(optimizer: str) -> None:
    """With their momentum: from then on more ranks hold them."""
    make, given = partial(coarse_model, optimizer), partial(data, WHOLE_ONCE)
    ours = forced_fit(make, given, 3, ON_THREE, max_steps=5)
    assert_same_fit(ours, plain_fit(make, given, max_steps=5))


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ((PRESENT, ROWWISE), ("task pictures", r"\['image'\]\[\d\] has 3 entries", "with a mask")),
        ((GROWING,) * 20, ("task pictures", "more than 16 structures")),
    ],
)
def test_c16_what_cannot_be_followed_is_refused(pattern: Sequence[str], parts: Sequence[str]) -> None:
    outcomes = watch_fit(
        2,
        lambda rank: model("sgd"),
        lambda rank: data(pattern),
        options=lambda rank: {"max_steps": 20},
    )
    assert_all_ended(outcomes, *parts)
