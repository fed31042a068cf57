"""Utilisation over a space of networks: by hand, and on the measured one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from reproductions.nas_bench_201.study import Networks, Study, column, rank_correlation, ranks, study, subset


def test_ranks_share_ties_and_correlate_as_spearman() -> None:
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]
    x = np.arange(10.0)
    assert rank_correlation(x, np.exp(x)) == pytest.approx(1.0)
    assert rank_correlation(x, -x) == pytest.approx(-1.0)
    assert np.isnan(rank_correlation(x, np.ones(10)))
    tied = rank_correlation(np.array([1.0, 2, 2, 3]), np.array([1.0, 3, 2, 4]))
    assert tied == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_columns_name_device_and_batch() -> None:
    assert column("2080ti_256") == (column("2080ti")[0], 256)
    peaks, batch = column("titan_rtx_32")
    assert (peaks.name, batch) == ("Titan RTX", 32)
    assert column("raspi4")[1] == 1
    with pytest.raises(ForetraceError, match="known device"):
        column("gtx480_1")


def made(n: int = 800, overhead_s: float = 0.0) -> Networks:
    """Networks whose latency is decided by FLOPs and by kernels; utilisation of either is known."""
    rng = np.random.default_rng(0)
    flops = np.exp(rng.choice(np.linspace(16, 20, 25), n) + rng.uniform(0, 1e-3, n))
    kernels = rng.integers(50, 400, n).astype(float)
    peak = column("2080ti")[0].flops_per_s
    return Networks(
        flops=flops,
        nbytes={1: flops / 20, 256: 256 * flops / 20},
        kernels=kernels,
        latencies_s={
            "2080ti_1": flops / (0.5 * peak) + overhead_s * kernels,
            "2080ti_256": 256 * flops / (0.5 * peak) + overhead_s * kernels,
        },
    )


def searches(found: Study, at: int) -> dict[str, float]:
    return {each.strategy: each.regret for each in found.columns[at].searches}


def test_where_flops_decide_latency_they_find_the_best_network() -> None:
    found = study(made(), measured=40, draws=3)
    one = found.columns[0]
    assert one.flops_with_latency == pytest.approx(1.0)
    assert one.utilisation[1] == pytest.approx(0.5)
    assert one.spread == pytest.approx(1.0, abs=1e-6)
    lost = searches(found, 0)
    assert lost["FLOPs"] < 0.02 and lost["utilisation"] < 0.02 < lost["random"]


def test_where_launches_decide_latency_utilisation_finds_more_than_flops() -> None:
    found = study(made(overhead_s=1e-6), measured=40, draws=3)
    one, large = found.columns
    assert one.flops_with_latency < 0.7 < large.flops_with_latency
    assert one.with_flops > 0.8  # larger networks use more of the device
    lost = searches(found, 0)
    assert lost["utilisation"] < lost["FLOPs"]
    assert found.between["2080ti_1"]["2080ti_1"] == pytest.approx(1.0)
    assert found.between["2080ti_1"]["2080ti_256"] == pytest.approx(found.between["2080ti_256"]["2080ti_1"])


def test_networks_above_the_peak_are_left_out_and_counted() -> None:
    networks = made()
    latency = networks.latencies_s["2080ti_1"].copy()
    latency[:7] = 1e-12
    wrong = Networks(
        flops=networks.flops, nbytes=networks.nbytes, kernels=networks.kernels, latencies_s={"2080ti_1": latency}
    )
    found = study(wrong, measured=40, draws=1)
    assert found.columns[0].left_out == 7 and found.columns[0].highest <= 1
    assert any("7 networks" in sentence for sentence in found.inferred)


def test_what_is_no_search_is_refused() -> None:
    with pytest.raises(ForetraceError, match="no search"):
        study(made(100), measured=40)
    with pytest.raises(ForetraceError, match="no search"):
        study(made(), measured=10)
    networks = made()
    microseconds = {"2080ti_1": networks.latencies_s["2080ti_1"] / 1e6}
    with pytest.raises(ForetraceError, match="above the peak"):
        study(
            Networks(flops=networks.flops, nbytes=networks.nbytes, kernels=networks.kernels, latencies_s=microseconds),
            measured=40,
        )


def test_the_measured_space(shared_data: Path) -> None:
    """15,625 networks: utilisation varies six-fold, goes along with FLOPs, and guides a search better than they do."""
    from reproductions.nas_bench_201.tables import read_networks

    folder = shared_data / "nas-latency"
    networks = read_networks(folder / "nasbench201_arch.csv.gz", folder / "nasbench201_latency.csv.gz")
    assert len(networks) == 15_625
    found = study(subset(networks, np.arange(0, 15_625, 8)), draws=5)
    for each in found.columns:
        if each.name != "raspi4":
            assert each.with_flops > 0.8
            assert each.highest < 0.35
            lost = {search.strategy: search.regret for search in each.searches}
            assert lost["utilisation"] < lost["random"] < lost["FLOPs"] or each.batch == 256
    assert found.between["2080ti_256"]["titan_rtx_256"] > 0.95 > found.between["2080ti_1"]["2080ti_256"]
