"""Time series in sktime's ``.ts`` text format, read from its wheel without importing it (1.5 s, pandas)."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def dataset_file(name: str, split: str) -> Path:
    """Where the installed sktime keeps a data set; ``split`` is TRAIN or TEST."""
    spec = find_spec("sktime")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"{name} is read from the sktime wheel: pip install 'lightning_spindle[data]'"
        )
    return Path(spec.origin).parent / "datasets" / "data" / name / f"{name}_{split}.ts"


def read_ts(path: Path) -> tuple[list[Tensor], Tensor]:
    """The series, each [steps, channels] float32, and their labels [series] int64.

    Labels count the names of the ``@classLabel`` line from 0. One line is one series: channels separated by
    colons, the class name last, values by commas.
    """
    names: list[str] = []
    series, labels = [], []
    for line in path.read_text().splitlines():
        if line.startswith("@classLabel"):
            names = line.split()[2:]
        elif line and line[0] not in "#@":
            *channels, name = line.split(":")
            values = np.array([channel.split(",") for channel in channels], dtype=np.float32)
            series.append(torch.from_numpy(values.T.copy()))
            labels.append(names.index(name.strip()))
    return series, torch.tensor(labels)


def standardised(train: list[Tensor], test: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Both splits with every channel's mean and spread over the training steps taken out."""
    steps = torch.cat(train)
    mean, spread = steps.mean(0), steps.std(0)
    return [(s - mean) / spread for s in train], [(s - mean) / spread for s in test]
