"""Networks from operator graphs: the reader, what eager PyTorch runs, the power limit, the replay, the score."""

from __future__ import annotations

import csv
import gzip
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import isolated
from foretrace.cost.devices.learned import fp32
from foretrace.errors import ForetraceError
from foretrace.hardware.devices import named

HEADER = ["Name", "OpName", "FwOps", "BwOps", "AccOps", "Prev", "Next", "InputShapes", "OutputShape"]


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    names = ("opgraph", "eager", "network_replay", "accuracy_p1", "p1_kernels", "kernel_table")
    return {name: importlib.import_module(name) for name in names}


def write(path: Path, rows: list[list[str]], header: list[str] = HEADER) -> Path:
    with gzip.open(path, "wt", newline="") if path.suffix == ".gz" else path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def linear(name: str, m: int, k: int, n: int, *, train: bool = False) -> list[str]:
    back = f"[['Linear', ({m}, {n}, {k})], ['Linear', ({k}, {m}, {n})]]" if train else "[]"
    added = f"[['VECadd', [1, {k * n}]], ['VECadd', [1, {n}]]]" if train else "[]"
    forward = f"[['Linear', ({m}, {k}, {n})]]"
    return [name, "Linear", forward, back, added, "set()", "set()", f"[({m}, {k})]", f"(1, {m}, {n})"]


def gpt(path: Path, *, train: bool = False) -> Path:
    """A prologue, a block from ln_1 to add_15, a head."""
    norm = ["transformer_h_0_ln_1", "VECln", "[['VECln', (64, 128)]]", "[]", "[]", "set()", "{'fc'}", "[(1, 64, 128)]",
            "(1, 64, 128)"]  # fmt: skip
    add = ["add_15", "VECadd", "[['VECadd', (64, 512)]]", "[]", "[]", "{'fc'}", "set()",
           "[(1, 64, 512), (1, 64, 512)]", "(1, 64, 512)"]  # fmt: skip
    rows = [["input_ids", "misc", "[]", "[]", "[]", "set()", "set()", "[]", "(1, 64)"], norm,
            linear("fc", 64, 128, 512, train=train), add, linear("lm_head", 64, 512, 4096, train=train)]  # fmt: skip
    return write(path, rows)


def test_block_is_repeated(modules: dict[str, Any], tmp_path: Path) -> None:
    graph = modules["opgraph"].read(gpt(tmp_path / "gpt9-inf-64-1.csv.gz"), 3)
    assert graph.order == (0, *(1, 2, 3) * 3, 4)
    assert not graph.train
    assert modules["opgraph"].read(gpt(tmp_path / "gpt9-train-64-1.csv"), 0).order == (0, 1, 2, 3, 4)
    # three blocks and a head: products at the peak, vector operators by bytes
    flops = 2 * 64 * 128 * 512 * 3 + 2 * 64 * 512 * 4096
    nbytes = 3 * (8 * 64 * 128 + 12 * 64 * 512)
    expected = (flops + nbytes) / 1e12
    assert modules["opgraph"].roofline_s(graph, 1e12, 1e12) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (2, "__import__('os')", "no Python literal"),
        (2, "[['Linear', (64, 128", "no Python literal"),
        (2, "[['Linear', (64, 128)]]", "is none of"),
        (2, "[['CONV', (64, 128, 3)]]", "is none of"),
        (2, "[['MEM', ((-1, 2),)]]", "is no shape"),
        (7, "7", "not iterable"),
        (8, "'x'", "is no shape"),
    ],
)
def test_malformed_literals_are_named(
    modules: dict[str, Any], tmp_path: Path, column: int, value: str, message: str
) -> None:
    row = linear("fc", 64, 128, 512)
    row[column] = value
    with pytest.raises(ForetraceError, match=message) as caught:
        modules["opgraph"].read(write(tmp_path / "x-inf-1-1.csv", [linear("ok", 2, 2, 2), row]))
    assert "line 3" in str(caught.value)


