"""Step times of deployments: known sizes, measured operators from a folder, and what cannot be."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.hardware.devices import named
from foretrace.serving.llm.deployment import beside, step_times
from foretrace.serving.llm.drafted import draft_like
from foretrace.serving.llm.engine import EngineRules, simulate
from foretrace.serving.llm.operator_tables import TimeGrid, nearest, read_tables
from foretrace.serving.llm.served_model import SERVED, served_model
from foretrace.serving.llm.simulation import SimulationConfig, simulated
from foretrace.serving.llm.step_law import FORMATS, LAWS, LawTimes, Layout, law_of, number_format
from foretrace.serving.llm.step_times import LOW, MIDDLE
from foretrace.serving.requests import of


def test_published_sizes() -> None:
    """Parameters, all and active for a token, in 1e9, as the reports of the models say."""
    published = {"deepseek-v3": (671, 37), "kimi-k2.5": (1026, 32), "qwen3-235b-a22b": (235, 22), "glm-5": (744, 40),
                 "minimax-m2.5": (229, 10), "mixtral-8x7b": (46.7, 12.9)}  # fmt: skip
    for name, (total, active) in published.items():
        model = SERVED[name]
        table = 2 * model.words * model.hidden
        assert model.parameters / 1e9 == pytest.approx(total, rel=0.01)
        assert (model.active_parameters + table / 2) / 1e9 == pytest.approx(active, rel=0.07)


def test_cache_of_latent_and_grouped_attention() -> None:
    """Known answers: 576 numbers a layer of DeepSeek on every device; 8 heads of Llama shared by 8 devices."""
    latent = step_times("deepseek-r1", "b200", tp=8, dtype="fp8", engine="sglang")
    assert latent.kv_bytes_per_token == 61 * 576
    assert step_times("llama-3-8b", "h100", tp=8).kv_bytes_per_token == 2 * 2 * 32 * 128
    assert step_times("llama-3-8b", "h100", tp=16).kv_bytes_per_token == 2 * 2 * 32 * 128, "heads are copied"
    assert step_times("llama-3-8b", "h100").weight_bytes == pytest.approx(2 * 8.03e9, rel=0.01)
    halved = step_times("deepseek-r1", "b200", tp=1, dp=8, ep=8, dtype="fp8", engine="trtllm")
    assert halved.kv_bytes_per_token == 61 * 576 / 8, "each group keeps its own sequences"


@given(
    name=st.sampled_from(sorted(SERVED)), dtype=st.sampled_from(sorted(FORMATS)), engine=st.sampled_from(sorted(LAWS)),
    tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 3]), device=st.sampled_from(["h100", "b200", "a100"]),
)  # fmt: skip
def test_steps_of_any_model(name: str, dtype: str, engine: str, tp: int, pp: int, device: str) -> None:
    steps = step_times(name, device, tp=tp, pp=pp, dtype=dtype, engine=engine)
    assert (np.diff(steps.table.linear_s) >= 0).all() and steps.table.linear_s[0] > 0
    assert steps.table.low < 1 < steps.table.high and steps.whys
    more = step_times(name, device, tp=2 * tp if served_model(name).heads % (2 * tp) == 0 else tp, pp=pp, dtype=dtype,
                      engine=engine)  # fmt: skip
    assert more.weight_bytes <= steps.weight_bytes
    assert more.table.linear_s[-1] <= steps.table.linear_s[-1] * 1.01, "many tokens gain by more devices of a machine"


def test_a_token_reads_every_weight_that_it_meets() -> None:
    """Never quicker than the weights can be read at the peak of the memory, nor computed at the peak."""
    for name, dtype in (("llama-3-8b", "bf16"), ("deepseek-v3", "fp8")):
        model, device = served_model(name), named("h100")
        times = LawTimes(model=model, device=device, layout=Layout(), kept=number_format(dtype), law=law_of("vllm"))
        met = times.linear(np.array([1.0, 4096.0]))
        size = number_format(dtype).dense
        assert met[0] > size * model.active_parameters / (device.memory_gb_s * 1e9)
        assert met[1] > 4096 * 2 * model.active_parameters / (max(device.bf16_tflops, device.fp8_tflops) * 1e12)


def test_a_dtype_that_changes_nothing_of_a_model_is_refused() -> None:
    with pytest.raises(ForetraceError, match=r"`dtype=int4` keeps the weights of experts .* llama-3-8b has no experts"):
        step_times("llama-3-8b", "h100", dtype="int4_wo")
    target = served_model("kimi-k2.5")
    assert step_times(target, "b200", tp=8, dtype="int4").weight_bytes < target.parameters * 0.7 / 8
    draft = draft_like(target, 4, 2048)
    assert beside({"tp": 8, "dtype": "int4", "engine": "vllm"}, draft) == {"dtype": "bf16", "engine": "vllm"}
    notes = [step_times("llama-3-8b", "h100", dtype=dtype).whys for dtype in ("fp8", "bf16")]
    assert [any("keys and values are kept in 8 bits" in why for why in each) for each in notes] == [True, False]


def test_laws_are_within_physics() -> None:
    for engine, law in LAWS.items():
        rates = (law.weight_rate, law.expert_rate, law.cache_rate, law.dense_flops, law.expert_flops, law.link_rate)
        assert all(0 < rate < 1.35 for rate in rates), engine
        assert law.low < law.calibrated_low < 1 < law.calibrated_high < law.high


def test_links_that_the_law_was_not_fitted_to_widen_the_range() -> None:
    assert step_times("llama-3-8b", "l40s", tp=2).table.high > step_times("llama-3-8b", "h100", tp=2).table.high, (
        "PCIe: wider"
    )


@pytest.mark.parametrize(("change", "said"), [
    ({"tp": 3}, "must divide the 32 heads"), ({"pp": 64}, "at most the 32 layers"), ({"ep": 2}, "experts"),
    ({"dtype": "fp3"}, "must be one of bf16"), ({"engine": "tgi"}, "must be one of vllm"), ({"tp": 0}, "1 or more"),
    ({"tables": Path("/nowhere")}, "is no folder"),
])  # fmt: skip
def test_what_cannot_be(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        step_times("llama-3-8b", "h100", **change)


def test_what_an_index_saves_in_long_contexts_is_in_the_range() -> None:
    """GLM-5 attends to 2,048 tokens of 100,000: between nothing of the attention saved and 24 parts of 25."""
    steps = step_times("glm-5", "b200", tp=8, dtype="fp8")
    found = [simulate(of([0.0] * 64, [100_000] * 64, [9] * 64), steps, EngineRules(), end=end) for end in (LOW, MIDDLE)]
    low, middle = (each.finish_s.max() for each in found)
    assert low < middle / 5
    assert any("chooses 2,048" in why for why in steps.whys)


@pytest.mark.parametrize(("model", "device", "layout", "prompt", "output", "system"), [
    ("llama-2-70b", "h100", {"pp": 2}, "100-490", "100-490", "DGX-H100_H100-SXM-80GBx8_TRT"),
    ("llama-2-70b", "h200", {}, "100-490", "100-490", "H200-SXM-141GBx8_TRT"),
    ("mixtral-8x7b", "h100", {}, "60-300", "60-230", "DGX-H100_H100-SXM-80GBx8_TRT"),
    ("mixtral-8x7b", "h200", {}, "60-300", "60-230", "H200-SXM-141GBx8_TRT"),
])  # fmt: skip
def test_tokens_per_second_of_mlperf_lie_in_the_range(
    shared_data: Path, model: str, device: str, layout: dict[str, Any], prompt: str, output: str, system: str
) -> None:
    """Offline results of version 4.1 on eight GPUs; lengths are about those of its data sets."""
    file = shared_data / "serving" / "mlperf" / "inference_v4.1_closed_summary.csv.gz"
    if not file.exists():
        pytest.skip(f"no results of MLPerf at {file}")
    with gzip.open(file, "rt") as text:
        (measured,) = [
            float(row["value"]) for row in csv.DictReader(text)
            if (row["submitter"], row["system"], row["scenario"]) == ("NVIDIA", system, "Offline")
            and row["model"] in (model, f"{model.replace('-2', '2')}-99") and "okens" in row["metric"]
        ]  # fmt: skip
    config = SimulationConfig(
        model=model, device=device, asked=f"burst requests=8000 prompt={prompt} output={output}",
        layout=layout | {"dtype": "fp8", "engine": "trtllm"}, replicas=8 // layout.get("pp", 1),
        rules=EngineRules(sequences=1024, token_budget=8192),
    )  # fmt: skip
    found = simulated(config).figures.rates["tokens_per_s"]
    assert found.low is not None and found.high is not None
    assert found.low < measured < found.high


@pytest.mark.parametrize("dtype", sorted({*FORMATS} - {"int4"}))
def test_no_step_computes_more_than_the_peak(dtype: str) -> None:
    """MFU of a device without latencies stays below 1, whatever multiplies in which format."""
    steps = step_times("llama-2-70b", "b200", dtype=dtype, engine="trtllm")
    tokens = steps.table.tokens[-1]
    assert steps.flops_per_token * tokens / steps.table.linear_s[-1] < steps.peak_flops


def test_heads_of_keys_that_devices_cannot_share_evenly_are_refused() -> None:
    """As engines do: 48 heads can be shared by 6 and 12 devices, and their 8 heads of keys cannot."""
    for tp in (6, 12):
        with pytest.raises(ForetraceError, match="`tp=` must divide the 8 heads of keys of mixtral-8x22b"):
            step_times("mixtral-8x22b", "h100", tp=tp)
    assert step_times("mixtral-8x22b", "h100", tp=16).kv_bytes_per_token == 2 * 2 * 56 * 128


def test_a_model_that_nobody_knows() -> None:
    with pytest.raises(ForetraceError, match="did you mean"):
        step_times("deepseek-v33", "h100")


# --- measured operators ----------------------------------------------------------------------------------------------


def test_a_grid_is_linear_in_logarithms() -> None:
    grid = TimeGrid(axes=(np.array([1.0, 4.0]), np.array([1.0, 100.0])), seconds=np.array([[1.0, 10.0], [4.0, np.nan]]))
    assert grid.at(2.0, 1.0) == pytest.approx(2.0)
    assert grid.at(1.0, 10.0) == pytest.approx(10**0.5)
    assert grid.at(16.0, 1.0) == pytest.approx(16.0), "the last segment goes on"
    assert np.isfinite(grid.at(np.array([1.0, 4.0]), 100.0)[0])


def test_the_nearest_heads() -> None:
    assert nearest([(32, 8, 128), (64, 8, 64)], (16, 8, 128)) == (32, 8, 128)
    assert nearest([(32, 8, 128)], (32, 8, 32 * 128)) is None, "too far"
    assert nearest([], (1, 1, 1)) is None


def parquet(path: Path, **columns: list[Any]) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(arrow.table(columns), path)


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Products of twice the time of an ideal H100, from two versions of an engine."""
    sizes = [(m, n, k) for m in (1, 64, 4096) for n in (1024, 65536) for k in (1024, 16384)]
    for version, factor in (("0.9.0", 50.0), ("0.10.0", 2.0)):
        times = [factor * 1e3 * max(2 * n * k / 3.35e12, 2 * m * n * k / 989e12) for m, n, k in sizes]
        rows = list(zip(*sizes, strict=True))
        parquet(
            tmp_path / "h100" / "gemm" / "vllm" / version / "gemm_perf.parquet",
            device=["NVIDIA H100 80GB HBM3"] * len(sizes), gemm_dtype=["bfloat16"] * len(sizes), m=list(rows[0]),
            n=list(rows[1]), k=list(rows[2]), latency=times,
        )  # fmt: skip
    return tmp_path


