"""The catalog: names as recordings spell them, and figures that fit together."""

from __future__ import annotations

import pytest

from foretrace.errors import ForetraceError
from foretrace.hardware.devices import Device, catalog, find, named


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ("Tesla V100-DGXS-32GB", "NVIDIA V100 SXM2"),
        ("Tesla V100-SXM2-32GB", "NVIDIA V100 SXM2"),
        ("Tesla V100-PCIE-16GB", "NVIDIA V100 PCIe 32 GB"),
        ("NVIDIA A100-PG509-200", "NVIDIA A100 SXM4 40 GB"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 SXM4 80 GB"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM5 80 GB"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe 80 GB"),
        ("NVIDIA H200", "NVIDIA H200 SXM"),
        ("NVIDIA B200", "NVIDIA B200"),
        ("NVIDIA GeForce RTX 2080 Ti", "NVIDIA GeForce RTX 2080 Ti"),
        ("AMD Instinct MI300X", "AMD Instinct MI300X"),
        ("AMD Instinct MI300X VF", "AMD Instinct MI300X"),
        ("Tesla T4", "NVIDIA T4"),
    ],
)
def test_recorded_names_are_found(recorded: str, expected: str) -> None:
    device = find(recorded)
    assert device is not None and device.name == expected


@pytest.mark.parametrize(
    "name", ["", "AMD Radeon Graphics", "NVIDIA GH200 480GB", "NVIDIA RTX A3000", "NVIDIA H100 NVL"]
)
def test_others_are_not_guessed(name: str) -> None:
    assert find(name) is None


def test_figures_are_plausible_and_sourced() -> None:
    assert len({device.name for device in catalog()}) == len({device.short for device in catalog()}) == 36
    for device in catalog():
        assert device.source and device.sms > 0
        assert set(device.confirmed) <= {field for field in Device.__dataclass_fields__ if getattr(device, field)}
        if device.vendor == "Google":  # no recording names one
            assert not device.patterns
            continue
        assert device.patterns
        assert 1 < device.fp32_tflops < 200 and 100 < device.memory_gb_s < 10_000
        assert not device.tf32_tflops or device.fp32_tflops < device.tf32_tflops < device.bf16_tflops


@pytest.mark.parametrize(
    ("given", "short"),
    [
        ("h200", "H200-SXM-141GB"),
        ("h100", "H100-SXM5-80GB"),
        ("A100", "A100-SXM4-80GB"),
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("tpu-v4", "TPU-v4"),
    ],
)
def test_a_user_may_shorten_a_name(given: str, short: str) -> None:
    assert named(given).short == short


@pytest.mark.parametrize("given", ["A100-SXM", "", "H300", "-", "a100-80gbb", "a100-8gb", "a100-80"])
def test_a_name_that_is_none_or_several_is_refused_with_choices(given: str) -> None:
    with pytest.raises(ForetraceError, match=r"choose|foretrace devices|did you mean"):
        named(given)


def test_links_of_known_devices() -> None:
    assert named("A100-SXM4-80GB").scaleup_gb_s == 600.0 and named("A100-SXM4-80GB").pcie_gb_s == 32.0
    assert "aiconfigurator" in named("A100-SXM4-80GB").confirmed["scaleup_gb_s"]
    assert not named("T4").scaleup_link
