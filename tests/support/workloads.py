"""The workloads of ``conf/workload``, for tests."""

import functools

import torch
from omegaconf import OmegaConf

from lightning_spindle import MultiTaskDataModule, MultiTaskModule
from tasks.optimizers import AdamWSchedule
from tasks.workloads import WorkloadSize, task_names, workload_data, workload_model, workload_size
from tests.support.ranks import ROOT

SCHEDULE = AdamWSchedule(lr=1e-3, weight_decay=0.1, warmup=2, total=10)


@functools.cache
def size_of(workload: str, size: str) -> WorkloadSize:
    """The sizes as configured."""
    config = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "workload" / f"{workload}.yaml"))
    return workload_size(workload, config["workload"]["sizes"][size])


def model_of(size: WorkloadSize, count: int | None = None) -> MultiTaskModule:
    """The first ``count`` tasks, the same at each call."""
    torch.manual_seed(0)
    return workload_model(size, task_names(size, count), SCHEDULE)


def data_of(size: WorkloadSize, count: int | None = None, batches: int = 2) -> MultiTaskDataModule:
    """Their data."""
    return workload_data(size, task_names(size, count), batches)
