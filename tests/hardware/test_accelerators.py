"""Accelerators that need not exist: their area, their text, what no chip can have."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.hardware.accelerators import MB, TPU_LIKE, Accelerator, AcceleratorDevice, accelerator, area_terms
from foretrace.hardware.devices import find, named
from foretrace.plan.codesign.search import design_columns

POWERS = st.integers(0, 12).map(lambda power: 1 << power)
DESIGNS = st.builds(
    Accelerator, tensor_cores=POWERS, width=st.integers(1, 256), depth=st.integers(1, 256), vector_cores=POWERS,
    lanes=POWERS, buffer=st.integers(1 << 19, 1 << 28), ports=POWERS, hbm_gb=st.integers(1, 200).map(float),
    hbm_gb_s=st.floats(1, 1e4), link_gb_s=st.floats(0.1, 1e4), clock_ghz=st.floats(0.1, 4),
)  # fmt: skip


def test_every_published_area_and_every_published_design(shared_data: Path) -> None:
    packed = (shared_data / "placement" / "phaze" / "cores.json.gz").read_bytes()
    published = json.loads(gzip.decompress(packed))
    keys = ("num_tc", "width", "depth", "num_vc", "width_vc", "GLB_Buffer")
    sizes = np.array([[each[key] for key in keys] for each in published])
    area = np.array([each["area"] for each in published])
    assert len(published) == 29_360
    found = design_columns()
    assert np.array_equal(found.sizes, sizes)  # the same ones, in the same order
    assert np.abs(found.area / area - 1).max() <= 1e-11
    for row in (0, 7_000, 29_359):
        assert found.at(row, TPU_LIKE).area == pytest.approx(area[row], rel=1e-11)


def test_the_terms_are_thirty() -> None:
    assert len(area_terms()) == 30
    assert TPU_LIKE.area == pytest.approx(278_826_676.312, rel=1e-9)
    assert TPU_LIKE.peak_flops == 2 * 8 * 128 * 128 * 1.05e9


@given(DESIGNS)
def test_a_text_names_its_design(design: Accelerator) -> None:
    again = accelerator(str(design))
    assert str(again) == str(design)
    assert replace(again, hbm_gb_s=design.hbm_gb_s, link_gb_s=design.link_gb_s, clock_ghz=design.clock_ghz) == design


def test_a_design_is_a_device() -> None:
    device = named("accelerator:tc=4x64x32,vc=8x64,buffer=16MB,hbm=80GB,bandwidth=2000,link=100GB/s,clock=1GHz")
    assert isinstance(device, AcceleratorDevice)
    assert device == find(device.name) == named(device.short) == device.design.device()
    assert device.bf16_tflops == pytest.approx(2 * 4 * 64 * 32 * 1e9 / 1e12)
    assert (device.memory_gb, device.memory_gb_s, device.network_gb_s) == (80, 2000, 100)
    assert device.design.lanes == 64
    assert named("accelerator:").name == str(TPU_LIKE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("accelerator:tc=8x128", "3 whole numbers joined by x"),
        ("accelerator:tc=8x128xmany", "3 whole numbers"),
        ("accelerator:vc=2x128x3", "2 whole numbers"),
        ("accelerator:buffer=big", "buffer= of an accelerator must be a number"),
        ("accelerator:clock=3parsec", "a number of GHz"),
        ("accelerator:core=3", "no parameter core"),
        ("accelerator:tc=0x128x128", "tensor cores of an accelerator must be above 0"),
        ("accelerator:hbm=1e999GB", "hbm gb of an accelerator must be above 0"),
        ("accelerator:tc=1x256x256,buffer=64KB", "must hold one tile of its 256x256 arrays"),
    ],
)
def test_what_is_no_design_is_said(text: str, said: str) -> None:
    with pytest.raises(ForetraceError, match=said) as error:
        named(text)
    assert len(str(error.value).split(". ")) == 1


def test_an_area_is_known_for_powers_of_two() -> None:
    with pytest.raises(ForetraceError, match="area of a tensor core is known"):
        _ = Accelerator(width=3, depth=5).area
    with pytest.raises(ForetraceError, match="area of a global buffer"):
        _ = Accelerator(buffer=100 * MB).area
