"""What a step that runs as one operator writes to loggers, on whatever rank, reaches them once."""

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

from tests.strategy.ending import assert_all_ended, watch_fit
from tests.support.branching import APART, EPOCHS, Branching, data, model
from tests.support.fitting import plain_fit
from tests.support.small import Part, Small, forced_fit, metagraph, placement

pytestmark = pytest.mark.filterwarnings("ignore::lightning_spindle.capture.CaptureWarning")


class Writing(Branching):
    """Writes to loggers itself, as one does who asks whether it is rank 0 that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = {"steps": 0.0}

    def setup(self, stage: str) -> None:
        self.kept, self.written = self.logger, self.logger.experiment

    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        assert isinstance(self.logger, CSVLogger)
        assert self.logger.version == "one"
        assert str(self.trainer.log_dir).endswith("one")
        self.kept.log_metrics({f"{when}/kept": loss}, step=self.global_step)
        self.written.log_metrics({f"{when}/written": float(loss)}, step=self.global_step)
        self.logger.log_metrics(self.steps, step=self.global_step)
        self.steps["steps"] += 1
        self.logger.log_metrics({f"{when}/direct": loss}, step=self.global_step)
        if self.trainer.is_global_zero and self.global_rank == 0:
            for logger in self.trainer.loggers:
                logger.experiment.log_metrics({f"{when}/rows": float(len(y))}, step=self.global_step)
        self.write_on_rank_zero(when, float(y.sum()))

    @rank_zero_only
    def write_on_rank_zero(self, when: str, value: float) -> None:
        self.loggers[0].log_metrics({f"{when}/sum": value}, step=self.global_step)

    def on_train_batch_end(self, *args: Any) -> None:
        self.logger.log_metrics({"hook": 1.0}, step=self.global_step)


def test_what_a_step_writes_to_loggers_is_written_by_rank_0(tmp_path: Path) -> None:
    """Not by the estimate, which runs steps too, nor by other ranks, nor twice."""

    def written(fit: Callable[..., Any], folder: Path) -> list[dict[str, Any]]:
        fit(logger=CSVLogger(folder, name=None, version="one"), log_every_n_steps=1, **EPOCHS)
        with (folder / "one" / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        return [{k: round(float(v), 7) for k, v in sorted(row.items()) if v} for row in rows]

    expected = written(partial(plain_fit, lambda: model(Writing), data), tmp_path / "plain")
    keys = {key for row in expected for key in row}
    assert {
        "train/direct",
        "train/rows",
        "validation/sum",
        "hook",
        "train/kept",
        "train/written",
        "steps",
    } <= keys
    for devices, groups in ((1, {"": (0,)}), (2, APART)):
        ours = partial(forced_fit, lambda: model(Writing), data, devices, groups)
        assert written(ours, tmp_path / str(devices)) == expected


class Keeping(Branching):
    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.writer = self.logger.experiment


class Unwritable(Branching):
    def remember(self, when: str, y: torch.Tensor, loss: torch.Tensor) -> None:
        self.logger.experiment.log_metrics({"text": lambda: "cannot be sent"})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Unwritable, r"task a: its step gives to logger\.experiment\.log_metrics what cannot be sent"),
        (Keeping, r"task a: its step keeps in tasks\.a\.writer what cannot be sent .*\(it is a logger\)"),
    ],
    ids=["Unwritable", "Keeping"],
)
def test_what_cannot_be_sent_to_a_logger_is_refused(kind: type[Small], message: str, tmp_path: Path) -> None:
    plan = placement(metagraph(model(kind), data()), 2, {"a/": (1,), "b/": (0,)})
    outcomes = watch_fit(
        2,
        lambda rank: model(kind),
        lambda rank: data(),
        lambda rank: {"plan": plan, "operators": (Part,)},
        lambda rank: {"logger": CSVLogger(tmp_path)},
    )
    assert_all_ended(outcomes, message)
