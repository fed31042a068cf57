"""One way to answer: a command returns a result; its text, JSON, page, files and exit code are made here."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperGroup

from foretrace.cli.options import flag, option
from foretrace.errors import ForetraceError
from foretrace.files import write_text
from foretrace.names import near
from foretrace.reading import ALLOW_LARGE

if TYPE_CHECKING:
    from foretrace.report import views
    from foretrace.simulate.timeline import Timeline

    Result = views.Result
else:
    Result = object  # what commands return; its module takes longer to load than many a command to fail

Html = Annotated[Path | None, option(..., "FILE", "Write the answer as a self-contained page, too.")]
AsJson = Annotated[bool, flag("--json", "Print JSON (docs/json.md) instead of text.", default=...)]
Made = TypeVar("Made", bound=Callable[..., Any])
Given = TypeVar("Given")
AllowLarge = Annotated[
    bool,
    flag(
        "--allow-large", "Read files that unpack to more than 400 times their size, or to more than fits their kind.",
        default=...,
    ),
]  # fmt: skip
COMMON = {"html": (Html, None), "as_json": (AsJson, False)}


_asked: ContextVar[list[str]] = ContextVar("asked")


def asked() -> list[str]:
    """Return the words that ask another process for the same kind of answer as this command was asked for."""
    return _asked.get([])


def writable(*files: Path | None) -> None:
    """Refuse files whose folder is missing, before anything long is done. Raises ForetraceError."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise ForetraceError(f"cannot write {file}: there is no folder {file.parent}; choose one that exists.")