def test_malformed_files_are_named(modules: dict[str, Any], tmp_path: Path) -> None:
    read = modules["opgraph"].read
    with pytest.raises(ForetraceError, match="no column FwOps"):
        read(write(tmp_path / "a-inf-1-1.csv", [], ["Name", "OpName"]))
    with pytest.raises(ForetraceError, match="no nodes"):
        read(write(tmp_path / "b-inf-1-1.csv", []))
    with pytest.raises(ForetraceError, match="has no block from transformer_h_0_ln_1 to add_15"):
        read(write(tmp_path / "gpt-inf-1-1.csv", [linear("fc", 2, 2, 2)]), 12)
    whole = gpt(tmp_path / "gpt-inf-2-1.csv.gz").read_bytes()
    (tmp_path / "gpt-inf-3-1.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ForetraceError, match="cannot be read"):
        read(tmp_path / "gpt-inf-3-1.csv.gz")
    with pytest.raises(ForetraceError, match=r"has no opt-inf-1-1\.csv"):
        modules["opgraph"].find(tmp_path, "opt", "inf", 1, 1)


def test_training_runs_what_autograd_runs(modules: dict[str, Any], tmp_path: Path) -> None:
    graph = modules["opgraph"].read(gpt(tmp_path / "gpt9-train-64-1.csv", train=True), 1)
    fc = modules["eager"].lower(graph)[2].kernels
    products = [(kernel.m, kernel.k, kernel.n, kernel.backward) for kernel in fc if kernel.k]
    assert products == [(64, 128, 512, False), (64, 512, 128, True), (128, 64, 512, True)]
    # gradient of the bias reads the gradient once; weight and bias gradients are added to what is there
    assert [kernel.nbytes for kernel in fc if not kernel.k] == [4 * 64 * 512, 12 * 128 * 512, 12 * 512]
    head = modules["eager"].lower(graph)[4].kernels
    assert [kernel.op for kernel in head][-1] == "softmax"  # the loss
    assert sum(kernel.nbytes for kernel in head if not kernel.k) == 12 * 512 * 4096 + 16 * 64 * 4096  # no bias


def test_views_cost_no_kernel_and_masks_make_the_host_wait(modules: dict[str, Any], tmp_path: Path) -> None:
    def node(name: str, op: str, inputs: str, output: str) -> list[str]:
        return [name, op, f"[['MEM', ({inputs}, {output})]]", "[]", "[]", "set()", "set()", f"[{inputs}]", output]

    rows = [
        node("getitem_1", "getitem", "(4, 8, 16)", "(4, 16)"),
        node("getitem_2", "getitem", "(4, 8, 16), (4, 8)", "(0, 16)"),
        node("dropout", "dropout", "(4, 8, 16)", "(4, 8, 16)"),
        node("where", "where", "(1, 8), (4, 8, 16)", "(4, 8, 16)"),
    ]
    lowered = modules["eager"].lower(modules["opgraph"].read(write(tmp_path / "x-inf-1-1.csv", rows)))
    assert [len(each.kernels) for each in lowered] == [0, 1, 0, 1]
    assert lowered[0].views == 1
    assert lowered[1].kernels[0].waits
    assert lowered[3].kernels[0].nbytes == 8 * 4 * 8 * 16


def test_power_is_averaged_over_the_window(modules: dict[str, Any]) -> None:
    board = fp32.board(named("L4"))
    assert board is not None
    watts = board.budget_w
    under = modules["network_replay"].under_power
    # twice the limit: what is saved at the start carries 0.1 s at most, the rest runs at the limit
    found = under(np.full(10, 0.1), np.full(10, 0.2 * watts), board, 0.1)
    np.testing.assert_allclose(found, [0.1, *[0.2] * 9])
    # as long at half the limit saves what the next one needs
    found = under(np.full(4, 0.1), np.array([0.2, 0.0, 0.2, 0.2]) * watts, board, 0.1)
    np.testing.assert_allclose(found, [0.1, 0.1, 0.1, 0.2])


@settings(max_examples=50)
@given(data=st.data(), window=st.floats(0.0, 1.0))
def test_power_never_makes_it_faster_and_keeps_the_limit(
    modules: dict[str, Any], data: st.DataObject, window: float
) -> None:
    board = fp32.board(named("T4"))
    assert board is not None
    n = data.draw(st.integers(1, 30))
    seconds = np.array(data.draw(st.lists(st.floats(1e-5, 0.1), min_size=n, max_size=n)))
    watts = np.array(data.draw(st.lists(st.floats(0.0, 3.0), min_size=n, max_size=n)))
    joules = seconds * watts * board.budget_w
    found = modules["network_replay"].under_power(seconds, joules, board, window)
    assert (found >= seconds * (1 - 1e-12)).all()
    assert joules.sum() <= board.budget_w * (found.sum() + window) * (1 + 1e-9)


def test_launches_overlap_until_the_host_is_the_limit(modules: dict[str, Any], tmp_path: Path) -> None:
    network_replay = modules["network_replay"]
    board = fp32.board(named("A100-PCIe-80GB"))
    graph = modules["opgraph"].read(gpt(tmp_path / "gpt9-inf-64-1.csv"), 24)
    quick = network_replay.Host(forward_s=0.0, view_s=0.0, launch_s=0.0, gap_s=0.0)
    slow = network_replay.Host(forward_s=1e-3)
    free, bound = (network_replay.replay(graph, isolated.shipped(), board, host) for host in (quick, slow))
    kernels = 24 * 3 + 1
    assert free.seconds == pytest.approx(free.capped_s, abs=kernels * 1e-9)
    assert bound.seconds > kernels * 1e-3
    assert bound.seconds < kernels * 1e-3 + bound.capped_s
    assert bound.graph.n_steps == 2
    assert sum(free.parts.values()) == pytest.approx(free.capped_s)


def labels(path: Path, rows: list[dict[str, str]]) -> Path:
    names = ["model_name", "seqlen", "batch", "device", "device_name", "mode", "option", "num_layer",
             "label_all_e2e_latency"]  # fmt: skip
    return write(path, [[row.get(name, "") for name in names] for row in rows], names)


def test_scores_any_label_file(modules: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt(tmp_path / "gpt9-inf-64-1.csv")
    base = {"model_name": "gpt9", "seqlen": "64", "batch": "1", "mode": "inf", "num_layer": "2",
            "label_all_e2e_latency": "1.0"}  # fmt: skip
    rows = [
        base | {"device": "NVIDIA_H100_80GB_HBM3", "device_name": "NVIDIA H100 80GB HBM3"},
        base | {"device": "NVIDIA_L4"},
        base | {"device": "Tesla_P4", "device_name": "Tesla P4"},
        base | {"device": "NVIDIA_L4", "option": "fusion"},
        base | {"device": "NVIDIA_H100_80GB_HBM3_TP", "device_name": "NVIDIA H100 80GB HBM3"},
        base | {"device": "AMD_Instinct_MI100", "device_name": "AMD Instinct MI100"},
        base | {"device": "Imaginary_9000"},
        base | {"device": "NVIDIA_L4", "model_name": "unknown"},
    ]
    sheet = write(tmp_path / "devices.csv", [
        ["NVIDIA H100 80GB HBM3", "132", "NVIDIA_H100_80GB_HBM3.json"],
        ["NVIDIA H100 80GB HBM3", "132", "NVIDIA_H100_80GB_HBM3_TP.json"],
        ["NVIDIA L4", "60", "NVIDIA_L4.json"], ["Tesla P4", "40", "Tesla_P4.json"],
    ], ["Device", "Num_Sm", "file"])  # fmt: skip
    given = ["--opgraphs", str(tmp_path), "--labels", str(labels(tmp_path / "labels.csv", rows)), "--devices",
             str(sheet), "--kernels", "none", "--json"]  # fmt: skip
    assert modules["accuracy_p1"].main(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["networks"]["all"]["rows"] == 3
    assert found["networks"]["held_out"]["rows"] == 2
    assert {row["device"] for row in found["rows"]} == {"NVIDIA H100 80GB HBM3", "NVIDIA L4", "Tesla P4"}
    notes = "\n".join(found["notes"])
    for expected in ("sheet 60 SMs, catalog 58", "sheet 40 SMs, catalog 20", "doubled", "option fusion", "MI100",
                     "Imaginary_9000", "has no unknown-inf-64-1.csv"):  # fmt: skip
        assert expected in notes
    errors = [abs(row["error"]) for row in found["rows"]]
    assert found["networks"]["all"]["mape"] == pytest.approx(100 * np.mean(errors), abs=0.01)


def test_the_other_form_of_a_sheet(modules: dict[str, Any], tmp_path: Path) -> None:
    header = ["name", "vendor", "arch", "fp32_tflops", "mem_gb", "mem_bw_gbs", "l2_mb", "sms", "tdp_w"]
    sheet = modules["accuracy_p1"].read_sheet(write(tmp_path / "hardware.csv", [
        ["L4", "NVIDIA", "Ada AD104", "30.3", "24", "300", "48", "58", "72"],
        ["Next", "NVIDIA", "Blackwell", "100", "96", "9000", "100", "160", "1000"],
        ["Odd", "NVIDIA", "", "100", "96", "9000", "100", "160", ""],
    ], header))  # fmt: skip
    assert sheet.devices["L4"].sms == 58
    assert sheet.devices["Next"].memory_gb_s == 9000
    assert "Odd" not in sheet.devices
    assert len(sheet.notes) == 2
    with pytest.raises(ForetraceError, match="neither a column Device nor name"):
        modules["accuracy_p1"].read_sheet(write(tmp_path / "bad.csv", [["1"]], ["x"]))


def test_bad_labels_exit_with_a_sentence(
    modules: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt(tmp_path / "gpt9-inf-64-1.csv")
    sheet = write(tmp_path / "devices.csv", [["NVIDIA L4", "58"]], ["Device", "Num_Sm"])
    path = labels(tmp_path / "labels.csv", [{"model_name": "gpt9"}])
    given = ["--opgraphs", str(tmp_path), "--labels", str(path), "--devices", str(sheet), "--kernels", "none"]
    assert modules["accuracy_p1"].main(given) == 2
    assert "line 2 of the labels has no seqlen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("column", "value"),
    [("label_all_e2e_latency", "nan"), ("label_all_e2e_latency", "0"), ("seqlen", "x"), ("batch", "1e400")],
)
def test_a_label_that_is_no_figure_is_named(
    modules: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str, value: str
) -> None:
    row = {"model_name": "gpt9", "seqlen": "64", "batch": "1", "device": "NVIDIA_L4", "mode": "inf"}
    path = labels(tmp_path / "labels.csv", [row | {"label_all_e2e_latency": "5.0"} | {column: value}])
    sheet = write(tmp_path / "devices.csv", [["NVIDIA L4", "58"]], ["Device", "Num_Sm"])
    given = ["--opgraphs", str(tmp_path), "--labels", str(path), "--devices", str(sheet), "--kernels", "none"]
    assert modules["accuracy_p1"].main(given) == 2
    said = capsys.readouterr().err
    assert f"line 2 of the labels: {column} is '{value}'" in said and said.count("\n") == 1


@pytest.mark.parametrize("missing", ["--opgraphs", "--kernels"])
def test_files_that_are_not_there_are_named(
    modules: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    path = labels(tmp_path / "labels.csv", [{"model_name": "gpt9"}])
    sheet = write(tmp_path / "devices.csv", [["NVIDIA L4", "58"]], ["Device", "Num_Sm"])
    given = {"--opgraphs": tmp_path, "--labels": path, "--devices": sheet, "--kernels": "none"}
    given[missing] = tmp_path / "nowhere"
    assert modules["accuracy_p1"].main([str(each) for pair in given.items() for each in pair]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_figure_of_a_sheet_that_is_none_is_named(modules: dict[str, Any], tmp_path: Path) -> None:
    sheet = write(tmp_path / "devices.csv", [["NVIDIA L4", "many"]], ["Device", "Num_Sm"])
    with pytest.raises(ForetraceError, match="many"):
        modules["accuracy_p1"].read_sheet(sheet)


def test_rule_finds_linear_rows_of_another_condition(modules: dict[str, Any]) -> None:
    table = modules["kernel_table"]
    n = 400
    rng = np.random.RandomState(0)
    device, op = rng.randint(0, 2, n), rng.randint(0, 2, n)
    size = rng.uniform(4000, 9000, n)
    share = np.where((device == 1) & (op == 1), 0.17, np.where(op == 1, 0.8, 0.7))
    seconds = 2 * size**3 / (share * 1e13)
    one = np.ones(n)
    kernels = table.Kernels(
        devices=("a", "b"), device=device, op=op, b=one, m=size, k=size, n=size, nbytes=12 * size**2, seconds=seconds
    )
    assert table.mismeasured(kernels, np.full(2, 1e13)) == [1]


def pool(modules: dict[str, Any], factor: float) -> Any:
    """Kernels of a device on which every prediction is off by one factor."""
    p1 = modules["p1_kernels"]
    rng = np.random.RandomState(0)
    n = 400
    linear = rng.randint(0, 2, n)
    b, m, k, width = (2.0 ** rng.randint(low, high, n) for low, high in ((0, 5), (5, 12), (5, 12), (5, 12)))
    said = b * m * k * width / 1e12 + 1e-3
    return p1.Pool(
        name="test", kind=linear, group=linear, features=p1.product_rows(b, m, k, width, linear.astype(float)),
        said_s=said, true_s=factor * said, roofline_s=said / 2,
    )  # fmt: skip


def test_a_few_measurements_find_a_common_factor(modules: dict[str, Any]) -> None:
    p1 = modules["p1_kernels"]
    measured = pool(modules, 1.3)
    errors = [p1.few_shot(measured, k)["mean"] for k in p1.SHOTS]
    assert errors[0] == pytest.approx(100 * (1 - 1 / 1.3), abs=0.01)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 4
    shift, chosen = p1.adapt(measured, 0)
    assert len(chosen) == 0
    assert (shift.factor(measured.kind, measured.features, measured.said_s) == 1).all()


def test_a_wild_measurement_cannot_do_much(modules: dict[str, Any]) -> None:
    p1 = modules["p1_kernels"]
    wild = pool(modules, 1000.0)
    shift, chosen = p1.adapt(wild, 20)
    assert len(np.unique(chosen)) == 20
    far = wild.features * 5 + 40  # sizes that were never seen
    factor = shift.factor(wild.kind, far, wild.said_s * 1e6)
    assert (factor <= np.exp(p1.MOST) + 1e-12).all()
    assert (factor >= np.exp(-p1.MOST) - 1e-12).all()


def test_pipeline_agrees_with_the_stored_rooflines(modules: dict[str, Any], shared_data: Path) -> None:
    """One network per model: read and repeated as its authors do (their own stored figures, no measurement)."""
    rows = modules["accuracy_p1"].read_rows(shared_data / "kernels" / "e2e_summary.csv.gz")
    seen: set[str] = set()
    for row in rows:
        known = {*seen, "switchxl4"}  # the largest files: nothing is repeated in them
        if row["option"] or row["device"] != "NVIDIA_A100-PCIE-40GB" or row["model_name"] in known:
            continue
        seen.add(row["model_name"])
        path = modules["opgraph"].find(
            shared_data / "kernels" / "opgraph", row["model_name"], row["mode"], int(row["seqlen"]), int(row["batch"])
        )
        graph = modules["opgraph"].read(path, int(row["num_layer"]))
        ours = 1e3 * modules["opgraph"].roofline_s(graph, 19.492e12, 1555 * 2**30)
        assert ours == pytest.approx(float(row["roofline_all_e2e_latency"]), rel=0.02)
    assert len(seen) >= 5
