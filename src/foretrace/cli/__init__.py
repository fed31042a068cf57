"""The command line: one thin file per command that parses, calls the flow and prints the answer."""

from __future__ import annotations


def main() -> None:
    """Run the `foretrace` command."""
    import sys

    from foretrace.cli.app import run

    sys.exit(run(sys.argv[1:]))
