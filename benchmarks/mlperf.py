"""The former name of `python -m reproductions mlperf`: same arguments, same answers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reproductions.__main__ import main

if __name__ == "__main__":
    sys.exit(max(main([name, *sys.argv[1:]]) for name in ("mlperf",)))