def page_asked() -> bool:
    """Return whether a page is to be written, which may show more than the answer needs."""
    return "--html" in asked()


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A result, and what else a command leaves behind."""

    result: Result
    files: Mapping[Path | None, Callable[[Path], object]] = field(default_factory=dict)  # None was not asked for
    timelines: Callable[[], Mapping[str, Timeline]] | None = None  # what --perfetto draws, by name
    how: Mapping[str, Any] = field(default_factory=dict)  # how its blocks are wanted
    page: Callable[[], str] | None = None  # the text of --html, where the page shows more than the blocks
    error: Exception | None = None  # raised in the end: a mistake of ours that cost only a part of the answer


def answers(command: Callable[..., Result | Reply | None]) -> Callable[..., None]:
    """Return a command that prints what `command` returns, with the options that all commands have.

    `top` of the command is how many rows of a ranking are printed; where it reads a part of a recording (--rank,
    --steps, --salvage), the command to try next reads the same. The exit code is 1 where a result has `ok` False.
    """
    asked_for = gathering(command)
    more = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in COMMON.items()
    ]

    @wraps(command)
    def answering(*, html: Path | None, as_json: bool, **options: Any) -> None:
        writable(html, options.get("save"), options.get("perfetto"), options.get("write"))
        common = [*(["--html", str(html)] if html is not None else []), *(["--json"] if as_json else [])]
        token = _asked.set(common)
        try:
            said = asked_for(**options)
        finally:
            _asked.reset(token)
        if said is None:  # another process has answered
            return
        reply = said if isinstance(said, Reply) else Reply(result=said)
        result = _read_alike(reply.result, options)
        top = options.get("top", 12)
        print(_text(result, top, reply.how, as_json=as_json), end="")
        page = reply.page or partial(_page, result, top, reply.how)
        files = {html: lambda path: write_text(path, page()), **reply.files}
        if reply.timelines is not None:
            files[options.get("perfetto")] = partial(_timelines, reply.timelines)
        for path, write in files.items():
            if path is not None:
                write(path)
        for path in files:  # named last, when all are there
            if path is not None and not as_json:
                print(f"  wrote {path}")
        if reply.error is not None:
            raise reply.error
        if not getattr(result, "ok", True):
            raise typer.Exit(1)

    return taking(answering, [*parameters(asked_for), *more])


def group(
    name: str, help: str, *, default: str = "", models: Callable[[], Collection[str]] = tuple,
    **commands: Callable[..., Result | Reply | None],
) -> typer.Typer:  # fmt: skip
    """Return a command with these commands of its own; another first word, or one of `models`, is for `default`.

    A command is called as its parameter, with hyphens.
    """

    class ByModel(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            word = args[0] if args else ""
            known = not word or word.startswith("-") or word in self.commands
            if not known and (word in models() or "." in word or not near(word, self.commands)):
                args = [default, *args]
            return super().resolve_command(ctx, args)

    kind = ByModel if default else TyperGroup
    made = typer.Typer(name=name, help=help, cls=kind, no_args_is_help=True, rich_markup_mode=None)
    for word, command in commands.items():
        made.command(word.replace("_", "-"))(asking(command))
    return made


def asking(command: Callable[..., Any]) -> Callable[..., None]:
    """Return the command as it is run: one that returns nothing writes itself what there is to say."""
    return gathering(command) if command.__annotations__.get("return") == "None" else answers(command)


def gathering(command: Callable[..., Given]) -> Callable[..., Given]:
    """Return the command with options in place of each parameter that is a dataclass of them, and --allow-large.

    Numbers of its options are finite, unless one that is not is the default.
    """
    groups = {name: kind for name, kind in _kinds(command).items() if _is_group(kind)}
    wanted = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters(command)]
    usual = {each.name: getattr(each.default, "default", each.default) for each in wanted}

    @wraps(command)
    def gathered(*, allow_large: bool, **given: Any) -> Given:
        if allow_large:  # workers that read for this process inherit it
            os.environ[ALLOW_LARGE] = "1"
        for name, value in given.items():
            if isinstance(value, float) and not isfinite(value) and value != usual[name]:
                raise ForetraceError(f"`{name}={value}` must be finite; give a number.")
        for name, kind in groups.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        return command(**given)

    large = Parameter("allow_large", Parameter.KEYWORD_ONLY, default=False, annotation=AllowLarge)
    return taking(gathered, [*wanted, large])


def parameters(command: Callable[..., Any], *but: str) -> list[Parameter]:
    """Return the parameters of a command, but for those named: annotations as objects, dataclasses as their fields."""
    kinds, found = _kinds(command, *but), list[Parameter]()
    for name, each in signature(command).parameters.items():
        if kind := kinds.get(name):
            found += parameters(kind) if _is_group(kind) else [each.replace(annotation=kind)]
    return found


def _kinds(command: Callable[..., Any], *but: str) -> dict[str, Any]:
    """Return the annotations of a command as objects, but for what it returns and those named."""
    if isinstance(command, type):
        return get_type_hints(command, include_extras=True)
    given = {name: each for name, each in command.__annotations__.items() if name not in ("return", *but)}
    return get_type_hints(SimpleNamespace(__annotations__=given), command.__globals__, include_extras=True)


def _is_group(kind: Any) -> bool:
    return is_dataclass(kind)


def taking(command: Made, wanted: Sequence[Parameter]) -> Made:
    """Return the command as one that takes these parameters."""
    command.__signature__ = Signature(wanted)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in wanted}
    return command


def _text(result: Result, top: int, how: Mapping[str, Any], *, as_json: bool) -> str:
    if as_json:
        from foretrace.report import jsonout

        return f"{jsonout.dumps(result)}\n"
    from foretrace.report.terminal import Terminal, render

    return render(result, Terminal.of(sys.stdout, os.environ), rows=top, **how)


def _page(result: Result, top: int, how: Mapping[str, Any]) -> str:
    from foretrace.report import page

    return page.render(result, top=top, **how)


def _timelines(found: Callable[[], Mapping[str, Timeline]], path: Path) -> None:
    from foretrace.report import perfetto, tracks

    perfetto.write([tracks.track(name, each) for name, each in found().items()], path)


def _read_alike(result: Result, options: Mapping[str, Any]) -> Result:
    """Return the result whose next command reads the same part of the recording."""
    rank, steps = options.get("rank"), options.get("steps")
    if not getattr(result, "next", "") or not isinstance(steps, str):
        return result
    words = [] if rank is None else ["--rank", str(rank)]
    words += ["--steps", steps] if steps else []
    words += ["--salvage"] if options.get("salvage") else []
    if not words:
        return result
    import msgspec

    return msgspec.structs.replace(result, next=f"{result.next} {shlex.join(words)}")  # type: ignore[attr-defined]
