"""The workloads of ``conf/workload`` and the configuration of benchmarks, for tests."""

import functools
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_spindle import MultiTaskDataModule, MultiTaskModule
from tasks.optimizers import AdamWSchedule
from tasks.transformer import Shape
from tasks.workloads import WorkloadSize, task_names, workload_data, workload_model, workload_size
from tests.support.scripts import ROOT

SCHEDULE = AdamWSchedule(lr=1e-3, weight_decay=0.1, warmup=2, total=10)


def composed(*overrides: str) -> dict[str, Any]:
    """``conf/benchmark.yaml`` with overrides, as plain containers."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config: Any = OmegaConf.to_container(compose("benchmark", list(overrides)), resolve=True)
    return config


@functools.cache
def size_of(workload: str, size: str) -> WorkloadSize:
    """The sizes as configured."""
    config = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "workload" / f"{workload}.yaml"))
    return workload_size(workload, config["workload"]["sizes"][size])


def shallow(size: Any, layers: int = 2) -> Any:
    """The same sizes with at most so many layers in each stack."""
    if isinstance(size, Shape):
        return replace(size, layers=min(layers, size.layers))
    nested = {f.name: getattr(size, f.name) for f in fields(size) if is_dataclass(getattr(size, f.name))}
    return replace(size, **{name: shallow(value, layers) for name, value in nested.items()})


def model_of(size: WorkloadSize, count: int | None = None) -> MultiTaskModule:
    """The first ``count`` tasks, the same at each call."""
    torch.manual_seed(0)
    return workload_model(size, task_names(size, count), SCHEDULE)


def data_of(size: WorkloadSize, count: int | None = None, batches: int = 2) -> MultiTaskDataModule:
    """Their data."""
    return workload_data(size, task_names(size, count), batches)
