"""More devices, with the same global batch or another: the law by hand, and the command on MLPerf's own rows."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from reproductions.__main__ import main
from reproductions.mlperf.law import Pair, fit_overhead, speedup

Asked = Callable[..., tuple[int, str, str]]


def test_the_law_by_hand() -> None:
    same = Pair(global_batch=64, fewer=8, more=64, speedup=1.0)
    assert speedup(same, 0.0) == 8.0
    assert speedup(same, 1.0) == pytest.approx((8 + 1) / (1 + 1))
    larger = Pair(global_batch=64, fewer=8, more=64, speedup=1.0, larger_batch=512)
    assert speedup(larger, 1.0) == pytest.approx(8.0), "as many samples per device: eight times the samples"
    assert larger.batches == (64, 512) and same.batches == (64, 64)


@given(
    overhead=st.floats(0.01, 100.0),
    batch=st.integers(8, 4096),
    larger=st.integers(8, 65536),
    fewer=st.integers(1, 64),
    times=st.integers(2, 64),
)
def test_what_was_made_by_the_law_is_found_again(
    overhead: float, batch: int, larger: int, fewer: int, times: int
) -> None:
    blank = Pair(global_batch=batch, fewer=fewer, more=fewer * times, speedup=1.0, larger_batch=larger)
    ratio = speedup(blank, overhead)
    made = Pair(global_batch=batch, fewer=fewer, more=fewer * times, speedup=ratio, larger_batch=larger)
    assert speedup(made, fit_overhead([made])) == pytest.approx(ratio, rel=0.02)


def test_no_pair_is_refused() -> None:
    with pytest.raises(ForetraceError, match="are no pair"):
        Pair(global_batch=64, fewer=8, more=8, speedup=1.0)
    with pytest.raises(ForetraceError, match="are no pair"):
        Pair(global_batch=64, fewer=8, more=16, speedup=1.0, larger_batch=-1)


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Asked:
    """Exit code, output and errors of the protocol with these words."""
    return lambda *words: (main(["mlperf", *map(str, words)]), *capsys.readouterr())


@pytest.fixture(scope="module")
def rows(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two benchmarks: one without a network prediction, one with batches that differ."""
    path = tmp_path_factory.mktemp("mlperf") / "runs.csv"
    with gzip.open(shared_data / "mlperf-training" / "v5.0_runs.csv.gz", "rt") as file:
        table = list(csv.DictReader(file))
    text = io.StringIO()
    writer = csv.DictWriter(text, table[0].keys())
    writer.writeheader()
    writer.writerows(row for row in table if row["benchmark"] in ("llama2_70b_lora", "gnn", "rgat"))
    path.write_text(text.getvalue())
    return path


def test_text_and_json_answer_where_little_is_known(rows: Path, asked: Asked) -> None:
    code, text, said = asked("--labels", rows)
    assert code == 0, said
    assert "llama2_70b_lora, two batches" in text
    found = json.loads(asked("--labels", rows, "--json")[1])
    assert found["summary"]["two batches"]["pairs"] > 0
    assert found["summary"]["one batch"]["network_alone_median_error"] is None
    ranges = [row["predicted_range"] for row in found["pairs"] if row["predicted"] is not None]
    assert all(low <= high for low, high in ranges)


def test_any_global_batch_can_be_asked(rows: Path, asked: Asked) -> None:
    answer = json.loads(asked("--labels", rows, "--json", "--ask", "llama2_70b_lora", "8", "8", "512", "64")[1])
    low, high = answer["predicted_range"]
    assert 1 < low <= answer["predicted"] <= high
    for words, said in (
        (["resnet", "8", "8", "16", "8"], "no pair of resnet"),
        (["rgat", "8", "8", "4", "8"], "no pair"),
        (["llama2-70b-lora", "8", "8", "8192", "1"], "nothing measured says what such a step takes"),
        (["llama2_70b_lora", "8", "8", "16", "1" + 20 * "0"], "nothing measured says"),
    ):
        code, _, refused = asked("--labels", rows, "--ask", *words)
        assert code == 2 and said in refused and refused.count("\n") == 1


@given(overhead=st.floats(0.01, 100), fewer=st.integers(1, 16), times=st.integers(2, 16), batch=st.integers(64, 4096))
def test_the_overhead_of_exact_pairs_is_found(overhead: float, fewer: int, times: int, batch: int) -> None:
    pair = Pair(global_batch=batch, fewer=fewer, more=fewer * times, speedup=2.0)
    exact = Pair(global_batch=batch, fewer=fewer, more=fewer * times, speedup=speedup(pair, overhead))
    assert speedup(pair, fit_overhead([exact])) == pytest.approx(exact.speedup, rel=0.01)
    assert 1 <= speedup(pair, overhead) <= times
