"""`run_server`: bind the port, load the model, answer until a signal, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import msgspec

from foretrace.errors import ForetraceError, needing, refused
from foretrace.executor import cores
from foretrace.hardware.processor import allowed_cores
from foretrace.reading import read_struct
from foretrace.serving.server.models import ModelSource
from foretrace.serving.server.split import CoreSplit

TOKEN = "FORETRACE_TOKEN"  # in the environment, where no file is named
_LONGEST_TOKEN = 4096  # characters: less than a header may have
_DRAIN_S = 30  # for requests that are being answered when it stops


def usable(threads: int | None = None) -> tuple[int, ...]:
    """Return numbers of so many cores, by default all that affinity and control groups grant this process.

    Raises ForetraceError where it may not run on so many.
    """
    allowed, wanted = allowed_cores(), threads or cores()
    if wanted > len(allowed):
        raise ForetraceError(f"`threads={wanted}`: this process may use {len(allowed)} cores; give at most as many.")
    return allowed[:wanted]


class _Planned(msgspec.Struct):
    split: str


class _PlanFile(msgspec.Struct):
    batch: int
    chosen: _Planned


def read_plans(files: Iterable[Path]) -> dict[int, CoreSplit]:
    """Return splits by batch size, from answers of `foretrace serve plan` in JSON. Raises ForetraceError."""
    found = {}
    for file in files:
        plan = read_struct(file, _PlanFile, "JSON of foretrace serve plan", "write it again")
        found[plan.batch] = CoreSplit.parse(plan.chosen.split)
    return found


def read_token(file: Path | None) -> str:
    """Return the bearer token in a file, else in the environment; "" for none. Raises ForetraceError."""
    if file is None:
        return os.environ.get(TOKEN, "").strip()
    try:
        with file.open(encoding="ascii") as opened:
            token = opened.read(_LONGEST_TOKEN + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ForetraceError(f"cannot read the token in {file} ({error}); give a text file that holds it.") from None
    if not 16 <= len(token) <= _LONGEST_TOKEN or not token.isprintable() or " " in token:
        raise ForetraceError(
            f"the token in {file} must be one word of 16 to {_LONGEST_TOKEN:,} characters; make another one."
        )
    return token


def run_server(
    source: ModelSource, splits: Mapping[int, CoreSplit], *, every_s: float, host: str, port: int, token: str,
    certificate: Path | None, key: Path | None, queue: int, deadline_s: float, told: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve a model on a port of `host` until SIGINT or SIGTERM; `told` gets the address once requests are answered.

    `splits` by batch size: of several, the one for the load is chosen every `every_s` seconds. So many samples may wait
    (`queue`), and a request takes `deadline_s` at most. Raises ForetraceError where the port is taken, the model or the
    certificate cannot be loaded, or there is no token where others could ask; MissingExtraError for a package.
    """
    with needing("serving"):
        import uvicorn

        from foretrace.serving.server.app import ServerApp
        from foretrace.serving.server.dispatcher import Dispatcher
        from foretrace.serving.server.worker import ModelWorker

    async def run() -> None:
        start = partial(ModelWorker.started, source, limit_s=deadline_s, one=asyncio.Lock())
        dispatcher = Dispatcher(start, usable(), queue=queue)
        config = uvicorn.Config(
            ServerApp(dispatcher, deadline_s=deadline_s, token=token).app, lifespan="off", log_config=None, ws="none",
            access_log=False, server_header=False, ssl_certfile=certificate, ssl_keyfile=key,
            timeout_graceful_shutdown=_DRAIN_S,
        )  # fmt: skip
        with refused("the certificate or its key cannot be used", "give both as PEM files"):
            config.load()
        server = uvicorn.Server(config)
        # Signals are ours: they end the loading of a model as well.
        server.capture_signals = nullcontext  # type: ignore[assignment,method-assign]
        main, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert main is not None

        def stop() -> None:
            if not server.started:
                main.cancel()
            server.force_exit = server.should_exit
            server.should_exit = True

        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, stop)
        following = None
        try:
            await dispatcher.reconfigure(splits[min(splits)])
            if len(splits) > 1:
                following = asyncio.create_task(dispatcher.follow_load(splits, every_s))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            name, number = listening.getsockname()[:2]
            told(f"{'https' if certificate else 'http'}://{f'[{name}]' if ':' in name else name}:{number}")
            await serving
        finally:
            if following is not None:
                following.cancel()
            await dispatcher.close(_DRAIN_S)

    with _listening(host, port, token) as listening, suppress(asyncio.CancelledError):
        asyncio.run(run())


def _listening(host: str, port: int, token: str) -> socket.socket:
    with refused(f"`host={host}` is no address of this machine", "give 127.0.0.1"):
        family, kind, number, _, address = socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)[0]
    if not token and not ip_address(address[0]).is_loopback:
        raise ForetraceError(
            f"`host={host}` lets other machines ask, which needs a token; give `token_file=FILE`, or set {TOKEN}."
        )
    found = socket.socket(family, kind, number)  # asyncio sends small packets at once where it reads TCP here
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(2048)
    except OSError as error:
        found.close()
        raise ForetraceError(f"`port={port}` of {host} cannot be had ({error.strerror}); give another one.") from None
    return found
