"""What jobs are compared on: a workload of some size on a cluster, told from others by a fingerprint."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "setups"
"""Beside a table of results: the setups that its rows name, whole."""


def size_name(workload: Mapping[str, Any]) -> str:
    """Of a composed ``workload`` group that is simulated: full unless something else is asked for."""
    return workload.get("size") or "full"


def title_of(workload: Mapping[str, Any]) -> str:
    """The workload's name, and its size's where that is another than the paper's."""
    size = size_name(workload)
    return workload["name"] if size == "full" else f"{workload['name']} ({size})"


def described(workload: Mapping[str, Any], cluster: Mapping[str, Any]) -> str:
    """All of both groups that a simulated iteration can depend on but the number of tasks, as JSON."""
    size = size_name(workload)
    sizes = workload.get("sizes") or {}
    asked = {"workload": workload["name"], "size": {size: sizes.get(size)}, "cluster": cluster}
    return json.dumps(asked, indent=1, sort_keys=True)


def fingerprint(workload: Mapping[str, Any], cluster: Mapping[str, Any]) -> str:
    """Equal for equal setups."""
    return hashlib.sha256(described(workload, cluster).encode()).hexdigest()[:12]


def keep(results: Path, workload: Mapping[str, Any], cluster: Mapping[str, Any]) -> None:
    """Write the setup beside the table whose rows name it."""
    path = results.parent / FOLDER / f"{fingerprint(workload, cluster)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(described(workload, cluster) + "\n")
