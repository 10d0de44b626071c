"""What capture says when it cannot take a step apart."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class CaptureWarning(UserWarning):
    """A step, or a part of it, runs as one coarse operator; the text says which and why."""


class TraceError(Exception):
    """A step cannot be traced faithfully. Capture answers with a coarser operator, never with a guess."""


class StepOutputError(ValueError):
    """A step gives out what Spindle does not gather; the user has to change it."""


def reason_of(error: BaseException) -> str:
    """The error's message with the innermost line of user code, ``message (file:line)``."""
    lines = str(error).strip().splitlines()
    message = lines[0] if lines else type(error).__name__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        library = frame.filename.startswith(_FOREIGN) or "site-packages" in frame.filename
        if not library and not frame.filename.startswith("<"):
            return f"{message} ({frame.filename}:{frame.lineno})"
    return message
