"""What papers claimed, held against what we get: one folder each, run by `make reproduce NAME=...`.

The product never imports this, and no wheel holds it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Tables, machine and date are written as the benchmarks write them (`tables`).
sys.path.append(str(ROOT / "benchmarks"))


def shared_data() -> Path:
    """The folder of published measurements that protocols read; it may be absent."""
    return Path(os.environ.get("FORETRACE_SHARED_DATA", ROOT.parent / "shared" / "data"))


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """Make the parser of `python -m reproductions NAME`, which calls itself so."""
    return argparse.ArgumentParser(
        prog=f"reproductions {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
