"""Train the tasks of ``conf/``: ``python train.py experiment=quickstart`` (or ``workload=ofasys``).

A run leaves ``results.json`` in its directory: losses by step, seconds, live ranks, and the accuracy of each
task; a workload with generated data has none.
With ``compare`` it is trained twice, by one plain process and under Spindle, each in a directory of its own.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf

from tasks.build import build
from tasks.optimizers import AdamWSchedule

OmegaConf.register_new_resolver("div", lambda a, b: a // b, replace=True)
RESULTS = "results.json"


class Recorder(Callback):
    """Keeps every task's loss by step, the seconds of training and the number of ranks that answered."""

    def __init__(self) -> None:
        self.losses: dict[str, list[float]] = {}
        self.seconds = 0.0
        self.ranks = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the ranks by a sum over them; start the clock."""
        one = torch.ones((), device=trainer.strategy.root_device)
        self.ranks = round(trainer.strategy.reduce(one, reduce_op="sum").item())
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Keep what the tasks logged as their loss."""
        for key, value in trainer.callback_metrics.items():
            if key.endswith("/loss"):
                self.losses.setdefault(key.removesuffix("/loss"), []).append(value.item())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self.seconds = time.perf_counter() - self._start


def strategy_of(name: str, devices: int, options: Mapping[str, Any]) -> Any:
    """The strategy of that name.

    Raises:
        ValueError: for another name, or ``single`` with several devices.
    """
    if name == "spindle":
        from lightning_spindle import SpindleStrategy

        return SpindleStrategy(**options)
    if name == "ddp":
        return DDPStrategy()
    if name != "single":
        raise ValueError(f"trainer.strategy={name} is none of single, ddp, spindle")
    if devices != 1:
        raise ValueError(f"trainer.strategy=single is one process; trainer.devices={devices} needs another")
    return "auto"


def train(config: dict[str, Any], directory: Path) -> None:
    """One run: fit, test, ``results.json`` in ``directory``."""
    seed_everything(config["seed"], workers=True)
    options = dict(config["trainer"])
    name, steps = options.pop("strategy"), options["max_steps"]
    schedule = AdamWSchedule(**config["optimization"], total=steps)
    model, data = build(config, schedule, shards=options["devices"] if name == "ddp" else 1)
    recorder = Recorder()
    trainer = Trainer(
        **options,
        strategy=strategy_of(name, options["devices"], config["spindle"]),
        max_epochs=-1,
        default_root_dir=directory,
        callbacks=[recorder, ModelCheckpoint(directory / "checkpoints", every_n_train_steps=steps)],
        logger=CSVLogger(directory, name="logs", version=""),
    )
    trainer.fit(model, data)
    accuracy = {}
    if not config["workload"]:
        tested = trainer.test(model, data, verbose=False)[0]
        accuracy = {task: tested[f"{task}/accuracy"] for task in config["tasks"]}
    if not trainer.is_global_zero:
        return
    results = {
        "strategy": name,
        "ranks": recorder.ranks,
        "seconds": recorder.seconds,
        "accuracy": accuracy,
        "loss": recorder.losses,
    }
    (directory / RESULTS).write_text(json.dumps(results, indent=1))
    last = {task: losses[-1] for task, losses in recorder.losses.items()}
    print(f"{name}, {recorder.ranks} process(es), {recorder.seconds:.0f} s:", accuracy or last, flush=True)


def compare(config: dict[str, Any], directory: Path, overrides: list[str]) -> bool:
    """Train with one plain process and as configured and print both; whether the outcome is as it must be.

    Raises:
        ValueError: for a workload without accuracies.
    """
    if config["workload"]:
        raise ValueError(f"compare: workload {config['workload']['name']} has no accuracies to be compared")
    devices = config["trainer"]["devices"]
    one = _launch(directory / "processes_1", [*overrides, "trainer.strategy=single", "trainer.devices=1"])
    many = _launch(directory / f"processes_{devices}", overrides)
    good = many["ranks"] == devices
    title = f"{many['ranks']} processes"
    print(f"\n{'task':<14}{'1 process':>12}{title:>14}{'equal':>8}{'minimum':>10}")
    for task in config["tasks"]:
        alone, together = one["accuracy"][task], many["accuracy"][task]
        minimum = config["minimum"].get(task, 0.0)
        equal = alone == together
        good = good and equal and together >= minimum
        print(f"{task:<14}{alone:>12.4f}{together:>14.4f}{'yes' if equal else 'NO':>8}{minimum:>10.2f}")
    print(f"{'seconds':<14}{one['seconds']:>12.1f}{many['seconds']:>14.1f}")
    return good


def _launch(directory: Path, overrides: list[str]) -> dict[str, Any]:
    """Run this script in a process of its own, as a user would; its results."""
    command = [sys.executable, str(Path(__file__).resolve()), *overrides]
    subprocess.run([*command, "compare=false", f"hydra.run.dir='{directory}'"], check=True)
    return json.loads((directory / RESULTS).read_text())


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Compose, then train or compare."""
    # Plain containers: OmegaConf's in a checkpoint cannot be loaded again.
    config = OmegaConf.to_container(composed, resolve=True)
    hydra_config = HydraConfig.get()
    directory = Path(hydra_config.runtime.output_dir)
    if not (config["compare"] and config["trainer"]["strategy"] == "spindle"):
        train(config, directory)
    elif not compare(config, directory, list(hydra_config.overrides.task)):
        sys.exit("The accuracies differ, or are below the minimum, or not every process took part.")


if __name__ == "__main__":
    main()
