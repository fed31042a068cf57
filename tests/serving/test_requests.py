"""Requests: what is drawn, what is read, and one sentence where that cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.serving.llm.metrics import limits
from foretrace.serving.requests import of, requests

MOONCAKE = '{"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n' * 2


def test_rates_are_what_was_asked_for() -> None:
    for text, cv in (("poisson qps=5", 1.0), ("gamma qps=5 cv=3", 3.0), ("constant qps=5", 0.0)):
        gaps = np.diff(requests(f"{text} prompt=10-20 output=1", seconds=20_000).arrival_s)
        assert gaps.mean() == pytest.approx(0.2, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)
    drawn = requests("burst requests=5000 prompt=10-20 output=1-2")
    assert (set(drawn.prompt), set(drawn.output)) == (set(range(10, 21)), {1, 2})
    assert not drawn.arrival_s.any()


def test_a_diurnal_day_and_a_constant_rate_are_exact() -> None:
    """Fifths of the time at a quarter, half, all, half and a quarter of the rate; a constant rate begins at 0."""
    found = requests("diurnal qps=20 prompt=1 output=1", seconds=100).arrival_s
    assert np.histogram(found, np.arange(0, 101, 20))[0].tolist() == [100, 200, 400, 200, 100]
    assert len(requests("diurnal qps=20 requests=7")) == 7
    assert requests("constant qps=0.1", seconds=10).arrival_s.tolist() == [0]
    assert requests("constant qps=2", seconds=600).arrival_s[[1, -1]].tolist() == [0.5, 599.5]


def test_same_seed_same_requests() -> None:
    one, two, other = (requests("poisson qps=2 prompt=1-999", seconds=60, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.arrival_s, two.arrival_s)
    np.testing.assert_array_equal(one.prompt, two.prompt)
    assert len(one) != len(other) or (one.prompt != other.prompt).any()


def test_formats(tmp_path: Path) -> None:
    files = {
        "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5,10,2\n2023-11-17 00:00:01.5,30,4",
        "vidur.csv": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,10,2\n2.0,30,4\n",
        "own.csv": "arrival_s,prompt,output\n7,30,4\n5,10,2\n",
        "burst.csv": "Timestamp,Model,Request tokens,Response tokens\n5,x,10,2\n7,x,30,4\n7,x,9,0\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        found = requests(str(tmp_path / name))
        assert [found.arrival_s.tolist(), found.prompt.tolist(), found.output.tolist()] == [[0, 2], [10, 30], [2, 4]]
    assert found.notes == ("1 requests without prompt or output are left out",)
    (tmp_path / "mooncake.jsonl").write_text(MOONCAKE)
    found = requests(str(tmp_path / "mooncake.jsonl"))
    assert (found.arrival_s.tolist(), found.hashes.tolist(), found.hash_tokens) == ([0, 0], [7, 8, 9] * 2, 512)
    lengths = requests(f"constant qps=1 lengths={tmp_path / 'own.csv'}", seconds=50)
    assert set(zip(lengths.prompt.tolist(), lengths.output.tolist(), strict=True)) == {(10, 2), (30, 4)}


def test_dates_with_zones_and_of_any_century(tmp_path: Path) -> None:
    dates = ("2023-11-17 01:00:00+02:00", "2023-11-16T23:00:01Z", "2023-11-16 23:00:02.2500000", "2400-01-01 00:00:00")
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{each},1,1\n" for each in dates)
    )
    found = requests(str(tmp_path / "azure.csv"))
    assert found.arrival_s.tolist() == pytest.approx([0, 1, 2.25, 11_869_290_000])


def test_take_keeps_hashes_with_their_requests() -> None:
    found = of([0, 1, 2], [9, 9, 9], [1, 1, 1], hash_first=np.array([0, 2, 3, 3]), hashes=np.array([4, 5, 6]))
    some = found.take(np.array([1, 0]))
    assert (some.hash_first.tolist(), some.hashes.tolist()) == ([0, 2, 3], [4, 5, 6])  # by arrival again


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arrival_s,prompt,output\n1,-5,2\n", "request 1: a prompt must be a whole number of tokens from 1 on, got -5"),
        ("arrival_s,prompt,output\n1,5,2.5\n", "request 1: an output must be a whole number"),
        ("arrival_s,prompt,output\nnan,5,2\n", "request 1: an arrival must be a finite number of seconds, got nan"),
        ("arrival_s,prompt,output\ninf,5,2\n", "request 1: an arrival must be a finite number of seconds, got inf"),
        ('{"timestamp": 0, "input_length": true, "output_length": 5}', "input_length is 'True', no number"),
        ("arrival_s,prompt,output\nsoon,5,2\n", "request 1: arrival_s is 'soon', no number"),
        ("arrival_s,prompt,output\n1,5,2\n,5,2\n", "request 2: arrival_s is '', no number"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nNaT,5,2\n", "request 1: TIMESTAMP is 'NaT', no number"),
        ("arrival_s,prompt,output\n", "holds no requests"),
        ("arrival_s,prompt,output\n1,0,0\n", "holds no request with a prompt and an output"),
        ("a,b\n1,2\n", "has no columns of lengths"),
        ("num_prefill_tokens,num_decode_tokens\n1,2\n", "has no arrivals; draw them"),
        ('{"timestamp": 0, "input_length": 5', "is no CSV and no JSON lines"),
        (MOONCAKE.replace("[7, 8, 9]", "[-1]"), "hash_ids must be lists of whole numbers"),
        ("", "holds no requests"),
    ],
)
def test_bad_traces(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ForetraceError, match=said) as error:
        requests(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("poison qps=2", "did you mean poisson"),
        ("poisson", "qps=\\? must be a number above 0"),
        ("poisson qps=-2", "qps=-2 must be a number above 0"),
        ("poisson qps=2 prompt=9-3", "prompt=9-3 must be a number of tokens"),
        ("poisson qps=2 speed=3", "has no parameter speed"),
        ("poisson qps=2 concurrency=3", "concurrency says nothing here"),
        ("poisson qps", "'qps' is no key=value"),
        ("closed concurrency=1.5 requests=3", "must be a whole number from 1 to 100,000,000"),
        ("closed concurrency=2", "say how many requests with `requests=`"),
        ("poisson qps=1e12", "simulate at most"),
        ("nowhere.csv", "does not exist"),
    ],
)
def test_bad_words(text: str, said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        requests(text, seconds=60)
    with pytest.raises(ForetraceError, match="must be a time from 0 on"):
        requests("poisson qps=2", seconds=float("nan"))


def test_limits() -> None:
    found = limits("ttft.p90=0.5s tpot=50ms e2e.mean=1e1")
    assert [(each.name, each.seconds) for each in found] == [("ttft.p90", 0.5), ("tpot.p99", 0.05), ("e2e.mean", 10)]
    for text, said in (
        ("ttft", "is no limit; write ttft.p99=0.5s"), ("tftt=1s", "did you mean ttft"),
        ("ttft.p75=1s", "has no parameter ttft.p75"),
        ("ttft=0s", "must be a time above 0"), ("ttft=1h", "must be a time"), ("ttft=1.1.1s", "must be a time"),
    ):  # fmt: skip
        with pytest.raises(ForetraceError, match=said):
            limits(text)


def test_shared_traces(shared_data: Path) -> None:
    """The public traces are read whole, and Vidur's is Azure's."""
    found = requests(str(shared_data / "serving" / "azure2023" / "AzureLLMInferenceTrace_conv.csv.gz"))
    same = requests(str(shared_data / "serving" / "vidur" / "splitwise_conv.csv.gz"))
    assert len(found) == 19_366 == len(same)
    np.testing.assert_array_equal(found.prompt, same.prompt)
    np.testing.assert_allclose(found.arrival_s, same.arrival_s, atol=1e-6)
