"""Which holder of a parameter keeps its optimizer state: one each (ZeRO stage 1, Rajbhandari et al., 2020).

Whole parameters are shared out, not slices of them, so that any optimizer which treats parameters one by one
can step them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_spindle.graph import Parameter


def owners(
    parameters: Iterable[Parameter],
    held: Mapping[str, tuple[int, ...]],
    known: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Parameter to the one of its holders that steps it.

    Guarantees: equal arguments give equal owners, whatever their order. Among parameters of the same holders
    bytes are balanced: the largest first goes to the holder with the fewest (Graham, 1969), where those are
    equal to the one with fewer of all, where those are, to the lower rank. Frozen ones come last. Those in
    ``known`` stay where they are. Parameters without holders are left out.

    >>> sizes = {"a": 5, "b": 4, "c": 3, "d": 9}
    >>> held = {"a": (0, 1), "b": (0, 1), "c": (0, 1), "d": (1,)}
    >>> owners([Parameter(name, size, True) for name, size in sizes.items()], held)
    {'d': 1, 'a': 0, 'b': 1, 'c': 1}
    """
    found: dict[str, int] = {}
    within: dict[tuple[tuple[int, ...], int], int] = {}
    overall: dict[int, int] = {}

    def load(holders: tuple[int, ...], rank: int) -> tuple[int, int, int]:
        return within.get((holders, rank), 0), overall.get(rank, 0), rank

    before = known or {}
    order = sorted(parameters, key=lambda p: (p.name not in before, not p.trainable, -p.bytes, p.name))
    for p in order:
        holders = held.get(p.name)
        if holders is None:
            continue
        rank = before[p.name] if p.name in before else min(holders, key=lambda r: load(holders, r))
        found[p.name] = rank
        within[holders, rank] = within.get((holders, rank), 0) + p.bytes
        overall[rank] = overall.get(rank, 0) + p.bytes
    return found
