"""The simulator held against real processes whose operators sleep: ``python -m benchmarking.sleeping``.

Eight processes run the real engine over gloo. Operators do nothing for as long as their costs say, so that
processes need no cores of their own; what messages and sums cost is measured between the same processes
beforehand. Printed are the simulated iteration, the measured ones (10, or as many as are asked for), and how
far apart they are.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_spindle.costs import Costs
from lightning_spindle.emulate.stubs import stub_capture
from lightning_spindle.estimate.links import measure_links
from lightning_spindle.estimate.problem import cluster_from, measured_costs
from lightning_spindle.estimate.samples import LinkSamples, Samples
from lightning_spindle.graph import Layout, Operator, OperatorGraph, Parameter, Reduction, Result, Value
from lightning_spindle.planner.problem import LayerTime
from lightning_spindle.program import Program, ProgramRun, holders, lower
from lightning_spindle.runtime.engine import Engine
from lightning_spindle.runtime.iteration import TaskBatch
from lightning_spindle.runtime.transport import ProcessGroupTransport, everyone, world_transport
from lightning_spindle.simulate import simulate

PROCESSES = 8
ROWS = 16
A_ROW_MS = 25.0
"""Of an operator's forward; its backward takes twice that."""
PLACES = {
    "a": ((0, 1, 2, 3), (0, 1, 2, 3), (4, 5), (4, 5, 6, 7)),
    "b": ((4, 5, 6, 7), (6, 7), (0, 1), (0, 1, 2, 3)),
}
"""Devices of each task's operators. The second ones of both share a parameter, which six processes sum."""
LIMIT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Iterations of the same program."""

    simulated_s: float
    measured_s: tuple[float, ...]
    """The slowest process's of each step, all having started together."""

    @property
    def difference(self) -> float:
        """Of the simulated time, relative to the median of the measured ones."""
        return self.simulated_s / median(self.measured_s) - 1.0


def sleeping_program() -> tuple[OperatorGraph, Program]:
    """Two tasks of four operators on groups of two and four devices.

    A row of a value, and a parameter, are one number each.
    """
    operators, values, parameters, results = [], [], {}, []
    for task, groups in PLACES.items():
        for k in range(len(groups)):
            last = k == len(groups) - 1
            weight = "shared" if k == 1 else f"{task}.{k}"
            parameters[weight] = Parameter(weight, 4, True)
            inputs = (f"{task}/{k - 1}",) if k else ()
            name = f"{task}/{k}"
            operators.append(Operator(name, task, "sleep", Layout.SPLIT, inputs, (name,), (weight,)))
            values.append(Value(name, None if last else 0, 1, 4 if last else 4 * ROWS, True))
        results.append(Result(task, "loss", name, Reduction.MEAN))
    rows = tuple((task, ROWS) for task in PLACES)
    graph = OperatorGraph(tuple(operators), tuple(values), tuple(parameters.values()), tuple(results), rows)
    groups_of = {f"{task}/{k}": group for task, groups in PLACES.items() for k, group in enumerate(groups)}
    runs = tuple(
        ProgramRun(i, o.name, o.task, (o.name,), groups_of[o.name], o.layout) for i, o in enumerate(operators)
    )
    held = holders([(runs, graph)])
    return graph, lower(runs, graph, PROCESSES, held, trainable=list(parameters))


def sleeping_costs(graph: OperatorGraph, links: LinkSamples) -> Costs:
    """What the simulator is told: how long operators sleep, and links as measured."""
    times = {r: LayerTime(r * A_ROW_MS, 2 * r * A_ROW_MS) for r in (1, ROWS)}
    samples = Samples({o.name: times for o in graph.operators}, links)
    return measured_costs(graph, cluster_from(samples, PROCESSES), samples)


def measure_rank(transport: ProcessGroupTransport, steps: int) -> Measurement | None:
    """One process's part (collective); rank 0 has the result."""
    graph, program = sleeping_program()
    transport.prepare(program.groups())
    costs = sleeping_costs(graph, measure_links(transport, torch.device("cpu")))
    rank = transport.rank
    mine = {n: torch.nn.Parameter(torch.zeros(1)) for n, on in program.holders.items() if rank in on}

    def sleep(operator: str, rows: int, backward: bool) -> None:
        time.sleep(costs.operator_s(operator, rows, backward))

    capture = stub_capture(graph, mine, sleep)
    pieces = {o: capture.pieces[o].build() for r in program.runs if rank in r.devices for o in r.operators}
    engine = Engine(program, capture, pieces, mine, transport, torch.device("cpu"))
    batches = {task: TaskBatch(ROWS, [torch.zeros(ROWS)]) for task in PLACES}
    slowest_s = torch.zeros(steps + 1, PROCESSES)
    for step in range(steps + 1):
        for p in mine.values():
            p.grad = None
        transport.all_reduce(torch.zeros(1), everyone(transport)).wait()
        started_s = time.perf_counter()
        iteration = engine.forward(batches, index=step, batch_idx=step)
        engine.backward(iteration, dict.fromkeys(PLACES, 1.0), sync=True)
        slowest_s[step, rank] = time.perf_counter() - started_s
    transport.all_reduce(slowest_s, everyone(transport)).wait()
    if rank > 0:
        return None
    # In the first step messages are preceded by their forms.
    measured_s = tuple(slowest_s.max(dim=1).values[1:].tolist())
    return Measurement(simulate(program, costs).span_s, measured_s)


def _process(rank: int, folder: str, steps: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=LIMIT)
    found = measure_rank(world_transport(LIMIT), steps)
    if found is not None:
        measured = " ".join(f"{s:.3f}" for s in found.measured_s)
        print(
            f"simulated {found.simulated_s:.3f} s, measured {measured} s: {found.difference:+.1%}", flush=True
        )
    dist.destroy_process_group()


def main() -> None:
    """Start the processes, and tell what rank 0 found."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_process, (folder, steps), nprocs=PROCESSES, start_method="fork")


if __name__ == "__main__":
    main()
