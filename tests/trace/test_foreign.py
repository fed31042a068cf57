"""What is no recording is called by its name, with what to do instead."""

from __future__ import annotations

import cProfile
import gzip
import json
import pickle
import sqlite3
import zipfile
from pathlib import Path

import pytest

from foretrace.errors import ForetraceError
from foretrace.model.readers.sources import reader_of
from foretrace.trace.read import read
from tests.trace.recordings import document, training, write


def _files(folder: Path) -> dict[str, tuple[Path, str]]:
    """One of each kind, and words of the sentence about it."""

    def put(name: str, content: bytes) -> Path:
        path = folder / name
        path.write_bytes(content)
        return path

    base = sqlite3.connect(folder / "a.sqlite")
    base.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT)")
    base.commit()
    base.close()
    profile = cProfile.Profile()
    profile.runcall(sum, range(9))
    profile.dump_stats(str(folder / "stats.bin"))
    with zipfile.ZipFile(folder / "model.pt", "w") as weights:
        weights.writestr("archive/data.pkl", b"x")
    (folder / "board" / "plugins" / "profile" / "run").mkdir(parents=True)
    (folder / "scalars").mkdir()
    put("scalars/events.out.tfevents.1", b"x")
    (folder / "nsys").mkdir()
    put("nsys/report1.nsys-rep", b"x")
    (folder / "above" / "rank").mkdir(parents=True)
    write(folder / "above" / "rank" / "0.json", training())
    xplane = b'\x0a\xa1\xf0\x08\x12\x0e/host:metadata"\xbf'
    return {
        "nsys report": (put("r.nsys-rep", b"\x01\x02"), "Nsight Systems.*foretrace record"),
        "nsys database": (folder / "a.sqlite", "SQLite.*foretrace record"),
        "nsys database, packed": (put("a.gz", gzip.compress((folder / "a.sqlite").read_bytes())), "SQLite"),
        "cProfile": (folder / "stats.bin", "cProfile"),
        "XPlane": (put("h.xplane.pb", xplane), "XPlane profile of JAX"),
        "XPlane, packed": (put("h.xplane.pb.gz", gzip.compress(xplane)), "XPlane profile of JAX"),
        "script": (put("train.py", b"import torch\n"), "Python script; record it: foretrace record -- python train.py"),
        "notebook": (put("n.ipynb", b'{"cells": [], "nbformat": 4}'), "notebook"),
        "snapshot": (put("s.pickle", pickle.dumps({1: 2})), "pickle"),
        "weights": (folder / "model.pt", "weights of a model"),
        "HTML": (put("t.json", b"<!DOCTYPE html><html>"), "page of HTML"),
        "LFS": (put("l.json", b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        "rocprofv3": (put("p.json", b'{"rocprofiler-sdk-tool": []}'), "rocprofv3"),
        "speedscope": (put("s.json", b'{"$schema": "https://www.speedscope.app/file-format-schema.json"}'), "samples"),
        "board of JAX": (folder / "board", "XPlane"),
        "board of scalars": (folder / "scalars", "TensorBoard"),
        "folder of nsys": (folder / "nsys", r"holds report1.nsys-rep, which is a report of Nsight Systems"),
        "folder above": (folder / "above", "Its folder rank holds some"),
        "address": (Path("https://a.b/c.json"), "curl -LO https://a.b/c.json"),
    }


def test_each_is_called_by_its_name(tmp_path: Path) -> None:
    for name, (path, says) in _files(tmp_path).items():
        with pytest.raises(ForetraceError, match=says) as caught:
            read(path)
        assert str(caught.value).endswith((".", "name that.")), name


@pytest.mark.parametrize("name", ["nsys database", "cProfile", "XPlane", "snapshot", "rocprofv3", "address"])
def test_operators_say_the_same(tmp_path: Path, name: str) -> None:
    path, says = _files(tmp_path)[name]
    with pytest.raises(ForetraceError, match=says.partition(".*")[0]):
        reader_of(path)


@pytest.mark.parametrize("name", ["run.prof", "weights.pt", "train.py", "x.pftrace"])
def test_content_decides_before_the_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(document(training()))
    assert len(read(path))


def test_a_trace_of_another_program_is_told_apart(tmp_path: Path) -> None:
    from foretrace.graph.builder import build

    events = [{"ph": "X", "pid": 1, "tid": 1, "ts": 1000 * i, "dur": 500, "name": "jit_f"} for i in range(5)]
    path = tmp_path / "jax.trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(ForetraceError, match=r"other programs \(JAX, Chrome\)"):
        build(read(path))
