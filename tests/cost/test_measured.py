"""Times of calls that were recorded or profiled."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foretrace.cost.calls import Call, Calls, Family, Precision
from foretrace.cost.devices.measured import Measured, Time, recorded_calls
from foretrace.cost.devices.roofline import Roofline
from foretrace.cost.model import Chain
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import GraphInfo, Lane, TaskGraph, TaskKind
from foretrace.hardware.devices import named
from foretrace.testing.workloads import Gpu, Writer
from foretrace.trace.trace import LaneKind

H100, V100 = named("h100"), named("v100")
MM = '[[[64,32],[32,16]],["float","float"],["",""]]'
ADD = '[[[64,16],[64,16]],["float","float"],["",""]]'


def table(folder: Path, text: str, name: str = "times.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def recorded() -> TaskGraph:
    """Two products of two kernels each, then two additions of one kernel, on a V100; microseconds."""
    writer = Writer(
        lanes=(
            Lane(rank=0, kind=LaneKind.CPU, label="main"),
            Lane(rank=0, kind=LaneKind.GPU, device=0, stream=7, label="s"),
        ),
        info=GraphInfo(platform="cuda", devices=("Tesla V100-SXM2-32GB",), steps=(0,)),
    )
    writer.mark()
    for us, name, op in ((10, "gemm", "aten::mm"), (2, "reduce", "aten::mm"), (14, "gemm", "aten::mm"),
                         (4, "reduce", "aten::mm"), (5, "add", "aten::add"), (7, "add", "aten::add")):  # fmt: skip
        writer.task(TaskKind.KERNEL, 1, name, us * 1000, op=op, shape=0 if op == "aten::mm" else 1)
    writer.mark()
    graph = writer.graph()
    return replace(graph, shapes=(MM, ADD))


def test_a_recorded_call_takes_the_mean_of_all_its_kernels() -> None:
    calls = recorded_calls(recorded())
    assert calls["aten::mm", MM] == pytest.approx([12e-6, 18e-6])
    assert calls["aten::add", ADD] == pytest.approx([5e-6, 7e-6])
    member = Measured.from_graph(recorded())
    asked = Calls.of([("aten::mm", MM), ("aten::add", ADD), ("aten::add", MM)])
    found = member.predict(asked, V100)
    assert found.seconds[:2] == pytest.approx([15e-6, 6e-6])
    assert np.isnan(found.seconds[2]) and found.source.tolist() == [0, 0, -1]
    assert np.isnan(member.predict(asked, H100).seconds).all()


def test_it_stands_first_in_a_chain_and_the_shares_say_so() -> None:
    asked = Calls.of([("aten::mm", MM), ("aten::mul", ADD)])
    found = Chain(members=(Measured.from_graph(recorded()), Roofline())).predict(asked, V100)
    assert found.sources[0] == "measured" and found.source.tolist() == [0, 1]
    assert found.shares()["measured"] > 0.5
    assert not np.isnan(found.seconds).any()


def test_a_recording_without_a_known_device_is_refused() -> None:
    unknown = Gpu(device="Abacus 9000").graph()
    with pytest.raises(ForetraceError, match="Abacus 9000"):
        Measured.from_graph(unknown)


def test_ranges_are_those_of_the_times() -> None:
    many = Time.of([1.0, 1.0, 1.0, 2.0, 3.0])
    assert many.seconds == pytest.approx(1.6) and many.low_s <= many.seconds <= many.high_s
    assert (many.low_s, many.high_s) == pytest.approx((1.0, 2.6))
    assert (Time.of([2.0]).low_s, Time.of([2.0]).high_s) == pytest.approx((1.9, 2.1))


def test_a_table_by_name_and_by_size(tmp_path: Path) -> None:
    quoted = MM.replace('"', '""')
    named_calls = table(
        tmp_path, f'device,op,text,us\nh100,aten::mm,"{quoted}",10\nNVIDIA H100 80GB HBM3,aten::mm,"{quoted}",14\n'
    )
    member = Measured.from_table(named_calls)
    assert member.predict(Calls.of([("aten::mm", MM)]), H100).seconds == pytest.approx([12e-6])
    sized = table(tmp_path, "device,family,precision,m,n,k,ms\nv100,gemm,fp32,64,16,32,0.5\n", "sizes.csv")
    by_size = Measured.from_table(sized)
    asked = Calls.from_rows(
        [Call(family=Family.GEMM, precision=p, m=64, n=16, k=32) for p in (Precision.FP32, Precision.BF16)]
    )
    found = by_size.predict(asked, V100)
    assert found.seconds[0] == 5e-4 and np.isnan(found.seconds[1])
    assert "sizes.csv" in found.whys[0]


def test_a_packed_table(tmp_path: Path) -> None:
    path = tmp_path / "times.csv.gz"
    path.write_bytes(gzip.compress(b"device,family,precision,m,n,k,seconds\nt4,gemm,fp16,8,8,8,1e-5\n"))
    asked = Calls.from_rows([Call(family=Family.GEMM, precision=Precision.FP16, m=8, n=8, k=8)])
    assert Measured.from_table(path).predict(asked, named("t4")).seconds.tolist() == [1e-5]


@pytest.mark.parametrize(("text", "says"), [
    ("op,text,us\n", "needs a column device"),
    ("device,op,text,us,ms\n", "needs a column device and one of"),
    ("device,m,n,us\n", "names no calls"),
    ("device,op,text,us\n", "no times"),
    ("device,op,text,us\nabacus,aten::mm,x,1\n", "line 2: device 'abacus'"),
    ("device,op,text,us\nh100,aten::mm,x,fast\n", "line 2: us is 'fast'"),
    ("device,op,text,us\nh100,aten::mm,x,nan\n", "line 2: us is 'nan'"),
    ("device,op,text,us\nh100,aten::mm,x,-1\n", "line 2: a call cannot take -1"),
    ("device,family,precision,m,n,k,us\nh100,gem,fp32,1,1,1,1\n", "line 2: 'gem' is no family"),
    ("device,family,precision,m,n,k,us\nh100,gemm,fp12,1,1,1,1\n", "line 2: 'fp12' is no precision"),
    ("device,family,precision,m,n,k,us\nh100,gemm,fp32,x,1,1,1\n", "line 2: m is 'x'"),
])  # fmt: skip
def test_a_wrong_table_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ForetraceError, match=says) as caught:
        Measured.from_table(table(tmp_path, text))
    assert "\n" not in str(caught.value)
    with pytest.raises(ForetraceError, match="does not exist"):
        Measured.from_table(tmp_path / "absent.csv")
