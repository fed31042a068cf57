"""What a processor can do for a process, as far as its settings let it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foretrace.hardware import processor
from foretrace.hardware.processor import Sixteen, instruction_sets, recorded_sets, sixteen_bit, usable_cores

pytestmark = pytest.mark.processor

AMX = ("sse4_1", "avx", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16")


def test_settings_of_onednn_take_away_and_never_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_offered", lambda: AMX)
    assert instruction_sets({}) == instruction_sets({"ONEDNN_MAX_CPU_ISA": "ALL"}) == AMX
    assert instruction_sets({"ONEDNN_MAX_CPU_ISA": "no such set"}) == AMX, "oneDNN passes over it"
    assert instruction_sets({"ONEDNN_MAX_CPU_ISA": "avx2"}) == ("sse4_1", "avx", "avx2")
    assert instruction_sets({"DNNL_MAX_CPU_ISA": "AVX512_CORE_BF16"}) == (
        "sse4_1", "avx", "avx2", "avx512", "avx512_vnni", "avx512_bf16",
    )  # fmt: skip
    monkeypatch.setattr(processor, "_offered", lambda: ("sse4_1", "avx", "avx2"))
    assert instruction_sets({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}) == ("sse4_1", "avx", "avx2")
    monkeypatch.setattr(processor, "_offered", lambda: None)
    assert instruction_sets({}) is None


@pytest.mark.parametrize(
    ("sets", "dtype", "kind"),
    [
        (AMX, "bfloat16", Sixteen.UNITS),
        (AMX, "float16", Sixteen.UNITS),
        (("avx2", "avx512"), "bfloat16", Sixteen.CONVERTED),
        (("avx2", "avx512", "avx512_bf16"), "float16", Sixteen.NONE),
        (("avx2",), "bfloat16", Sixteen.NONE),
        (("avx2", "avx_ne_convert"), "bfloat16", Sixteen.NONE),
        (("neon", "neon_bf16"), "bfloat16", Sixteen.UNITS),
        (("neon",), "float16", Sixteen.UNKNOWN),
        (None, "bfloat16", Sixteen.UNKNOWN),
    ],
)
def test_16_bit_products_by_what_there_is(sets: tuple[str, ...] | None, dtype: str, kind: Sixteen) -> None:
    assert sixteen_bit(sets, dtype) == kind


def test_a_recording_says_what_its_process_could_use() -> None:
    assert recorded_sets({"machine": {"instruction_sets": ["avx2"]}}) == ("avx2",)
    old = {"machine": {"architecture": "x86_64"}, "cpu_capability": "AVX2"}
    assert recorded_sets(old) == ("sse4_1", "avx", "avx2"), "PyTorch's own kernels would use more, were there more"
    assert recorded_sets(old | {"cpu_capability": "AVX512"}) is None, "with or without bfloat16 units"
    assert recorded_sets({}) is None


def test_pytorch_and_linux_agree_on_this_processor() -> None:
    torch = pytest.importorskip("torch")
    offered = instruction_sets({})
    if offered is None or not hasattr(torch.cpu, "_is_avx512_bf16_supported"):
        pytest.skip("nothing tells here")
    assert ("avx512_bf16" in offered) == torch.cpu._is_avx512_bf16_supported()
    assert ("avx2" in offered) == torch.cpu._is_avx2_supported()


def test_onednn_does_what_is_said_of_it() -> None:
    """PyTorch asks oneDNN itself whether it computes in bfloat16, in a process that may use AVX2 only."""
    pytest.importorskip("torch")
    ask = (
        "import torch; from foretrace.hardware.processor import *; "
        "print(torch.ops.mkldnn._is_mkldnn_bf16_supported(), sixteen_bit(instruction_sets(), 'bfloat16'))"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    ran = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=environment, check=True)
    if "sse4_1" not in (instruction_sets({}) or ()):
        pytest.skip("another architecture")
    assert ran.stdout.split() == ["False", "none"]


def test_cores_are_those_of_affinity_and_of_control_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(os, "sched_getaffinity"):
        assert 0 < usable_cores() <= len(os.sched_getaffinity(0))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    else:
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for texts, cores in (
        ([], 8.0),
        (["max 100000\n"], 8.0),
        (["250000 100000\n"], 2.5),
        (["max 100000\n", "150000 100000\n", "400000 100000"], 1.5),
        (["-1 100000"], 8.0),
        (["9000000 100000"], 8.0),
        (["", "x", "0 0"], 8.0),
    ):
        monkeypatch.setattr(processor, "_quota_files", lambda texts=texts: texts)
        assert usable_cores() == cores


def test_the_probe_of_cores_reads_what_there_is() -> None:
    assert all(isinstance(text, str) for text in processor._quota_files())
    assert Path("/proc/self").exists() or processor._quota_files() == []