def test_the_newest_version_of_measured_operators_is_used(tables: Path) -> None:
    read = read_tables(tables, named("h100"), "vllm")
    assert dict(read.sources) == {"gemm": "vllm 0.10.0"}
    steps, by_law = step_times("llama-3-8b", "h100", tables=read), step_times("llama-3-8b", "h100")
    ideal = 2 * served_model("llama-3-8b").active_parameters / 3.35e12
    assert steps.table.linear_s[0] == pytest.approx(2 * ideal, rel=0.15)
    assert (steps.table.decode_s == by_law.table.decode_s).all(), "attention was not measured"
    assert "gemm: measured with vllm 0.10.0" in steps.whys
    other = step_times("llama-3-8b", "h100", tables=tables, engine="trtllm")
    assert other.table.high / law_of("trtllm").high == pytest.approx(1.2), "another engine's: wider"


def test_tables_of_another_device_are_refused(tables: Path, tmp_path: Path) -> None:
    with pytest.raises(ForetraceError, match="no measured operators of B200"):
        read_tables(tables, named("b200"), "vllm")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "gemm_perf.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(ForetraceError, match="cannot be read as parquet"):
        read_tables(tmp_path / "bad", named("h100"), "vllm")


def test_published_tables_give_finite_steps(shared_data: Path) -> None:
    folder = shared_data / "serving" / "aiconfigurator"
    pytest.importorskip("pyarrow")
    dense = step_times("llama-3-8b", "h100", tp=2, tables=folder, engine="trtllm")
    assert {"gemm: measured with trtllm 1.2.0rc5", "decode: measured with trtllm 1.2.0rc5"} <= set(dense.whys)
    assert (np.diff(dense.table.prefill_s, axis=0) >= 0).all() and (np.diff(dense.table.decode_s, axis=1) >= 0).all()
    older = step_times("llama-3-8b", "a100", tables=folder)
    assert older.table.linear_s[0] > step_times("llama-3-8b", "h100", tables=folder).table.linear_s[0]
