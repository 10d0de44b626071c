"""Processes that share a machine share its cores: each limits its threads, however it was started."""

import os

import torch

from lightning_spindle.strategy import SpindleStrategy
from tests.support import toys
from tests.support.fitting import fit_once
from tests.support.ranks import run_ranks


def test_a_process_started_by_others_limits_its_threads() -> None:
    cores = len(os.sched_getaffinity(0))

    def rank(index: int, size: int) -> int:
        os.environ.pop("OMP_NUM_THREADS", None)
        torch.set_num_threads(cores + 1)
        strategy = SpindleStrategy(planner="uniform", profile_budget_s=0.5)
        fit_once(toys.model, toys.data, strategy, devices=size, max_steps=1)
        return torch.get_num_threads()

    assert run_ranks(rank, 2) == [max(1, cores // 2)] * 2
