"""C01 and C02: gradients depend neither on how many ranks hold what, nor on how rows fall on ranks."""

import functools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.fitting import Fit, assert_same_fit, plain_fit
from tests.support.small import Given, Layer, Small, forced_fit, multi, random_samples, together


class ImageText(Small):
    """An image and a text encoder, and a head that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = Layer(3, 4), Layer(2, 4), Layer(8, 1, last=True)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        both = torch.cat([self.image(batch["image"]), self.text(batch["text"])], dim=-1)
        loss = F.mse_loss(self.head(both), batch["y"])
        self.log("loss", loss)
        return loss


def image_text(sizes: list[int]) -> Any:
    torch.manual_seed(0)
    samples = random_samples(sum(sizes), 1, image=(3,), text=(2,), y=(1,))
    return together(pairs=Given(samples, sizes))


def image_text_model(optimizer: str = "sgd") -> Any:
    torch.manual_seed(0)
    return multi({"pairs": ImageText()}, optimizer)


@functools.cache
def image_text_reference(optimizer: str, precision: str, sizes: tuple[int, ...]) -> Fit:
    return plain_fit(
        lambda: image_text_model(optimizer), lambda: image_text(list(sizes)), precision=precision, max_steps=3
    )


ENCODERS = [(0,), (0, 1), (0, 1, 2, 3)]
HEADS = [(3,), (2, 3), (0, 1, 2, 3)]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("encoders", ENCODERS)
def test_c01_nine_placements(encoders: tuple[int, ...], head: tuple[int, ...]) -> None:
    """8 rows, SGD lr 0.1, N=4: encoder groups of 1, 2 and 4 ranks against head groups of 1, 2 and 4."""
    ours = forced_fit(
        image_text_model,
        lambda: image_text([8] * 3),
        4,
        {"pairs/": encoders, "pairs/head": head},
        max_steps=3,
    )
    assert_same_fit(ours, image_text_reference("sgd", "64-true", (8, 8, 8)))


@pytest.mark.parametrize(
    ("text", "head"), [((3, 1, 0), (0, 1, 2, 3)), ((2,), (0, 1, 2, 3)), ((0, 1), (2, 1, 0))]
)
def test_c01_each_module_in_a_group_of_its_own(text: tuple[int, ...], head: tuple[int, ...]) -> None:
    """The two encoders and the head on three unlike groups that overlap, with AdamW, N=4."""
    groups = {"pairs/image": (1, 0), "pairs/text": text, "pairs/head": head}
    ours = forced_fit(
        lambda: image_text_model("adamw"), lambda: image_text([8, 3, 8]), 4, groups, max_steps=3
    )
    assert_same_fit(ours, image_text_reference("adamw", "64-true", (8, 3, 8)))


@pytest.mark.parametrize("groups", [{"pairs/": (0, 1, 2)}, {"pairs/": (0,), "pairs/head": (2, 1)}])
def test_c01_in_single_precision(groups: dict[str, tuple[int, ...]]) -> None:
    """float32, SGD: parameters, gradients, losses and logs to 1e-5."""
    ours = forced_fit(
        image_text_model, lambda: image_text([8, 5, 8]), 3, groups, max_steps=3, precision="32-true"
    )
    assert ours[0].parameters["tasks.pairs.head.linear.weight"].dtype == torch.float32
    assert_same_fit(ours, image_text_reference("sgd", "32-true", (8, 5, 8)), tolerance=1e-5)


class Linear(Small):
    """Mean squared error of a linear model."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.layer, self.reduction = Layer(3, 2, last=True), reduction

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.layer(batch["x"]), batch["y"], reduction=self.reduction)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Tokens(Small):
    """Classes of tokens; the loss is a mean over those that have a label, however rows hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Layer(3, 4), Layer(4, 5, last=True)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.head(self.encoder(batch["x"]))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["label"].flatten(), ignore_index=-100)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def rows_model() -> Any:
    torch.manual_seed(0)
    return multi({"mean": Linear(), "sum": Linear("sum")}, weights={"sum": 0.1})


def rows_data() -> Any:
    """Batches of 8 and 3, 6 and 3, 1 and 2 rows: over four ranks 2,2,1,1 and less than one row a rank."""
    samples = random_samples(23, 2, x=(3,), y=(2,))
    return together(mean=Given(samples[:15], [8, 6, 1]), sum=Given(samples[15:], [3, 3, 2]))


@functools.cache
def rows_reference() -> Fit:
    return plain_fit(rows_model, rows_data, max_steps=3)


@pytest.mark.parametrize(
    ("devices", "groups"),
    [
        (4, {"mean/": (0, 1, 2, 3), "sum/": (3, 2, 1, 0)}),
        (3, {"mean/": (2, 0, 1), "sum/": (1, 2)}),
        (2, {"mean/": (0, 1), "sum/": (1,)}),
    ],
)
def test_c02_ragged_rows(devices: int, groups: dict[str, tuple[int, ...]]) -> None:
    """Means are weighted by rows, sums are not: losses, epoch means and gradients of the unsplit batch."""
    ours = forced_fit(rows_model, rows_data, devices, groups, max_steps=3)
    assert_same_fit(ours, rows_reference())


def tokens_model() -> Any:
    torch.manual_seed(0)
    return multi({"tokens": Tokens()}, "adamw")


def tokens_data() -> Any:
    """Rows of five tokens: the first half of a batch has 9 labels, the second half 1."""
    samples = random_samples(8, 3, x=(5, 3))
    for at, sample in enumerate(samples):
        labels = [5, 4, 1, 0][at % 4]
        sample["label"] = torch.tensor([k % 5 for k in range(labels)] + [-100] * (5 - labels))
    return together(tokens=Given(samples, [4, 4]))


@pytest.mark.parametrize(
    ("devices", "groups"), [(2, {"tokens/": (0, 1)}), (4, {"tokens/": (0, 1, 2, 3), "tokens/head": (3, 1)})]
)
def test_c02_means_over_labelled_tokens(devices: int, groups: dict[str, tuple[int, ...]]) -> None:
    """cross_entropy with ignore_index where rank 0's rows have 9 labels and rank 1's have 1."""
    ours = forced_fit(tokens_model, tokens_data, devices, groups, max_steps=2)
    assert_same_fit(ours, plain_fit(tokens_model, tokens_data, max_steps=2))
