"""`run_server`: bind the port, load the model, answer until a signal, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import msgspec

from foretrace import reading
from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.executor import cores
from foretrace.serving.server.models import ModelSource
from foretrace.serving.server.split import CoreSplit

TOKEN = "FORETRACE_TOKEN"  # in the environment, where no file is named
_DRAIN_S = 30  # for requests that are being answered when it stops


def usable() -> tuple[int, ...]:
    """Numbers of the cores that this process may use, no more than its control group grants."""
    numbers = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return tuple(numbers[: cores()])


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a model is served."""

    source: ModelSource
    splits: Mapping[int, CoreSplit]  # by batch size; one alone stays
    every_s: float = 1.0  # between two looks at the load, where there are several
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    token: str = ""
    certificate: Path | None = None
    key: Path | None = None
    queue: int = 1024  # samples that may wait
    deadline_s: float = 60.0
    cores: tuple[int, ...] = field(default_factory=usable)


class _Planned(msgspec.Struct):
    split: str


class _PlanFile(msgspec.Struct):
    """What this needs of the answer of `foretrace serve plan`."""

    batch: int
    chosen: _Planned


def read_plans(files: Sequence[Path]) -> dict[int, CoreSplit]:
    """Splits by batch size, from answers of `foretrace serve plan` in JSON. Raises ForetraceError."""
    found = {}
    for file in files:
        try:
            plan = msgspec.json.decode(reading.read_bytes(file, mend="write it again"), type=_PlanFile)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ForetraceError(
                f"{file} must be the JSON of foretrace serve plan, got {error}; write it again."
            ) from None
        found[plan.batch] = CoreSplit.parse(plan.chosen.split)
    return found


def read_token(file: Path | None) -> str:
    """The bearer token in a file, else in the environment; "" for none. Raises ForetraceError."""
    if file is None:
        return os.environ.get(TOKEN, "").strip()
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ForetraceError(f"cannot read the token in {file} ({error}); give a text file that holds it.") from None
    if len(token) < 16 or not token.isprintable() or " " in token:
        raise ForetraceError(f"the token in {file} must be one word of at least 16 characters; make a longer one.")
    return token


def run_server(settings: ServerSettings, told: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `told` gets the address once requests are answered.

    Raises ForetraceError where the port is taken, the model cannot be loaded, or others than this machine could ask
    without a token; MissingExtraError without the packages.
    """
    try:
        import uvicorn

        from foretrace.serving.server.app import ServerApp
        from foretrace.serving.server.dispatcher import Dispatcher
        from foretrace.serving.server.estimator import follow_load
        from foretrace.serving.server.processes import process_starter
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("foretrace"):
            raise
        raise MissingExtraError(
            f"serving needs {error.name}, which is not installed: pip install 'foretrace[serve]'"
        ) from None

    class Server(uvicorn.Server):
        """Signals are ours: they end the loading of a model as well."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    async def run() -> None:
        starter = process_starter(settings.source, limit_s=settings.deadline_s)
        dispatcher = Dispatcher(starter, settings.cores, queue=settings.queue)
        routes = ServerApp(dispatcher, deadline_s=settings.deadline_s, token=settings.token)
        config = uvicorn.Config(
            routes.app, lifespan="off", log_config=None, ws="none",
            access_log=False, server_header=False, ssl_certfile=settings.certificate, ssl_keyfile=settings.key,
            timeout_graceful_shutdown=_DRAIN_S,
        )  # fmt: skip
        _load_certificate(config)
        server = Server(config)
        main = asyncio.current_task()
        assert main is not None

        def stop() -> None:
            if not server.started:
                main.cancel()
            server.force_exit = server.should_exit
            server.should_exit = True

        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, stop)
        following = None
        try:
            await dispatcher.reconfigure(settings.splits[min(settings.splits)])
            if len(settings.splits) > 1:
                following = asyncio.create_task(follow_load(dispatcher, settings.splits, settings.every_s))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            told(f"{'https' if settings.certificate else 'http'}://{_authority(listening)}")
            await serving
        finally:
            if following is not None:
                following.cancel()
            await dispatcher.close(_DRAIN_S)

    listening = _listen(settings)
    with listening, suppress(asyncio.CancelledError):
        asyncio.run(run())


def _listen(settings: ServerSettings) -> socket.socket:
    host, port = settings.host, settings.port
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)[0]
    except OSError as error:
        raise ForetraceError(
            f"`host={host}` is no address of this machine ({error.strerror}); give 127.0.0.1."
        ) from None
    if not settings.token and not ip_address(address[0]).is_loopback:
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


def _load_certificate(config: object) -> None:
    """Raises ForetraceError where the certificate or its key cannot be used."""
    try:
        config.load()  # type: ignore[attr-defined]
    except (OSError, ssl.SSLError) as error:
        raise ForetraceError(
            f"the certificate or its key cannot be used ({error.strerror or error}); give both as PEM files."
        ) from None


def _authority(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
