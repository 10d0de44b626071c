"""From a plan to the instructions that each rank executes (paper, section 3.6)."""

from lightning_spindle.program.instructions import Instruction, Kind
from lightning_spindle.program.lowering import BUCKET_BYTES, lower
from lightning_spindle.program.ownership import owners
from lightning_spindle.program.placing import follow, holders, place_plan, spread
from lightning_spindle.program.program import Broadcast, Bucket, Edge, Program, ProgramRun, row_range

__all__ = [
    "BUCKET_BYTES",
    "Broadcast",
    "Bucket",
    "Edge",
    "Instruction",
    "Kind",
    "Program",
    "ProgramRun",
    "follow",
    "holders",
    "lower",
    "owners",
    "place_plan",
    "row_range",
    "spread",
]
