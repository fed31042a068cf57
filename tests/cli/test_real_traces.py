"""Every recording of other machines is answered, or refused with one line that says why."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from foretrace.cli.app import run
from tests.cli.conftest import Answer

KINETO = (
    "hta/amd_trace_mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "hta/critical_path_alexnet_benchmark_result_2869224_1695835535_trace.json.gz",
    "hta/critical_path_cuda_event_sync_event_sync_trace.json.gz",
    "hta/critical_path_cuda_event_sync_multi_stream_event_sync_trace.json.gz",
    "hta/critical_path_simple_add_benchmark_result_493459_1694039959_trace.json.gz",
    "hta/df_index_resolver.json.gz",
    "hta/timeline_analysis_sampled_rank-0.json.gz",
    "hta/trace_diff_control.json.gz",
    "hta/trace_filter_sampled_rank-1.json.gz",
    "kineto/resnet50_num_workers_0.worker0.1623143089861.pt.trace.json.gz",
    "kineto/resnet50_num_workers_4.worker0.1623212756351.pt.trace.json.gz",
    "param/dlrm_kineto_8rank",
    "param/linear_kineto.json.gz",
    "param/resnet_kineto.json.gz",
    "tracelens/b200_eager_trace.json.gz",
    "tracelens/h100_Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "tracelens/h100_gaunernst_bert-small-uncased__1016001.json.gz",
    "tracelens/h100_google_owlv2-large-patch14-ensemble__1016001.json.gz",
    "tracelens/inference_sglang_decode_sglang_Qwen3-8B_decode.json.gz",
    "tracelens/inference_sglang_prefilldecode_sglang_Qwen3-8B_prefilldecode.json.gz",
    "tracelens/inference_vllm_decode_full_graph_execution.json.gz",
    "tracelens/inference_vllm_prefilldecode_piecewise_graph_execution.json.gz",
    "tracelens/mi300_Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "tracelens/mi300_gaunernst_bert-small-uncased__1016001.json.gz",
    "tracelens/mi300_google_owlv2-large-patch14-ensemble__1016001.json.gz",
    "tracelens/mi300_resnet_act_checkpoint.json.gz",
    "triosim/h100_vgg13_kineto.json.gz",
)
PAIRS = (
    (KINETO[9], KINETO[10]),
    (
        "tracelens/h100_Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
        "tracelens/mi300_Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    ),
    ("hta/trace_diff_control.json.gz", "param/dlrm_kineto_8rank"),
)
# What a what-if on the device may refuse: dependencies are missing where events were sampled.
UNEXPLAINED = "hta/timeline_analysis_sampled_rank-0.json.gz", "hta/trace_filter_sampled_rank-1.json.gz"
# Recordings of a process's first step, of which over three quarters is the opening of the device.
NO_STEP = KINETO[1], KINETO[2], KINETO[4]
STEPS = [name for name in KINETO if name not in NO_STEP]


def foretrace(*arguments: str | Path) -> Answer:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run([str(each) for each in arguments])
    return Answer(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def graphs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of saved graphs, filled as traces are built, so that each is read once."""
    return tmp_path_factory.mktemp("graphs")


def saved(graphs: Path, traces: Path, name: str) -> Path:
    kept = graphs / name.replace("/", "_")
    if not kept.exists():
        built = foretrace("graph", traces / name, "--out", kept)
        assert built.code == 0, built.err
    return kept


@pytest.mark.parametrize("name", STEPS)
def test_show_blame_and_whatif_answer(shared_data: Path, graphs: Path, name: str) -> None:
    graph = saved(graphs, shared_data / "traces", name)
    shown = foretrace("show", graph, "--json")
    assert shown.code == 0, shown.err
    view = json.loads(shown.out)
    assert view["headline"].endswith(".")
    assert sum(view["breakdown_s"].values()) == pytest.approx(view["step_time_s"]["median"], rel=1e-6)
    blamed = foretrace("blame", graph, "--json")
    assert blamed.code == 0, blamed.err
    assert json.loads(blamed.out)["rows"]
    asked = foretrace("whatif", graph, "--do", "scale kind=host by=0.5", "--json")
    assert asked.code == 0, asked.err
    low, high = json.loads(asked.out)["interval_s"]
    assert low <= json.loads(asked.out)["after_s"] <= high


@pytest.mark.parametrize("name", STEPS)
def test_a_whatif_on_the_device_answers_or_refuses(shared_data: Path, graphs: Path, name: str) -> None:
    graph = saved(graphs, shared_data / "traces", name)
    asked = foretrace("whatif", graph, "--do", "scale kind=kernel by=0.5", "--json")
    if name in UNEXPLAINED:
        assert asked.code == 2
        assert "dependencies are missing" in asked.err
        assert asked.err.count("\n") == 1
    else:
        assert asked.code == 0, asked.err


@pytest.mark.parametrize("name", NO_STEP)
def test_what_is_hardly_a_step_is_refused_but_for_its_replay(shared_data: Path, name: str) -> None:
    path = shared_data / "traces" / name
    for command, *options in (["show"], ["whatif", "--do", "scale kind=host by=0.5"]):
        refused = foretrace(command, path, *options)
        assert refused.code == 2 and refused.err.count("\n") == 1
        assert "one-time work of the process" in refused.err
    assert foretrace("simulate", path, "--json").code == 0


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_compare_sums_to_the_difference(shared_data: Path, graphs: Path, before: str, after: str) -> None:
    sides = [saved(graphs, shared_data / "traces", name) for name in (before, after)]
    answer = foretrace("compare", *sides, "--json")
    assert answer.code == 0, answer.err
    view = json.loads(answer.out)
    moved = sum(row["critical_after_s"] - row["critical_before_s"] for row in view["rows"])
    if view["before_steps"] % 2 and view["after_steps"] % 2:  # else the median step is none of the steps
        assert moved == pytest.approx(view["change_s"], rel=1e-6)


def test_files_that_are_no_recording_are_refused_with_a_reason(shared_data: Path) -> None:
    folders = shared_data / "traces"
    others = [folders / "chakra" / "chakra.0.json.gz", folders / "chakra" / "small_chakra.0.json"]
    others += sorted((folders / "param").glob("*_et.json.gz")) + sorted((folders / "triosim").glob("*.csv*"))
    others += [folders / "chakra" / "chakra.0.et.gz", folders / "param" / "dlrm_pytorch_et_8rank"]
    for path in others:
        refused = foretrace("show", path)
        assert refused.code == 2, path
        assert refused.out == ""
        assert refused.err.count("\n") == 1, refused.err
        assert path.name.split(".")[0] in refused.err


def test_no_recording_is_left_out(shared_data: Path) -> None:
    traces = shared_data / "traces"
    there = {
        path.relative_to(traces).as_posix()
        for folder in ("hta", "kineto", "tracelens")
        for path in (traces / folder).glob("*.json.gz")
    }
    assert there <= set(KINETO)
