"""The simulator held against the engine on virtual devices: ``python -m benchmarking.emulated``.

Every workload of the paper at full size is planned by every planner for 8, 16 and 32 A800s, its program
simulated, and run by the real engine with real messages between ranks that are threads. A line for each with
both iteration times; the exit code is 1 where they differ by more than 2 %. ``--workloads``, ``--devices``
and ``--planners`` (with commas) choose among them; what else is given are overrides of
``conf/benchmark.yaml`` for all of them (``workload.tasks=4 cluster=h200``).
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarking.cells import WORKLOADS, cell_of
from benchmarking.simulated import Cell
from lightning_spindle.emulate import emulate
from lightning_spindle.planner import PLANNERS, plan
from lightning_spindle.simulate import simulate

TOLERANCE = 0.02
CONFIGURATION = Path(__file__).parents[1] / "conf"


@dataclass(frozen=True, slots=True)
class Held:
    """One program's iteration, simulated and emulated, and the real time that emulating took."""

    workload: str
    devices: int
    planner: str
    simulated_ms: float
    emulated_ms: float
    took_s: float

    @property
    def difference(self) -> float:
        """Of the simulated time, relative to the emulated one."""
        return self.simulated_ms / self.emulated_ms - 1.0

    def __str__(self) -> str:
        what = f"{self.workload:15} {self.devices:3} devices  {self.planner:8}"
        times = f"simulated {self.simulated_ms:9.2f} ms  emulated {self.emulated_ms:9.2f} ms"
        return f"{what} {times}  {self.difference:+.3%}  ({self.took_s:.1f} s)"


def hold(cell: Cell, planner: str) -> Held:
    """Plan, simulate and emulate."""
    program = cell.step.program(plan(cell.problem, planner))
    simulated = simulate(program, cell.costs)
    started_s = time.perf_counter()
    emulated = emulate(program, cell.costs)
    took_s = time.perf_counter() - started_s
    devices = cell.costs.cluster.devices
    return Held(cell.workload, devices, planner, simulated.span_s * 1e3, emulated.span_s * 1e3, took_s)


def cells(workloads: Sequence[str], devices: Sequence[int], overrides: Sequence[str]) -> Iterator[Cell]:
    """The workloads on clusters of each size."""
    for workload in workloads:
        for count in devices:
            chosen = [f"workload={workload}", "workload.size=full", f"cluster.devices={count}", *overrides]
            with initialize_config_dir(str(CONFIGURATION), version_base="1.3"):
                config: Any = OmegaConf.to_container(compose("benchmark", chosen))
            yield cell_of(config)


def main() -> int:
    """Hold all that was chosen, and tell."""
    parser = argparse.ArgumentParser(prog="python -m benchmarking.emulated")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--devices", default="8,16,32")
    parser.add_argument("--planners", default=",".join(PLANNERS))
    options = parser.parse_args()
    devices = [int(count) for count in options.devices.split(",")]
    torch.set_num_threads(1)
    beyond = 0
    for cell in cells(options.workloads.split(","), devices, options.overrides):
        for planner in options.planners.split(","):
            try:
                held = hold(cell, planner)
            except ValueError as refusal:
                where = f"{cell.workload} on {cell.costs.cluster.devices} devices"
                print(f"{where}, {planner}: no plan ({refusal})", flush=True)
                continue
            beyond += abs(held.difference) > TOLERANCE
            print(held, flush=True)
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
