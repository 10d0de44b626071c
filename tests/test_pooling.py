"""The pool of parameter device groups."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_spindle.program.pooling import most_groups, pooled

DEVICES = 6
GROUPS = st.sets(st.integers(0, DEVICES - 1), min_size=2).map(lambda g: tuple(sorted(g)))


@given(st.dictionaries(GROUPS, st.integers(1, 1000), max_size=20), st.integers(0, 12))
def test_every_group_has_a_superset_in_a_bounded_pool(wanted: dict[tuple[int, ...], int], most: int) -> None:
    pool = pooled(wanted, DEVICES, most)
    assert pool.keys() == wanted.keys()
    assert all(set(group) <= set(pool[group]) for group in wanted)
    used = set(pool.values()) - {tuple(range(DEVICES))}
    assert len(used) <= most
    assert used <= wanted.keys()
    assert all(pool[group] == group for group in used)
    if len(wanted) <= most:
        assert all(pool[group] == group for group in wanted)


def test_groups_with_most_bytes_stay_and_the_smallest_superset_stands_in() -> None:
    wanted = {(0, 1): 5, (0, 1, 2): 100, (0, 1, 2, 4): 200, (2, 5): 6, (3, 4): 50}
    assert pooled(wanted, DEVICES, 3) == {
        (0, 1): (0, 1, 2),
        (0, 1, 2): (0, 1, 2),
        (0, 1, 2, 4): (0, 1, 2, 4),
        (2, 5): tuple(range(DEVICES)),
        (3, 4): (3, 4),
    }


def test_aligned_blocks_are_never_given_up() -> None:
    devices = 8
    sizes = (2, 4, 8)
    blocks = {tuple(range(i, i + n)): 1 for n in sizes for i in range(0, devices, n)}
    pool = pooled(blocks, devices, most_groups(devices))
    assert all(pool[block] == block for block in blocks)
