"""What faults in planners, costs and the simulator put in place of functions."""

from typing import Any

from tests.faults.bodies import Function


def counts_all_as_stepped(original: Function) -> Function:
    """A device is thought to keep the optimizer state of all that it holds."""

    def faulty(self: Any, parameters: Any, stepped: Any) -> Any:
        return original(self, parameters, parameters)

    return faulty


def plans_by_name(original: Function) -> Function:
    """A planner that is named is asked without the simulator."""

    def faulty(self: Any, problem: Any, workload: Any) -> Any:
        from lightning_spindle.planner import plan

        return plan(problem, self.name)

    return faulty


def stops_bisecting(original: Function) -> Function:
    """The bisection for C* ends before its first step: an end of the interval is its answer."""

    def faulty(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "tolerance": 1e9})

    return faulty


def places_sequentially(original: Function) -> Function:
    """Runs get the next devices in line, whatever their data and memory."""

    def faulty(runs: Any, problem: Any, policy: Any = None) -> Any:
        from lightning_spindle.planner.placement import Policy

        return original(runs, problem, Policy.SEQUENTIAL)

    return faulty


def computes_at_half_peak(original: Function) -> Function:
    """Every call reaches half of the device's peak, however little work it is."""

    def faulty(flops: float, kind: Any) -> float:
        return 2.0 * flops / kind.flops_per_s

    return faulty
