"""What was measured on the devices, as plain data (paper, section 3.2 and appendix A).

Legend: B rows of a task's global batch; r rows that one device works on. Times of operators
are milliseconds, times of links seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_spindle.cluster import Link
from lightning_spindle.planner.problem import LayerTime

FORMAT = 1
FREE = Link(0.0, math.inf)


@dataclass(frozen=True, slots=True)
class LinkSamples:
    """Messages and sums between ranks in the α-β model.

    ``inside`` is a message between two devices of one island, ``between`` one that leaves
    its island, None where there is one island only. ``all_reduce`` maps a group size to
    the sum over that many devices, ``exchange_s`` is the sum of a few results over all.
    """

    inside: Link = FREE
    between: Link | None = None
    all_reduce: Mapping[int, Link] = field(default_factory=dict)
    exchange_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Samples:
    """Times of every operator by r, and links.

    ``operators`` holds what the clock showed while ``busy`` ranks of one machine computed
    at the same time on ``cores`` cores (None: every rank has a device of its own).
    ``repeats`` is the smallest number of timed blocks behind a figure; 0 says that the
    budget ended with the warm-up and the warm-up's times stand.

    Raises:
        ValueError: a time is no number >= 0, or a number of rows, ranks or cores is below 1.
    """

    operators: Mapping[str, Mapping[int, LayerTime]]
    links: LinkSamples = field(default_factory=LinkSamples)
    busy: int = 1
    cores: int | None = None
    repeats: int = 0

    def __post_init__(self) -> None:
        if self.busy < 1 or (self.cores is not None and self.cores < 1):
            raise ValueError(f"invalid samples: {self.busy} busy ranks on {self.cores} cores")
        for name, times in self.operators.items():
            for rows, time in times.items():
                good = all(math.isfinite(t) and t >= 0 for t in (time.forward_ms, time.backward_ms))
                if rows < 1 or not good:
                    raise ValueError(f"invalid samples: operator {name} took {time} at {rows} rows")

    @property
    def alone_factor(self) -> float:
        """What a measured time shrinks to where its rank has a core of its own: min(1, cores / busy).

        The clock ran while ``busy`` ranks shared ``cores`` cores, each going at the rate
        cores / busy. The simulator shares cores itself, by the same rule, so it must be given
        times that are free of it; with ``busy`` ranks active it gives back what was measured.
        """
        return 1.0 if self.cores is None else min(1.0, self.cores / self.busy)

    def alone(self, operator: str) -> dict[int, LayerTime]:
        """An operator's times on a core of its own."""
        factor = self.alone_factor
        return {
            rows: LayerTime(time.forward_ms * factor, time.backward_ms * factor)
            for rows, time in self.operators[operator].items()
        }

    def to_json(self) -> str:
        """Text from which ``from_json`` makes equal samples; operators ordered by name."""
        body = {
            "format": FORMAT,
            "busy": self.busy,
            "cores": self.cores,
            "repeats": self.repeats,
            "operators": {
                name: {str(r): [t.forward_ms, t.backward_ms] for r, t in sorted(times.items())}
                for name, times in sorted(self.operators.items())
            },
            "links": {
                "inside": _link_body(self.links.inside),
                "between": None if self.links.between is None else _link_body(self.links.between),
                "all_reduce": {str(n): _link_body(k) for n, k in sorted(self.links.all_reduce.items())},
                "exchange_s": self.links.exchange_s,
            },
        }
        return json.dumps(body, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Samples:
        """Raises ValueError where ``text`` holds no samples."""
        try:
            body = json.loads(text)
            if body["format"] != FORMAT:
                raise ValueError(f"invalid samples: format {body['format']!r}, expected {FORMAT}")
            links = body["links"]
            return cls(
                {
                    name: {int(r): LayerTime(float(f), float(b)) for r, (f, b) in times.items()}
                    for name, times in body["operators"].items()
                },
                LinkSamples(
                    _link_of(links["inside"]),
                    None if links["between"] is None else _link_of(links["between"]),
                    {int(n): _link_of(link) for n, link in links["all_reduce"].items()},
                    float(links["exchange_s"]),
                ),
                int(body["busy"]),
                None if body["cores"] is None else int(body["cores"]),
                int(body["repeats"]),
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as e:
            raise ValueError(f"invalid samples: missing or malformed field ({e})") from e


def fit_link(points: Sequence[tuple[float, float]]) -> Link:
    """The α-β model (latency, rate) through (bytes, seconds), least squares of relative errors.

    Relative, since sizes are spaced by their logarithm and a large message would otherwise
    hide the latency. Where the best latency is negative it is 0 and the rate is fitted alone;
    where times do not grow with the size the rate is infinite.

    >>> fit_link([(100.0, 2.0), (300.0, 4.0)])
    Link(latency_s=1.0, bytes_per_s=100.0)

    Raises:
        ValueError: no points, or a time that is not above 0.
    """
    if not points or any(seconds <= 0 for _, seconds in points):
        raise ValueError(f"no α-β model through {list(points)}")
    weights = [1.0 / seconds**2 for _, seconds in points]
    total = sum(weights)
    size = sum(w * s for w, (s, _) in zip(weights, points, strict=True)) / total
    mean_s = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (s - size) ** 2 for w, (s, _) in zip(weights, points, strict=True))
    joint = sum(w * (s - size) * (t - mean_s) for w, (s, t) in zip(weights, points, strict=True))
    if spread <= 0 or joint <= 0:
        return Link(mean_s, math.inf)
    slope = joint / spread
    latency_s = mean_s - slope * size
    if latency_s >= 0:
        return Link(latency_s, 1.0 / slope)
    slope = sum(w * s * t for w, (s, t) in zip(weights, points, strict=True)) / sum(
        w * s * s for w, (s, _) in zip(weights, points, strict=True)
    )
    return Link(0.0, 1.0 / slope)


def _link_body(link: Link) -> list[float | None]:
    """JSON has no infinity: a free link's rate is null."""
    return [link.latency_s, None if math.isinf(link.bytes_per_s) else link.bytes_per_s]


def _link_of(body: Any) -> Link:
    latency_s, rate = body
    return Link(float(latency_s), math.inf if rate is None else float(rate))
