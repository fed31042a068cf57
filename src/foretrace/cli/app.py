"""All commands in one application, and the one place where errors become exit codes.

Exit codes: 0 answered, 1 our bug (traceback and how to report it), 2 the user's mistake (one line on standard
error), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any

import typer
from typer.core import TyperGroup

from foretrace.cli import streams
from foretrace.cli.answers import answers, asking
from foretrace.cli.waiting import sign_of_life
from foretrace.errors import OPTIONS, ForetraceError, needing
from foretrace.plaintext import visible
from foretrace.reading import ALLOW_LARGE
from foretrace.shipped import entry_points

BUG = (
    "foretrace: this is a bug in foretrace {version}, not a mistake of yours. Please report it with the lines above, "
    "the command and, if you can share it, the file."
)

# The class of every usage error; its module differs between versions of the command-line library.
_USAGE_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


COMMANDS = "foretrace.commands"  # entry points of other packages (docs/write-a-command.md)
# Commands in the order of a person's work.
PANELS = {
    "Record and look": ("record", "show", "blame", "profile", "simulate", "stash", "report", "export", "graph"),
    "Ask what if": ("advise", "whatif", "optimise", "compare"),
    "Check": ("check", "verify", "ledger"),
    "Models without a run": ("estimate", "operators", "utilisation", "sparsity", "rewrite", "program", "kernels",
                             "plan", "codesign"),
    "Many workers": ("align", "scale", "network", "compression", "rig", "cloud"),
    "Fleets": ("fleet",),
    "Serving": ("serve", "llm", "energy"),
    "Tools": ("calibrate", "techniques", "zoo", "devices"),
}  # fmt: skip
# Files with other names than their commands.
_HOMES = {
    "recordings": ("show", "blame", "profile", "simulate", "stash", "report", "export", "graph", "advise", "whatif",
                   "optimise", "compare", "check"),
    "verify": ("ledger", "rig"),
    "models": ("estimate", "operators", "utilisation", "sparsity", "rewrite", "program", "kernels", "codesign"),
    "workers": ("align", "scale", "network", "compression", "cloud"),
    "tools": ("techniques", "zoo", "devices"),
}  # fmt: skip


class Panels(TyperGroup):
    """The commands under the headings of `PANELS`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section per panel."""
        width = formatter.width - 6 - max(map(len, self.commands))
        ours = {name for names in PANELS.values() for name in names}
        others = tuple(sorted(self.commands.keys() - ours))
        for title, names in {**PANELS, **({"Of other packages": others} if others else {})}.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])


def application() -> typer.Typer:
    """Return the `foretrace` command with its subcommands, in the order a user meets them."""
    app = typer.Typer(
        name="foretrace",
        cls=Panels,
        help="Record one deep-learning run, replay it as a task graph, and ask what if.",
        epilog="Start with: foretrace record -- python train.py",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        version: bool = typer.Option(False, "--version", help="Print the version and stop."),
    ) -> None:
        if version:
            from foretrace import __version__

            print(f"foretrace {__version__}")
        elif context.invoked_subcommand is None:
            print(context.get_help())

    homes = {name: home for home, names in _HOMES.items() for name in names}
    for name in (name for names in PANELS.values() for name in names):
        command = getattr(import_module(f"foretrace.cli.{homes.get(name, name)}"), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command)
        elif name == "record":  # what is recorded follows --, options and all
            words = "Record a few steps of a training command, left unchanged."
            settings = {"allow_extra_args": True}
            app.command(name, short_help=words, context_settings=settings)(asking(command))
        else:
            app.command(name)(asking(command))
    for entry in entry_points(group=COMMANDS):
        app.command(entry.name)(answers(_loaded(entry)))
    return app


def _loaded(entry: EntryPoint) -> Callable[..., Any]:
    """Return the command of another package. Raises ForetraceError where it cannot be had."""
    try:
        loaded: Callable[..., Any] = entry.load()
    except Exception as error:
        raise ForetraceError(f"the command {entry.name} of {entry.value} cannot be loaded: {error}") from None
    return loaded


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; never raises for a mistake of the user."""
    with streams.guarded():
        try:
            code = _run(arguments)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of our output has seen enough (`| head`)
            streams.give_up()
            return 0
        except streams.OutputError as error:
            streams.give_up()
            return _complain(str(error))
        return code


def _run(arguments: Sequence[str]) -> int:
    kept = {name: os.environ.get(name) for name in (ALLOW_LARGE, OPTIONS)}
    os.environ[OPTIONS] = "1"
    name = arguments[0] if arguments else ""
    # What these start writes to the same terminal, unheard by us.
    speaks = nullcontext() if name in ("record", "calibrate") else sign_of_life(name)
    try:
        with speaks:
            command = _command(entry_points(group=COMMANDS))
            with needing(f"foretrace {name}"):
                code = command.main(args=list(arguments), prog_name="foretrace", standalone_mode=False)
    except (BrokenPipeError, streams.OutputError):
        raise
    except ForetraceError as error:
        return _complain(str(error))
    except typer.Abort as error:
        # The command-line library takes the end of a file for an interrupt.
        return _bug() if isinstance(error.__cause__, EOFError) else 130
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _complain(_usage(error)) if isinstance(error, _USAGE_ERROR) else _bug()
    finally:
        for variable, value in kept.items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value
    return code if isinstance(code, int) else 0


@cache
def _command(others: tuple[EntryPoint, ...]) -> Any:
    """Return the application as it is run, made once for what other packages offer."""
    return typer.main.get_command(application())


def _bug() -> int:
    """Return the traceback of what is being handled, and how to report it."""
    import traceback

    from foretrace import __version__

    traceback.print_exc()
    return _complain(BUG.format(version=__version__), code=1, prefix="")


def _usage(error: Any) -> str:
    """Return what is wrong with the arguments, and where to look."""
    command = error.ctx.command_path if getattr(error, "ctx", None) else "foretrace"
    return f"{error.format_message().rstrip('.')}; see {command} --help."


def _complain(message: str, *, code: int = 2, prefix: str = "foretrace: ") -> int:
    """Print one line on standard error and return the exit code."""
    with suppress(OSError):  # standard error may be as full as the disk
        print(prefix + visible(" ".join(message.split())), file=sys.stderr)
    return code
