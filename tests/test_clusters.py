"""``conf/cluster``: each composes and builds, at any number of devices."""

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarking.clusters import build_cluster
from lightning_spindle.cluster import Link
from lightning_spindle.costs import A800, AnalyticCosts
from tests.support.scripts import ROOT
from tests.test_simulate import graph_of

NAMES = sorted(p.stem for p in (ROOT / "conf" / "cluster").glob("*.yaml"))


def composed(name: str, *overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(ROOT / "conf" / "cluster"), version_base="1.3"):
        found: Any = OmegaConf.to_container(compose(name, list(overrides)))
    return found


def test_there_are_the_clusters_of_the_paper_and_others() -> None:
    assert {"a800", "a100", "h100", "h200", "cpu2", "mixed"} <= set(NAMES)
    assert build_cluster(composed("a800")).cluster == A800.cluster(64)


@pytest.mark.parametrize("devices", [1, 4, 20, 64])
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"mixed"}))
def test_each_cluster_has_any_number_of_devices(name: str, devices: int) -> None:
    built = build_cluster(composed(name, f"devices={devices}"))
    assert (built.name, built.cluster.devices) == (name, devices)
    costs = AnalyticCosts(graph_of(("a", 1)), built.cluster, kind=built.kind)
    assert 0 < costs.operator_s("a/0", 8, True) < 10
    assert costs.all_reduce_s(10**6, range(devices)) > 0 or devices == 1
    assert built.cluster.memory_bytes == built.kind.memory_bytes


@pytest.mark.parametrize("devices", [1, 2, 4, 7])
def test_the_processes_of_a_machine_share_its_cores(devices: int) -> None:
    built = build_cluster(composed("cpu2", f"devices={devices}"))
    cluster = built.cluster
    assert {cluster.island(d) for d in range(devices)} == {0}
    assert cluster.cores == 2
    assert {cluster.link(0, d) for d in range(1, devices)} <= {built.kind.inside}
    assert build_cluster(composed("h200")).cluster.cores is None


def test_machines_of_a_given_size_have_cores_each() -> None:
    cluster = build_cluster(composed("cpu2", "devices=4", "island_size=2")).cluster
    assert [cluster.island(d) for d in range(4)] == [0, 0, 1, 1]
    assert cluster.cores == 2


@pytest.mark.parametrize(
    ("devices", "slow"), [(10, {1}), (16, {1}), (20, {2}), (32, {2, 3}), (40, {3, 4}), (64, {4, 5, 6, 7})]
)
def test_the_second_half_of_the_islands_has_its_own_links(devices: int, slow: set[int]) -> None:
    """Of an odd number of islands the one in the middle is like the first."""
    cluster = build_cluster(composed("mixed", f"devices={devices}")).cluster
    firsts = range(0, devices, 8)
    pcie = {cluster.island(d) for d in firsts if cluster.link(d, d + 1) == Link(3e-5, 2e10)}
    nvlink = {cluster.island(d) for d in firsts if cluster.link(d, d + 1) == A800.inside}
    assert (pcie, nvlink) == (slow, set(range(len(firsts))) - slow)
    assert cluster.link(0, devices - 1) == A800.cluster(64).between


@pytest.mark.parametrize("overrides", [["devices=1"], ["devices=8"], ["devices=9"], ["island_size=1"]])
def test_a_second_half_without_links_is_refused(overrides: list[str]) -> None:
    with pytest.raises(ValueError, match=r"cluster mixed: .* no two .* second half of the islands"):
        build_cluster(composed("mixed", *overrides))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("kind=A900", "no kind of device is called 'A900'; there are A800-80GB"),
        ("+nodes=8", "cluster a800: unknown settings nodes"),
        ("devices=0", "invalid cluster: 0 devices"),
    ],
)
def test_what_cannot_be_built_is_refused(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_cluster(composed("a800", override))
