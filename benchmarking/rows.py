"""Rows about a workload on a cluster: of simulated and emulated jobs, and of figures."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CellRow:
    """What every row begins with: of when it is, what kind, and of which cell.

    ``mode`` is "simulated" (on the cluster's cost model), "emulated" (by the engine on virtual devices) or
    "measured" (wall clock of this machine).
    """

    date: str
    mode: str
    workload: str
    tasks: int
    cluster: str
    devices: int


@dataclass(frozen=True, slots=True)
class SimulatedRow(CellRow):
    """One system on one cluster. Shares are of device time; ``error`` is empty where it counts."""

    system: str
    planner: str
    setting: str
    """How a baseline divides its work; the planner that "auto" chose."""
    optimizer_state: str = ""
    """"whole" or "sharded" of Spindle."""
    kind: str = ""
    """Of devices, as data sheets call them."""
    setup: str = ""
    """Fingerprint of the workload's and the cluster's settings, whole in ``setups/`` beside the rows."""
    seed: int | None = None
    """Of planning."""
    time_limit_s: float | None = None
    """Of planning."""
    simulated_ms: float | None = None
    """An iteration, as simulated."""
    emulated_ms: float | None = None
    """The same, as the engine ran it on virtual devices."""
    difference: float | None = None
    """Of the simulated iteration from the emulated one, relative to that."""
    emulating_s: float | None = None
    """Real time that emulating took."""
    planning_s: float | None = None
    c_star_ms: float | None = None
    """The paper's theoretical optimum (appendix B), levels summed."""
    bound_ms: float | None = None
    """A true lower bound on computing (linear programs), links free."""
    computing_ms: float | None = None
    """The plan's own makespan: T of each MetaOp, without transfers and synchronisation."""
    utilisation: float | None = None
    compute_share: float | None = None
    transfer_share: float | None = None
    sync_share: float | None = None
    memory_bytes: float | None = None
    """Peak of the fullest device."""
    operators: int | None = None
    metaops: int | None = None
    error: str = ""

    @property
    def cell(self) -> tuple[str, str, int, str, int, str]:
        """What rows have in common that are compared with each other."""
        return (self.mode, self.workload, self.tasks, self.cluster, self.devices, self.setup)

    @property
    def key(self) -> tuple[object, ...]:
        """What makes a row the same job as another."""
        asked = (self.optimizer_state, self.system, self.planner, self.seed, self.time_limit_s)
        return (*self.cell, *asked)

    @property
    def name(self) -> str:
        """The planner, or the system where it has none."""
        return self.planner or self.system
