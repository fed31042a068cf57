"""`python -m foretrace` is the `foretrace` command."""

from foretrace.cli import main

if __name__ == "__main__":
    main()
