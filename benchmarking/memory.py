"""Memory of a rank that trains half of a model: ``python -m benchmarking.memory [MILLIONS] [PROCESSES]``.

A model of two tasks that share nothing, one each process, trained with AdamW in float32. Measured is the
resident memory (RSS) of each process as Linux counts it, at its highest within each phase, less what the
process had before the model was built: parameters, gradients and optimizer state, and activations and
messages as well. It is held against what one process needs for parameters, gradients and optimizer state
alone, 16 bytes a parameter. Large blocks leave the process when they are freed; under glibc's defaults it
keeps some of them (up to 0.06 of that at 100 M parameters), in one process as in two.
"""

import ctypes
import gc
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_spindle import MultiTaskDataModule, MultiTaskModule, SpindleStrategy, inspect
from lightning_spindle.graph import MetaGraph
from lightning_spindle.plan import Configuration, ExecutionPlan, Run

LAYERS = 12
STATE_BYTES = 16
"""Of a float32 parameter under AdamW: itself, its gradient, and two moments."""
ROWS = 4
_MMAP_THRESHOLD = -3
"""glibc's M_MMAP_THRESHOLD, which does not grow once it is set."""


class Tower(LightningModule):
    """A task of its own: linear layers of equal width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (x,) = batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Rows(LightningDataModule):
    """Random rows in batches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(2 * ROWS, self.width)), ROWS)


def model(width: int) -> MultiTaskModule:
    """Two tasks of ``LAYERS * width * (width + 1)`` parameters each."""
    return MultiTaskModule({"first": Tower(width), "second": Tower(width)})


def data(width: int) -> MultiTaskDataModule:
    """A loader for each task."""
    return MultiTaskDataModule({"first": Rows(width), "second": Rows(width)})


def disjoint_plan(metagraph: MetaGraph, processes: int) -> ExecutionPlan:
    """Each task on a device of its own, tasks dealt out in turn."""
    tasks = list(dict.fromkeys(m.task for m in metagraph.metaops))
    runs = tuple(
        Run(m.name, 0, len(m.layers), (tasks.index(m.task) % processes,), at, at + 1, Configuration(1))
        for at, m in enumerate(metagraph.metaops)
    )
    return ExecutionPlan("forced", processes, runs, float(len(runs)))


@dataclass
class Phases(Callback):
    """The highest resident memory of each phase of a fit, over what the process had before it.

    ``prepare`` is all until the first batch: capture, plan, localisation. ``end`` completes the model.
    """

    before_bytes: int = 0
    peak_bytes: dict[str, int] = field(default_factory=dict)

    def start(self) -> None:
        """Phases count from here; what nobody needs any more is given back before."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.before_bytes = _status_bytes("VmRSS")
        _reset_peak()

    def ended(self, phase: str) -> None:
        """A phase ends here and the next begins."""
        self.peak_bytes[phase] = _status_bytes("VmHWM") - self.before_bytes
        _reset_peak()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is built, and localised."""
        self.ended("prepare")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last batch is done."""
        self.ended("train")


def _status_bytes(name: str) -> int:
    """A figure of this process's memory, as Linux tells it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measured_fit(width: int, processes: int, checkpoint: bool = False) -> dict[str, int]:
    """Train a few steps; this process's peak in bytes by phase.

    A fit of a tiny model goes before, for libraries that are loaded when they are first used. With
    ``checkpoint`` a file of the whole model is written at the end, on all ranks together.
    """
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**18)
    _fit(8, processes, Phases(), checkpoint)
    phases = Phases()
    _fit(width, processes, phases, checkpoint)
    return phases.peak_bytes


def _fit(width: int, processes: int, phases: Phases, checkpoint: bool) -> None:
    torch.manual_seed(0)
    phases.start()
    whole, source = model(width), data(width)
    plan = disjoint_plan(inspect(whole, source).metagraph, processes)
    phases.ended("build")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=processes,
            strategy=SpindleStrategy(plan=plan, timeline=False),
            max_steps=4,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[phases],
        )
        trainer.fit(whole, source)
        phases.ended("end")
        if checkpoint:
            trainer.save_checkpoint(Path(folder) / "whole.ckpt", weights_only=False)
            phases.ended("checkpoint")


def parameters_of(width: int) -> int:
    """Parameters of the whole model."""
    return 2 * LAYERS * width * (width + 1)


def main() -> None:
    """Measure, and print a table of the ranks and phases."""
    millions, processes = (float(x) for x in (sys.argv[1:] + ["100", "2"][len(sys.argv) - 1 :])[:2])
    torch.set_num_threads(1)
    width = round((millions * 1e6 / (2 * LAYERS)) ** 0.5)
    peaks = measured_fit(width, int(processes), checkpoint=True)
    found: list[Any] = [peaks]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, peaks)
    if not dist.is_initialized() or dist.get_rank() == 0:
        state_bytes = STATE_BYTES * parameters_of(width)
        lines = [f"{parameters_of(width) / 1e6:.1f} M parameters, {state_bytes / 1e6:.0f} MB of state"]
        for rank, phases in enumerate(found):
            cells = ", ".join(f"{k} {v / 1e6:.0f} MB ({v / state_bytes:.2f})" for k, v in phases.items())
            lines.append(f"rank {rank}: {cells}")
        sys.stdout.write("\n".join([*lines, ""]))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
