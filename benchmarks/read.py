"""How fast the reader is, how much memory it takes, and against whom.

    python benchmarks/read.py [RECORDING ...] [--hta-python PATH] [--json]

RECORDING is by default `hta/df_index_resolver.json.gz` of the shared data (216,092 events, 54 MB of JSON). Rates are
events of the file per second of CPU time, everything included: unpacking, columns, sorting, checks. Every reader runs
in a process of its own, so that the peak of its memory is its own; the figure is the best of several readings, the
memory that of the first. The peers are

- HolisticTraceAnalysis (`TraceAnalysis(trace_files=...)`), where the Python that `--hta-python` names has it;
- a plain loop: the standard library's `json`, then one row of a list per event, without shapes or checks.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = {"foretrace": 7, "HolisticTraceAnalysis": 2, "json and a loop": 3}
TARGETS = {"events per CPU-second": 400_000, "times HolisticTraceAnalysis": 10, "peak memory / columns": 4}

# Each prints the CPU seconds of its readings and the growth of its resident memory during the first one in bytes.
_METER = """
import contextlib, json, resource, sys
def cpu():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)
def resident(word):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(word))
def meter(read, runs):
    before, seconds, peak = resident("VmRSS"), [], 0
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # forget the peak of the imports
    for _ in range(runs):
        begin = cpu()
        read()
        seconds.append(cpu() - begin)
        peak = peak or resident("VmHWM") - before
    return {"seconds": min(seconds), "peak": peak}
path, runs = sys.argv[1], int(sys.argv[2])
"""
_FORETRACE = """
from foretrace.trace.read import read
found = meter(lambda: read(path), runs)
trace = read(path)
found |= {"rows": len(trace), "columns": trace.nbytes_held}
print(json.dumps(found))
"""
_HTA = """
import io, logging
with contextlib.redirect_stdout(io.StringIO()):
    from hta.trace_analysis import TraceAnalysis
    logging.disable(logging.CRITICAL)
    def read():
        return TraceAnalysis(trace_files={0: path}, trace_dir="")
    found = meter(read, runs)
    found |= {"rows": len(read().t.get_trace(0))}
print(json.dumps(found))
"""
_LOOP = """
import gzip
def read():
    with gzip.open(path, "rb") as file:
        events = json.load(file, strict=False)["traceEvents"]
    rows, names = [], {}
    for e in events:
        if e["ph"] == "X":
            args = e.get("args", {})
            name = names.setdefault(e["name"], len(names))
            rows.append((float(e["ts"]), float(e["dur"]), name, e["cat"], e["pid"], e["tid"], args.get("correlation")))
    rows.sort(key=lambda row: (row[0], -row[1]))
    return rows
found = meter(read, runs)
found |= {"rows": len(read())}
print(json.dumps(found))
"""
_PROGRAMS = {"foretrace": _FORETRACE, "HolisticTraceAnalysis": _HTA, "json and a loop": _LOOP}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One reader on one recording."""

    recording: str
    reader: str
    events: int  # in the file
    rows: int  # kept by the reader
    seconds: float  # of CPU
    rate: float  # events per CPU-second
    peak_bytes: int  # growth of resident memory
    columns_bytes: int | None  # of the columns kept; foretrace only


def count_events(recording: Path) -> int:
    """Entries of `traceEvents`, counted by the standard library."""
    raw = gzip.decompress(recording.read_bytes()) if recording.suffix == ".gz" else recording.read_bytes()
    return len(json.loads(raw, strict=False)["traceEvents"])


def run(reader: str, python: str, recording: Path) -> dict[str, float] | None:
    """Measurements of one reader in its own process; None if it is not installed there."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")} if reader == "foretrace" else dict(os.environ)
    command = [python, "-c", _METER + _PROGRAMS[reader], str(recording), str(RUNS[reader])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        if reader == "HolisticTraceAnalysis" and "No module named 'hta'" in done.stderr:
            return None
        raise SystemExit(f"{reader} failed on {recording}:\n{done.stderr}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def measure(recordings: list[Path], hta_python: str) -> list[Row]:
    """All readers on all recordings."""
    rows = []
    for recording in recordings:
        events = count_events(recording)
        for reader in _PROGRAMS:
            python = hta_python if reader == "HolisticTraceAnalysis" else sys.executable
            found = run(reader, python, recording)
            if found is not None:
                rows.append(
                    Row(
                        recording=recording.name,
                        reader=reader,
                        events=events,
                        rows=int(found["rows"]),
                        seconds=found["seconds"],
                        rate=events / found["seconds"],
                        peak_bytes=int(found["peak"]),
                        columns_bytes=int(found["columns"]) if "columns" in found else None,
                    )
                )
    return rows


def verdict(rows: list[Row]) -> dict[str, float]:
    """The figures that have a target, from the readings of one recording."""
    by_reader = {row.reader: row for row in rows}
    own = by_reader["foretrace"]
    assert own.columns_bytes is not None
    figures = {
        "events per CPU-second": own.rate,
        "times json and a loop": own.rate / by_reader["json and a loop"].rate,
        "peak memory / columns": own.peak_bytes / own.columns_bytes,
    }
    if "HolisticTraceAnalysis" in by_reader:
        figures["times HolisticTraceAnalysis"] = own.rate / by_reader["HolisticTraceAnalysis"].rate
    return figures


def shared_traces() -> Path:
    """Folder of the shared recordings, as the tests find it."""
    given = os.environ.get("FORETRACE_SHARED_DATA")
    return (Path(given) if given else ROOT.parent / "shared" / "data") / "traces"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="*", type=Path, metavar="RECORDING")
    parser.add_argument("--hta-python", default=sys.executable, help="a Python that has HolisticTraceAnalysis")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    recordings = arguments.recordings or [shared_traces() / "hta" / "df_index_resolver.json.gz"]
    if missing := [str(p) for p in recordings if not p.is_file()]:
        raise SystemExit(f"no recording at {', '.join(missing)}: name one, or set FORETRACE_SHARED_DATA.")
    rows = measure(recordings, arguments.hta_python)
    verdicts = {p.name: verdict([row for row in rows if row.recording == p.name]) for p in recordings}
    if arguments.json:
        json.dump(
            {"rows": [asdict(row) for row in rows], "figures": verdicts, "targets": TARGETS}, sys.stdout, indent=1
        )
        return
    print(f"{'recording':44} {'reader':22} {'CPU':>8} {'events/CPU-s':>13} {'memory':>8}")
    for row in rows:
        memory = f"{row.peak_bytes / 1e6:,.0f} MB"
        print(f"{row.recording[:44]:44} {row.reader:22} {row.seconds:>6.3f} s {row.rate:>13,.0f} {memory:>8}")
    for name, figures in verdicts.items():
        print(f"\n{name}")
        for what, value in figures.items():
            target = TARGETS.get(what)
            met = target is None or (value <= target if what.startswith("peak") else value >= target)
            note = "" if target is None else f"   target {target:,g}: {'met' if met else 'MISSED'}"
            print(f"  {what:28} {value:>12,.3g}{note}" if value < 1e4 else f"  {what:28} {value:>12,.0f}{note}")


if __name__ == "__main__":
    main()
