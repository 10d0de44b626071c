"""One job, launched by ``benchmarking.launch``: ``python -m benchmarking.job FOLDER`` on each rank.

Reads ``job.json`` in the folder; rank 0 writes ``result.json`` there. Lightning's script launcher starts the
other ranks with the same command line, so that they share the folder and know of no other job.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything

from benchmarking.launch import JOB, RESULT
from benchmarking.systems import DATA_PARALLEL, callbacks_of, strategy_of
from datamodules.sharded import Sharded
from lightning_spindle import MultiTaskDataModule, SpindleStrategy
from lightning_spindle.timeline import Timeline, read_trace
from tasks.build import build
from tasks.global_batch import couple_globally
from tasks.optimizers import AdamWSchedule
from train import Recorder

TIMELINE = "timeline.json"


class StepTimes(Recorder):
    """Also the time of every step, and of what the strategy does between the fit's start and the first step.

    Args:
        processes: how many ranks there must be.
        seed: of the batches' order.
        folder: where this rank works.
    """

    def __init__(self, processes: int, seed: int, folder: Path) -> None:
        super().__init__()
        self.processes, self.seed = processes, seed
        self.folder = folder
        self.folders: list[str] = []
        self.step_ms: list[float] = []
        self.preparation_s = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the preparation."""
        self._fit_start = time.perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the ranks, compare their folders, and let every system draw the same batches.

        Raises:
            RuntimeError: for another number than was asked for, or where folders differ.
        """
        self.preparation_s = time.perf_counter() - self._fit_start
        super().on_train_start(trainer, pl_module)
        if self.ranks != self.processes:
            raise RuntimeError(f"{self.ranks} ranks answered, the job is for {self.processes}")
        self.folders = gathered(str(self.folder.absolute()))
        if len(set(self.folders)) > 1:
            raise RuntimeError(f"ranks work in different folders: {', '.join(self.folders)}")
        # Strategies leave the random state differently (DDP's resets it): loaders draw from it from now on.
        torch.manual_seed(self.seed)
        self._last = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """A step is from the end of one to the end of the next: loading, hooks and all."""
        super().on_train_batch_end(trainer, *args)
        now = time.perf_counter()
        self.step_ms.append((now - self._last) * 1e3)
        self._last = now


def gathered(text: str) -> list[str]:
    """Every rank's text, by rank."""
    found = [text]
    if dist.is_initialized():
        found = [""] * dist.get_world_size()
        dist.all_gather_object(found, text)
    return found


def fit(job: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Train as the job says; its result on rank 0."""
    torch.set_num_threads(1)
    seed_everything(job["seed"], workers=True)
    processes, steps = job["processes"], job["warmup"] + job["steps"]
    model, data = build(job, AdamWSchedule(**job["optimization"], total=steps))
    data.setup("fit")  # so that reading files is no part of any time
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if job["strategy"] in DATA_PARALLEL:
        shares = {name: -(-own.batch_size // processes) for name, own in data.datamodules.items()}
        couple_globally(model.tasks, shares)
        data = MultiTaskDataModule({name: Sharded(whole) for name, whole in data.datamodules.items()})
    times = StepTimes(processes, job["seed"], folder)
    trainer = Trainer(
        **job["trainer"],
        strategy=strategy_of(job["strategy"], job["options"], processes, job["planner"]),
        devices=processes,
        max_steps=steps,
        max_epochs=-1,
        default_root_dir=folder,
        callbacks=[times, *callbacks_of(job["strategy"])],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(model, data)
    if not trainer.is_global_zero:
        return None
    counted = times.step_ms[job["warmup"] :]
    return {
        "live_ranks": times.ranks,
        "folders": times.folders,
        "step_ms": median(counted),
        "step_ms_fastest": min(counted),
        "step_ms_slowest": max(counted),
        "planning_s": times.preparation_s if job["plans"] else None,
        "planned_by": _planned_by(trainer.strategy),
        **_iterations(folder / TIMELINE),
        "parameters": parameters,
        "threads": torch.get_num_threads(),
        "losses": times.losses,
    }


def _planned_by(strategy: Any) -> str:
    """The planner whose plan ran; empty for a strategy without plans."""
    plan = strategy.plan if isinstance(strategy, SpindleStrategy) else None
    return plan.planner if plan is not None else ""


def _iterations(trace: Path) -> dict[str, float | None]:
    """What the run's timeline says about an iteration, where it wrote one."""
    timelines: dict[str, Timeline] = {}
    if trace.exists():
        timelines = {timeline.source: timeline for timeline in read_trace(trace.read_text())}
    sources = {"predicted_ms": "predicted", "iteration_ms": "measured"}
    return {
        column: timelines[source].span_s * 1e3 if source in timelines else None
        for column, source in sources.items()
    }


def main() -> None:
    """Run the job of the folder named on the command line."""
    folder = Path(sys.argv[1])
    result = fit(json.loads((folder / JOB).read_text()), folder)
    if result is not None:
        (folder / RESULT).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
