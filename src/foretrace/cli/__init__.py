"""The command line: one thin file per command that parses, calls the flow and prints the answer."""

from __future__ import annotations


def main() -> None:
    """Run the `foretrace` command."""
    import gc
    import sys

    from foretrace.cli.app import run

    code = run(sys.argv[1:])
    gc.freeze()  # the process ends: Python would search all that PyTorch has loaded for garbage, a second
    sys.exit(code)
