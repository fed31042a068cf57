"""Files that are no recording, known by what they are: what to say of them, and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_RECORD = "record the run with foretrace record -- python train.py, or export_chrome_trace of torch.profiler"
_PYTORCH = _RECORD.replace("the run", "a PyTorch run")

# By the ending of the name, before anything is read.
_ENDINGS = {
    (
        ".nsys-rep",
        ".qdrep",
        ".qdstrm",
    ): f"is a report of Nsight Systems, which names no operators and shapes; {_RECORD}",
    (".ncu-rep",): f"is a report of Nsight Compute, of single kernels and not of a step; {_RECORD}",
    (".py",): "is a Python script; record it: foretrace record -- python {name}",
    (".ipynb",): "is a notebook; put `with foretrace.record():` around its training loop",
    (".xplane.pb",): f"is an XPlane profile of JAX or TensorFlow, which is not read; {_PYTORCH}",
    (
        ".pftrace",
        ".perfetto-trace",
    ): "is a trace of Perfetto in protocol buffers; give the profiler's JSON",
    (".safetensors", ".ckpt", ".pth", ".pt", ".bin"): "holds weights of a model, and no times; " + _RECORD,
    (".prof", ".pstats", ".cprof"): f"is a profile of Python functions (cProfile), without operators; {_RECORD}",
    (".onnx",): "is a model, which was not run; give it to foretrace estimate or foretrace operators",
    (".csv", ".tsv"): "is a table, not a recording; give the JSON that the profiler wrote",
    (".npy", ".npz"): "holds arrays of NumPy, not a recording; give the JSON that the profiler wrote",
    (".folded", ".speedscope.json"): f"is a profile of samples, which tell no order; {_RECORD}",
}
# By the first bytes.
_BEGINNINGS = {
    b"SQLite format 3\0": "is a database (SQLite), as Nsight Systems and rocprof export it; " + _RECORD,
    b"NVR\0": f"is a report of Nsight Compute, of single kernels and not of a step; {_RECORD}",
    b"PERFILE2": f"is a profile of Linux perf, without operators; {_RECORD}",
    b"PAR1": "is a table (Parquet), not a recording; give the JSON that the profiler wrote",
    b"version https://git-lfs": "is a pointer of Git LFS and not the file itself; fetch it with git lfs pull",
    b"%PDF": "is a PDF document; give the JSON that the profiler wrote",
    b"\x89PNG": "is a picture; give the JSON that the profiler wrote",
    b"\x7fELF": "is a program; record it: foretrace record -- COMMAND",
    b"foretrg\n": "is a saved graph of foretrace; give it to show, whatif or compare by itself",
}
_HTML = re.compile(rb"\s*<(!doctype\s+html|html)", re.IGNORECASE)
_MARSHAL = re.compile(rb"[{\xfb][()\xa8\xa9\xe9]")
_KEYS = {
    b'"rocprofiler-sdk-tool"': f"is a profile of rocprofv3, which names no operators and shapes; {_RECORD}",
    b'"nbformat"': "is a notebook; put `with foretrace.record():` around its training loop",
    b"speedscope.app/file-format": f"is a profile of samples, which tell no order; {_RECORD}",
    b'"resourceSpans"': f"is a trace of services (OpenTelemetry), without operators; {_RECORD}",
    b'"model_type"': "is a configuration of a model; give it to foretrace estimate",
}


def by_name(path: str | Path) -> str:
    """Return what a file is by its name's ending, as the rest of a sentence; "" if unknown."""
    name = Path(path).name
    lower = name.lower().removesuffix(".gz")
    return next((said.format(name=name) for ends, said in _ENDINGS.items() if lower.endswith(ends)), "")


def by_content(head: bytes) -> str:
    """Return what a file is by its first bytes, as `by_name` says it."""
    for begins, said in _BEGINNINGS.items():
        if head.startswith(begins):
            return said
    if _HTML.match(head):
        return "is a page of HTML, often an error or a log-in in place of a download; fetch the file again"
    if _MARSHAL.match(head):
        return f"is a profile of Python functions (cProfile), without operators; {_RECORD}"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "is a pickle of Python, such as a memory snapshot of PyTorch, and pickles are not opened; " + _RECORD
    if b"/host:metadata" in head[:64] or b"/device:GPU" in head[:256] or b"/device:TPU" in head[:256]:
        return f"is an XPlane profile of JAX or TensorFlow, which is not read; {_PYTORCH}"
    return next((said for key, said in _KEYS.items() if key in head[:65536]), "")


def folder(path: Path, names: Iterable[str]) -> str:
    """Return what a folder without recordings is, by the names in it."""
    found = sorted(names)
    if (path / "plugins" / "profile").is_dir() or any(name.endswith(".xplane.pb") for name in found):
        return f"holds an XPlane profile of JAX or TensorFlow, which is not read; {_PYTORCH}"
    if any("tfevents" in name for name in found):
        return "is a log folder of TensorBoard with scalars alone; " + _RECORD
    for name in found:
        if said := by_name(name):
            return f"holds {name}, which {said}"
    return ""
