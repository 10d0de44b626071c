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
@pytest.mark.parametrize("name", NAMES)
def test_each_cluster_has_any_number_of_devices(name: str, devices: int) -> None:
    built = build_cluster(composed(name, f"devices={devices}"))
    assert (built.name, built.cluster.devices) == (name, devices)
    costs = AnalyticCosts(graph_of(("a", 1)), built.cluster, kind=built.kind)
    assert 0 < costs.operator_s("a/0", 8, True) < 10
    assert costs.all_reduce_s(10**6, range(devices)) > 0 or devices == 1
    assert built.cluster.memory_bytes == built.kind.memory_bytes


def test_the_processes_of_a_machine_share_its_cores() -> None:
    assert build_cluster(composed("cpu2", "devices=4", "island_size=4")).cluster.cores == 2
    assert build_cluster(composed("h200")).cluster.cores is None


def test_islands_of_another_make_have_their_own_links() -> None:
    cluster = build_cluster(composed("mixed")).cluster
    pcie = Link(3e-5, 2e10)
    assert [cluster.link(a, b) for a, b in ((0, 1), (15, 8), (16, 17), (24, 31))] == [A800.inside] * 2 + [
        pcie
    ] * 2
    assert cluster.link(16, 24) == cluster.link(0, 16) == cluster.between
    assert build_cluster(composed("mixed", "devices=16")).cluster.islands == ()


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
