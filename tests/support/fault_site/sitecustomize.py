"""Brings a deliberate fault into every Python process that a test launches (see tests/faults)."""

import os
import sys
from pathlib import Path

if os.environ.get("SPINDLE_FAULT"):
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.faults import apply_fault

    apply_fault(os.environ["SPINDLE_FAULT"])
