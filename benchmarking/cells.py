"""A workload on a cluster, out of a composed ``conf/benchmark.yaml``; what is dear to find is found once."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from benchmarking import setups
from benchmarking.clusters import build_cluster
from benchmarking.simulated import Cell
from lightning_spindle.capture.shapes import capture_shapes
from lightning_spindle.costs import AnalyticCosts
from lightning_spindle.graph import OperatorGraph
from tasks.optimizers import AdamWSchedule
from tasks.workloads import task_names, workload_data, workload_model, workload_size


def cell_of(config: Mapping[str, Any]) -> Cell:
    """The cell of a configuration; equal ones are the same object, as sweeps ask for them again and again.

    Raises:
        ValueError: for a workload, number of tasks or cluster that there is not.
    """
    workload, cluster = config["workload"], config["cluster"]
    if workload["name"] not in WORKLOADS:
        raise ValueError(f"{workload['name']} is measured only; simulated are {', '.join(WORKLOADS)}")
    size, sharded = setups.size_name(workload), config.get("shard_optimizer_state", False)
    if size not in workload["sizes"]:
        raise ValueError(f"workload.size={size}: {workload['name']} has {', '.join(workload['sizes'])}")
    if not isinstance(sharded, bool):
        raise ValueError(f"shard_optimizer_state={sharded} is neither true nor false")
    return _cell(json.dumps(workload, sort_keys=True), json.dumps(cluster, sort_keys=True), sharded)


WORKLOADS = ("multitask_clip", "ofasys", "qwen_val")


@cache
def _cell(workload: str, cluster: str, shard_optimizer_state: bool) -> Cell:
    wanted, on = json.loads(workload), json.loads(cluster)
    built = build_cluster(on)
    size = wanted["sizes"][setups.size_name(wanted)]
    names = task_names(workload_size(wanted["name"], size), wanted["tasks"])
    graph = of_tasks(captured(wanted["name"], json.dumps(size)), names)
    costs = AnalyticCosts(graph, built.cluster, built.kind)
    setup = setups.fingerprint(wanted, on)
    return Cell(setups.title_of(wanted), len(names), built.name, costs, shard_optimizer_state, setup)


def of_tasks(graph: OperatorGraph, tasks: Collection[str]) -> OperatorGraph:
    """The part of a graph that some of its tasks have."""
    operators = tuple(o for o in graph.operators if o.task in tasks)
    given = {v for o in operators for v in o.outputs}
    used = {p for o in operators for p in o.parameters}
    return OperatorGraph(
        operators,
        tuple(v for v in graph.values if v.name in given),
        tuple(p for p in graph.parameters if p.name in used),
        tuple(r for r in graph.results if r.task in tasks),
        tuple((task, rows) for task, rows in graph.rows if task in tasks),
    )


@cache
def captured(name: str, size: str) -> OperatorGraph:
    """The operators of a workload, all its tasks; nothing of the model's size is allocated."""
    full = workload_size(name, json.loads(size))
    names, narrow = task_names(full), full.narrow()
    schedule = AdamWSchedule(lr=1e-3, weight_decay=0.0, warmup=1, total=10)
    torch.manual_seed(0)
    twin = workload_model(narrow, names, schedule)
    twin_data = workload_data(narrow, names, batches=1).datamodules
    batches = {task: next(iter(data.train_dataloader())) for task, data in twin_data.items()}

    def make() -> tuple[torch.nn.Module, dict[str, Any]]:
        data = workload_data(full, names, batches=1).datamodules
        with _default_dtype(torch.bfloat16):
            model = workload_model(full, names, schedule)
            return model, {task: module.largest_batch("cpu") for task, module in data.items()}

    return capture_shapes(make, twin, batches)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
