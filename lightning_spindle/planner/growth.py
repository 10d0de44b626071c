"""How planning time and memory grow with devices and MetaOps.

python -m lightning_spindle.planner.growth --out DIR [--devices N ...] [--metaops N ...] [--planners NAME ...]

Writes ``growth.csv`` and ``growth.svg``. Every plan is made in a process of its own, so that its
peak of memory is its own; times are CPU seconds, which other work on the machine does not change.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from random import Random

from lightning_spindle.cluster import Cluster, Link
from lightning_spindle.graph import Flow
from lightning_spindle.planner import PLANNERS, LayerTime, PlannedOp, PlanningProblem, plan

DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
METAOPS = (10, 30, 100, 300)
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One planner on one problem: CPU seconds, peak of the process's memory, and its plan."""

    planner: str
    devices: int
    metaops: int
    seconds: float
    peak_mib: float
    makespan_ms: float
    runs: int


def synthetic(metaops: int, devices: int, seed: int = 0) -> PlanningProblem:
    """Tasks of two encoders and what follows them, with shared parameters, on islands of 8 GPUs."""
    random = Random(seed)
    ops: list[PlannedOp] = []
    flows: list[Flow] = []
    sizes: dict[str, int] = {}
    for i in range(metaops):
        task, place = divmod(i, 3)
        after = (f"t{task}.m0", f"t{task}.m1") if place == 2 else ()
        fixed, shared = random.uniform(0.05, 0.5), random.uniform(5.0, 60.0)
        layers, module = random.choice((6, 12, 24, 32)), random.randrange(8)
        weights = tuple((f"module{module}.{k}",) for k in range(layers))
        sizes.update((w[0], 30_000_000) for w in weights)
        allocations = [1 << k for k in range(9) if 1 << k <= devices]
        times = tuple(
            (n, LayerTime((fixed + shared / n) / 3, 2 * (fixed + shared / n) / 3)) for n in allocations
        )
        name = f"t{task}.m{place}"
        ops.append(
            PlannedOp(
                name,
                f"t{task}",
                layers,
                after,
                256,
                times,
                layer_parameters=weights,
                layer_flow_bytes=80_000_000,
            )
        )
        flows += [Flow(before, name, 2_000_000) for before in after]
    cluster = Cluster(devices, 8, Link(2e-5, 154e9), Link(6.4e-5, 8.1e9), memory_bytes=80 * 10**9)
    sized = tuple(sorted(sizes.items()))
    return PlanningProblem(f"synthetic_{metaops}_{devices}", tuple(ops), cluster, tuple(flows), sized)


def measure(planner: str, devices: int, metaops: int, time_limit_s: float | None = 1.0) -> Measurement:
    """Plans once, in this process. The peak is that of the whole process so far."""
    problem = synthetic(metaops, devices)
    plan(synthetic(1, 1), planner)  # imports what it needs
    started = time.process_time()
    made = plan(problem, planner, time_limit_s=time_limit_s)
    seconds = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_mib = peak / (2**20 if sys.platform == "darwin" else 2**10)
    return Measurement(planner, devices, metaops, seconds, peak_mib, made.makespan_ms, len(made.runs))


def measure_all(
    planners: Sequence[str], devices: Sequence[int], metaops: Sequence[int], time_limit_s: float | None = 1.0
) -> Iterator[Measurement]:
    """Each planner on each problem, every one in a new process."""
    context = multiprocessing.get_context("spawn")
    for planner in planners:
        for m in metaops:
            for d in devices:
                with context.Pool(1) as pool:
                    yield pool.apply(measure, (planner, d, m, time_limit_s))


def write_csv(path: Path, measurements: Sequence[Measurement]) -> None:
    """A line for each measurement."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([f.name for f in fields(Measurement)])
        writer.writerows(astuple(m) for m in measurements)


def draw(measurements: Sequence[Measurement]) -> str:
    """Seconds over devices, both logarithmic, as SVG: a panel a number of MetaOps, a line a planner."""
    counts = sorted({m.metaops for m in measurements})
    planners = list(dict.fromkeys(m.planner for m in measurements))
    across = _scale([m.devices for m in measurements], 50, 250)
    up = _scale([max(m.seconds, 1e-3) for m in measurements], 260, 40)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{300 * len(counts)}" height="330" '
        'font-family="sans-serif" font-size="10">'
    ]
    for panel, count in enumerate(counts):
        parts.append(f'<g transform="translate({300 * panel},0)"><text x="50" y="20">{count} MetaOps</text>')
        parts.append('<path d="M50,40V260H250" fill="none" stroke="black"/>')
        for d in sorted({m.devices for m in measurements}):
            parts.append(f'<text x="{across(d):.0f}" y="274" text-anchor="middle">{d}</text>')
        for power in range(-3, 3):
            if 40 <= up(10.0**power) <= 260:
                parts.append(
                    f'<text x="46" y="{up(10.0**power):.0f}" text-anchor="end">{10.0**power:g} s</text>'
                )
        for k, planner in enumerate(planners):
            points = sorted(
                (m.devices, m.seconds) for m in measurements if (m.metaops, m.planner) == (count, planner)
            )
            line = " ".join(f"{across(d):.1f},{up(max(s, 1e-3)):.1f}" for d, s in points)
            colour = _COLOURS[k % len(_COLOURS)]
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts.append(
                f'<text x="{50 + 70 * (k % 3)}" y="{295 + 14 * (k // 3)}" fill="{colour}">{planner}</text>'
            )
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scale(values: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    """Logarithms of the values' range to pixels."""
    first, last = math.log(min(values)), math.log(max(values))
    return lambda value: low + (high - low) * (math.log(value) - first) / ((last - first) or 1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_spindle.planner.growth", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--metaops", type=int, nargs="+", default=METAOPS)
    parser.add_argument("--planners", nargs="+", default=list(PLANNERS), choices=list(PLANNERS))
    parser.add_argument("--time-limit", type=float, default=1.0, metavar="SECONDS")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    measurements: list[Measurement] = []
    for m in measure_all(options.planners, options.devices, options.metaops, options.time_limit):
        measurements.append(m)
        sizes = f"{m.planner:8} {m.devices:5} devices {m.metaops:4} MetaOps"
        sys.stdout.write(f"{sizes}: {m.seconds:7.3f} s {m.peak_mib:6.0f} MiB\n")
        sys.stdout.flush()
    write_csv(options.out / "growth.csv", measurements)
    (options.out / "growth.svg").write_text(draw(measurements))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
