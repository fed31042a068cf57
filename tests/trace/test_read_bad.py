"""Bad input: one sentence that names the file, the place and what to do, or with `salvage` the good part."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

from foretrace.errors import TraceError
from foretrace.trace.read import read
from foretrace.trace.trace import Trace
from tests.trace.recordings import Event, call, document, kernel, op, step, training, write

START = 1_700_000_000_000_000

DEEP = b"[" * 500_000 + b"]" * 500_000  # beyond what a stack holds: Python 3.14 counts that alone


def refusal(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert path.name in message
    return message


def notes(trace: Trace) -> dict[str, int]:
    return {d.reason: d.count for d in trace.dropped}


# --- Files that end too early ----------------------------------------------------------------------------------


def test_cut_json(tmp_path: Path) -> None:
    content = document(training(10))
    path = write(tmp_path / "t.json", content[: content.rindex(b"aten::mm")])
    size = path.stat().st_size
    message = refusal(path)
    assert f"ends in the middle of an event (byte {size:,})" in message
    assert "read its 56 whole events with `salvage=`" in message
    trace = read(path, salvage=True)
    assert len(trace) == 37  # of 56 events 18 are flow arrows and one names a thread
    assert notes(trace) == {f"file ends in the middle of an event (byte {size:,})": 1}


def test_cut_gzip(tmp_path: Path) -> None:
    packed = gzip.compress(document(training(3000)))
    path = write(tmp_path / "t.json", packed[: len(packed) // 2])
    message = refusal(path)
    assert "gzip stream cut" in message
    assert "whole events with `salvage=`" in message
    trace = read(path, salvage=True)
    assert 1000 < len(trace) < 12_000
    assert len(trace.dropped) == 1


def test_gzip_without_its_checksum(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", gzip.compress(document(training(3)))[:-8])
    assert "is damaged behind its last event" in refusal(path)
    assert len(read(path, salvage=True)) == 12


def test_damaged_gzip(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(document(training(3000))))
    packed[len(packed) // 2] ^= 0xFF
    assert "`salvage=`" in refusal(write(tmp_path / "t.json", bytes(packed)))
    assert "copy it again" in refusal(write(tmp_path / "u.json", bytes(packed[:10])))


def test_no_closing_bracket(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", json.dumps(training(2))[:-1].encode())
    assert "ends before its closing bracket" in refusal(path)
    assert len(read(path, salvage=True)) == 8
    comma = write(tmp_path / "u.json", json.dumps(training(2))[:-1].encode() + b",\n")
    assert len(read(comma, salvage=True)) == 8


def test_cut_behind_the_events(tmp_path: Path) -> None:
    content = document(training(2), traceName="a name that is cut")
    path = write(tmp_path / "t.json", content[:-12])
    assert "is broken behind its last event" in refusal(path)
    assert len(read(path, salvage=True)) == 8


def test_cut_before_the_events(tmp_path: Path) -> None:
    content = document(training(2), distributedInfo={"rank": 0})
    assert "before any traceEvents list" in refusal(write(tmp_path / "t.json", content[:30]))
    assert "is empty" in refusal(write(tmp_path / "u.json", b""))
    assert "is empty" in refusal(write(tmp_path / "v.json", b" \n "))


def test_zeros_behind_the_end_are_padding(tmp_path: Path) -> None:
    assert len(read(write(tmp_path / "t.json", document(training(2)) + bytes(4096)))) == 8
    assert len(read(write(tmp_path / "t.json.x", gzip.compress(document(training(2))) + bytes(4096)))) == 8


# --- Broken events ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "bad", "what"),
    [
        (b'"ph": "X"', b'"ph": 7', "is broken: Expected `str`, got `int`"),
        (b'"args": {', b'"args": [] , "x": {', "is broken: Expected `object | null`, got `array`"),
        (b'"dur": 200', b'"dur": ', "is broken: invalid character"),
        (b'"dur": 200', b'"dur": 200 200', "is broken: "),
        (b'"Input Dims": ', b'"Input Dims": ' + DEEP + b', "y": ', "is broken: nested too deeply"),
        (b'"dur": 200', b'"dur": null', "has no time, or a number that is none"),
        (b'"dur": 200', b'"duration": 200', "has no time, or a number that is none"),
        (b'"dur": 200', b'"dur": "long"', "has no time, or a number that is none"),
        (b'"dur": 200', b'"dur": NaN', "has no time, or a number that is none"),
        (b'"dur": 200', b'"dur": 1e999999999', "has no time, or a number that is none"),
        (b'"dur": 200', b'"dur": 99999999999999999999', "has no time, or a number that is none"),
        (b'"dur": 200', b'"dur": -3', "has a negative duration"),
        (b'"Sequence number": 1', b'"Sequence number": 1.5', "has no time, or a number that is none"),
        (b'"Sequence number": 1', b'"Sequence number": 99999999999999999999', "has no time, or a number that is none"),
    ],
)  # fmt: skip
def test_one_broken_event(tmp_path: Path, good: bytes, bad: bytes, what: str) -> None:
    head, tail = document(training(3)).split(b"aten::mm", 1)
    at = tail.index(b"aten::mm")
    second = tail[:at].rindex(b"{") if good == b'"ph": "X"' else at
    path = write(tmp_path / "t.json", head + b"aten::mm" + tail[:second] + tail[second:].replace(good, bad, 1))
    message = refusal(path)
    assert what in message
    assert "event 9" in message
    trace = read(path, salvage=True)
    assert len(trace) == 11
    assert list(notes(trace).values()) == [1]
    assert trace.start.tolist() == sorted(trace.start.tolist())


def test_rubbish_between_events(tmp_path: Path) -> None:
    content = document(training(3000))
    at = content.index(b"aten::mm", len(content) // 2)
    path = write(tmp_path / "t.json", content[:at] + bytes(range(256)) * 4 + content[at + 1024 :])
    assert "copy the file again, or read the rest with `salvage=`" in refusal(path)
    trace = read(path, salvage=True)
    assert 11_980 <= len(trace) < 12_000


# --- What cannot be true ---------------------------------------------------------------------------------------


def test_no_events(tmp_path: Path) -> None:
    assert "holds no events, only metadata" in refusal(write(tmp_path / "t.json", document([])))
    assert "holds no events, only metadata" in refusal(write(tmp_path / "u.json", training()[:1]))
    assert "holds no events" in refusal(write(tmp_path / "v.json", b"[]"))
    marks: list[Event] = [{"ph": "B", "name": "a", "pid": 1, "tid": 1, "ts": 0}]
    assert 'events of phase "B" are not read (1)' in refusal(write(tmp_path / "w.json", marks))


def test_impossible_durations(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [*training(3), kernel("absurd", START + 10, 9.3e10, 99)])
    assert "has 1 event longer than a day (the longest of 93,000 s)" in refusal(path)
    trace = read(path, salvage=True)
    assert len(trace) == 12
    assert notes(trace) == {"event lasts longer than a day": 1}


def span(first: int, last: int) -> Event:
    return {
        "ph": "X", "cat": "Trace", "ts": first, "dur": last - first, "pid": "Spans", "tid": "PyTorch Profiler",
        "name": "PyTorch Profiler (0)", "args": {"Op count": 0},
    }  # fmt: skip


def test_events_outside_the_recording(tmp_path: Path) -> None:
    events = [*training(3), span(START, START + 3000), op("astray", START + 30_000_000, 5)]
    path = write(tmp_path / "t.json", events)
    assert "has 1 event up to 30 s outside its recording (a clock jumped)" in refusal(path)
    assert len(read(path, salvage=True)) == 12
    wrong_span = [*training(3), span(5, 10)]
    assert len(read(write(tmp_path / "u.json", wrong_span))) == 12


@pytest.mark.parametrize("jump", [-3600 * 10**6, 3600 * 10**6, 10**14])
def test_clock_jumps(tmp_path: Path, jump: int) -> None:
    path = write(tmp_path / "t.json", training(6) + training(2, at=START + jump)[1:])
    assert "(a clock jumped)" in refusal(path)
    trace = read(path, salvage=True)
    assert len(trace) == 24
    assert list(notes(trace).values()) == [8]


def test_device_clock_jumps(tmp_path: Path) -> None:
    events = training(6)
    late = [e | {"ts": e["ts"] - 300_000} if e.get("cat") == "kernel" and i > 20 else e for i, e in enumerate(events)]
    path = write(tmp_path / "t.json", late)
    assert "3 events of a device up to 0.3 s before their launch" in refusal(path)
    assert len(read(path, salvage=True)) == 21


def test_correlation_id_of_two_launches(tmp_path: Path) -> None:
    events = [
        step(0, 0, 100),
        call("cudaLaunchKernel", 1, 2, 7),
        call("cudaLaunchKernel", 5, 2, 7),
        call("cudaLaunchKernel", 8, 2, 8),
        kernel("a", 10, 2, 7),
        kernel("b", 20, 2, 8),
    ]
    path = write(tmp_path / "t.json", events)
    assert "1 correlation ids that two launches of one thread claim (the first: 7)" in refusal(path)
    trace = read(path, salvage=True)
    assert trace.correlation.tolist() == [-1, -1, -1, 8, -1, 8]
    other_thread = call("cudaLaunchKernel", 5, 2, 7) | {"tid": 101}
    assert len(read(write(tmp_path / "u.json", [*events[:2], other_thread, *events[3:]]))) == 6


# --- Files and archives ----------------------------------------------------------------------------------------


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    for path, what in ((tmp_path / "no.json", "does not exist"), (tmp_path / "a\0b", "is not a path")):
        with pytest.raises(TraceError, match=what):
            read(path)
    with pytest.raises(TraceError, match="no recording was given"):
        read([])
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no recording" in refusal(empty)


def test_documents_that_are_no_recordings(tmp_path: Path) -> None:
    for content, what in (
        (b'{"schema": "1.0", "nodes": [{"id": 1}]}', "is a PyTorch execution trace"),
        (b'{"a": 1}', "no traceEvents list"),
        (b'{"traceEvents": null}', "no traceEvents list"),
        (b'{"a": [', "ends in broken JSON"),
        (b"<html>", "is a page of HTML"),
        ("\ufeff{}".encode("utf-16"), "is not JSON"),
        (b"[1, 2]", "event 1 (byte 1) is broken"),
        (b'["a"]', "is broken"),
        (b"[[[[", "ends in the middle of an event"),
    ):
        assert what in refusal(write(tmp_path / "t.json", content))


def test_damaged_archives(tmp_path: Path) -> None:
    good = tmp_path / "good.zip"
    with zipfile.ZipFile(good, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rank0.json", document(training(3000)))
    content = good.read_bytes()
    assert "zip archive" in refusal(write(tmp_path / "cut.zip", content[: len(content) // 2]))
    damaged = bytearray(content)
    damaged[-3000] ^= 0xFF
    assert "`salvage=`" in refusal(write(tmp_path / "damaged.zip", bytes(damaged)))
    with zipfile.ZipFile(tmp_path / "none.zip", "w") as archive:
        archive.writestr("readme.txt", "nothing")
    assert "holds no recording" in refusal(tmp_path / "none.zip")

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for rank in range(2):
            member = tarfile.TarInfo(f"rank{rank}.json")
            content = document(training(300))
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    whole = packed.getvalue()
    assert len(read(write(tmp_path / "t.tgz", whole)).ranks) == 2
    cut = write(tmp_path / "cut.tar.gz", whole[: len(whole) // 3])
    assert "gzip stream cut" in refusal(cut)
    assert len(read(cut, salvage=True).ranks) == 1
    end = write(tmp_path / "end.tar.gz", whole[:-9])
    assert "the rest of the archive" in refusal(end)
    assert [r.rank for r in read(end, salvage=True).ranks] == [0, 1]


def test_salvage_of_a_set_keeps_its_good_files(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", training())
    write(tmp_path / "rank1.json", b"{")
    with pytest.raises(TraceError, match=r"rank1\.json ends in broken JSON"):
        read(tmp_path)
    trace = read(tmp_path, salvage=True)
    assert [r.rank for r in trace.ranks] == [0]
    assert "rank1.json ends in broken JSON" in trace.dropped[0].reason


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrace.reading.FREE", 1 << 20)
    monkeypatch.setattr("foretrace.trace.kineto.MAX_METADATA", 4 << 20)
    monkeypatch.setattr("foretrace.trace.kineto.MAX_EVENT", 4 << 20)
    flood = b'{"traceEvents": [' + b"{}," * 2_000_000 + b"{}]}"
    assert "unpacks to more than 400 times its size" in refusal(write(tmp_path / "a.json", gzip.compress(flood)))
    for text in (b" " * (9 << 20), b'{"a": "' + b"x" * (9 << 20), b"[" * (9 << 20), b"[" + b" " * (9 << 20)):
        refusal(write(tmp_path / "b.json", text))
        refusal(write(tmp_path / "c.json", zlib.compress(text, wbits=31)))


def test_long_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrace.trace.kineto.MAX_EVENT", 1 << 20)
    content = document([*training(2), op("x" * (5 << 20), START, 1), *training(2)])
    path = write(tmp_path / "t.json", content)
    assert "event 14" in refusal(path)
    assert len(read(path, salvage=True)) >= 8


def test_too_many_broken_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrace.trace.kineto.MAX_BROKEN", 50)
    path = write(tmp_path / "t.json", b'{"traceEvents": [' + b'{"ph": 1},' * 60 + document(training())[1:])
    with pytest.raises(TraceError, match="more than 50 broken events"):
        read(path, salvage=True)


def test_memory_error_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("foretrace.trace.columns.RankColumns.add", full)
    assert "does not fit into memory" in refusal(write(tmp_path / "t.json", training()))


def test_salvage_of_nothing_is_still_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [op("a", 0, -1)])
    with pytest.raises(TraceError, match=r"holds no event that can be kept: event has a negative duration \(1\)"):
        read(path, salvage=True)
