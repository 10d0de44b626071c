"""The pool of parameter device groups: a bounded number of them (paper, section 3.6).

Each group costs connections and, on GPUs, memory, and unlike placements ask for many. Where they are
too many, a parameter is summed over a wider group that is there anyway: devices in it that do not hold
the parameter add zeros.
"""

from __future__ import annotations

from collections.abc import Mapping

Group = tuple[int, ...]


def most_groups(devices: int) -> int:
    """As many as there are aligned blocks of 1, 2, 4 … devices: 2N - 1 where N is a power of two."""
    return 2 * devices - 1


def pooled(wanted: Mapping[Group, int], devices: int, most: int) -> dict[Group, Group]:
    """For each group of more than one device the group of the pool that stands for it.

    Guarantees: itself, or a superset of it; at most ``most`` different ones, besides that of all
    devices, which is always there. Those over which fewest bytes are summed are given up first, for
    the smallest superset that is left.

    Args:
        wanted: sorted devices to the bytes that are summed over them.

    >>> pooled({(0, 1): 10, (0, 1, 2): 90, (1, 3): 50}, devices=4, most=2)
    {(0, 1): (0, 1, 2), (0, 1, 2): (0, 1, 2), (1, 3): (1, 3)}
    """
    everyone = tuple(range(devices))
    by_bytes = sorted(wanted, key=lambda g: (-wanted[g], g))
    kept = [g for g in by_bytes if g != everyone][:most]
    candidates = sorted({everyone, *kept}, key=lambda g: (len(g), g))
    return {g: next(c for c in candidates if set(g).issubset(c)) for g in sorted(wanted)}
