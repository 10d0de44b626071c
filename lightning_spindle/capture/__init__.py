"""From LightningModules to operators: the graph that is planned and the pieces that run.

``batch_layout`` finds where a batch holds its rows, ``capture`` takes a step of all tasks apart.
"""

from lightning_spindle.capture.api import capture
from lightning_spindle.capture.errors import CaptureWarning
from lightning_spindle.capture.layout import batch_layout, take_rows
from lightning_spindle.capture.pieces import (
    BatchIndex,
    BatchLayout,
    Capture,
    LeafLayout,
    LeafRef,
    LogCall,
    Piece,
    ValueRef,
)
from lightning_spindle.capture.trees import each_tensor, flatten, unflatten

__all__ = [
    "BatchIndex",
    "BatchLayout",
    "Capture",
    "CaptureWarning",
    "LeafLayout",
    "LeafRef",
    "LogCall",
    "Piece",
    "ValueRef",
    "batch_layout",
    "capture",
    "each_tensor",
    "flatten",
    "take_rows",
    "unflatten",
]
