"""Collating that drops rows, or a whole batch, or draws: ranks that do not read are told, or read too."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from lightning_spindle.capture import CaptureWarning
from tests.cases.test_kinds_of_tasks import Plain
from tests.support.fitting import assert_same_fit, plain_fit
from tests.support.small import Given, Layer, Sample, Samples, forced_fit, multi, random_samples, together


class Opaque(Plain):
    """Its step cannot be traced, and what it logs comes from the rank that runs it."""

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        if float(batch["x"].sum()) > 1e6:
            raise ValueError("never")
        return super().training_step(batch, batch_idx)


def collate(rows: list[Sample]) -> Any:
    kept = [row for row in rows if not row["bad"]]
    return default_collate(kept) if kept else None


def data() -> Any:
    def rows(seed: int, bad: range) -> list[Sample]:
        made = random_samples(12, seed, x=(3,), y=(1,))
        return [{**s, "bad": torch.tensor(i in bad)} for i, s in enumerate(made)]

    parts = {"a": rows(1, range(6, 12)), "b": rows(2, range(4, 5)), "c": rows(3, range(0))}
    return together(**{task: Given(made, [4] * 3, collate) for task, made in parts.items()})


@pytest.mark.parametrize("kind", [Plain, Opaque])
@pytest.mark.filterwarnings(f"ignore::{CaptureWarning.__module__}.{CaptureWarning.__name__}")
def test_collating_that_drops_rows(kind: type[Plain]) -> None:
    """Each task on a rank of its own: step and epoch values are one process's on all of them."""

    def model() -> Any:
        torch.manual_seed(0)
        return multi({"a": kind(Layer(3, 4)), "b": kind(), "c": Plain()})

    options = {"max_epochs": 2, "max_steps": -1}
    ours = forced_fit(model, data, 3, {"a/": (0,), "b/": (1,), "c/": (2,)}, timeout_s=40, **options)
    assert_same_fit(ours, plain_fit(model, data, **options))


def noisy(rows: list[Sample]) -> Any:
    batch = default_collate(rows)
    return {**batch, "x": batch["x"] + 0.1 * torch.randn_like(batch["x"])}


class Shuffled(Given):
    """Masked, or noised, anew in each epoch by the process that reads: its order of samples is drawn too."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(self.samples), 4, shuffle=True, collate_fn=self.collate)


def test_collating_that_draws() -> None:
    """Without workers it moves the generator that samplers draw from: the same on all ranks."""

    def model() -> Any:
        torch.manual_seed(0)
        return multi({t: Plain() for t in "abc"})

    def data() -> Any:
        made = {t: random_samples(8, k, x=(3,), y=(1,)) for k, t in enumerate("abc")}
        collates = {"a": noisy, "b": noisy, "c": default_collate}
        return together(**{t: Shuffled(made[t], [8], collates[t]) for t in "abc"})

    options = {"max_epochs": 3, "max_steps": -1}
    ours = forced_fit(model, data, 3, {"a/": (0,), "b/": (1,), "c/": (2,)}, **options)
    assert_same_fit(ours, plain_fit(model, data, **options))
