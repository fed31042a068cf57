"""What papers claimed, held against what we get: one folder each, run by `make reproduce NAME=...`.

The product never imports this, and no wheel holds it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Tables, machine and date are written as the benchmarks write them (`tables`).
sys.path.append(str(ROOT / "benchmarks"))
