"""`run_server`: bind the port, load the model, answer until a signal, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import msgspec

from foretrace import reading
from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.executor import cores
from foretrace.hardware.processor import allowed_cores
from foretrace.serving.server.models import ModelSource
from foretrace.serving.server.split import CoreSplit

TOKEN = "FORETRACE_TOKEN"  # in the environment, where no file is named
_DRAIN_S = 30  # for requests that are being answered when it stops


def usable() -> tuple[int, ...]:
    """Return numbers of the cores that this process may use, no more than its control group grants."""
    return allowed_cores()[: cores()]


class _Planned(msgspec.Struct):
    split: str


class _PlanFile(msgspec.Struct):
    """What this needs of the answer of `foretrace serve plan`."""

    batch: int
    chosen: _Planned


def read_plans(files: Sequence[Path]) -> dict[int, CoreSplit]:
    """Return splits by batch size, from answers of `foretrace serve plan` in JSON. Raises ForetraceError."""
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
    """Return the bearer token in a file, else in the environment; "" for none. Raises ForetraceError."""
    if file is None:
        return os.environ.get(TOKEN, "").strip()
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ForetraceError(f"cannot read the token in {file} ({error}); give a text file that holds it.") from None
    if len(token) < 16 or not token.isprintable() or " " in token:
        raise ForetraceError(f"the token in {file} must be one word of at least 16 characters; make a longer one.")
    return token


def run_server(
    source: ModelSource, splits: Mapping[int, CoreSplit], *, every_s: float, host: str, port: int, token: str,
    certificate: Path | None, key: Path | None, queue: int, deadline_s: float, told: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve until SIGINT or SIGTERM.

    Args:
        source: the model.
        splits: by batch size; of several, the one for the load is chosen every `every_s` seconds.
        every_s: see there.
        host: where to listen; beyond this machine a token is needed.
        port: and at which port; 0: any that is free.
        token: that clients must know; "": none.
        certificate: for TLS, PEM.
        key: and its key.
        queue: samples that may wait.
        deadline_s: the longest that a request may take.
        told: gets the address once requests are answered.

    Raises:
        ForetraceError: the port is taken, the model cannot be loaded, or there is no token where others could ask.
        MissingExtraError: a package is missing.

    """
    try:
        import uvicorn

        from foretrace.serving.server.app import ServerApp
        from foretrace.serving.server.dispatcher import Dispatcher
        from foretrace.serving.server.estimator import follow_load
        from foretrace.serving.server.worker import ModelWorker
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
        start = partial(ModelWorker.started, source, limit_s=deadline_s, one=asyncio.Lock())
        dispatcher = Dispatcher(start, usable(), queue=queue)
        routes = ServerApp(dispatcher, deadline_s=deadline_s, token=token)
        config = uvicorn.Config(
            routes.app, lifespan="off", log_config=None, ws="none",
            access_log=False, server_header=False, ssl_certfile=certificate, ssl_keyfile=key,
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
            await dispatcher.reconfigure(splits[min(splits)])
            if len(splits) > 1:
                following = asyncio.create_task(follow_load(dispatcher, splits, every_s))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            told(f"{'https' if certificate else 'http'}://{_authority(listening)}")
            await serving
        finally:
            if following is not None:
                following.cancel()
            await dispatcher.close(_DRAIN_S)

    listening = _listen(host, port, token)
    with listening, suppress(asyncio.CancelledError):
        asyncio.run(run())


def _listen(host: str, port: int, token: str) -> socket.socket:
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)[0]
    except OSError as error:
        raise ForetraceError(
            f"`host={host}` is no address of this machine ({error.strerror}); give 127.0.0.1."
        ) from None
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


def _load_certificate(config: object) -> None:
    """Raise ForetraceError where the certificate or its key cannot be used."""
    try:
        config.load()  # type: ignore[attr-defined]
    except (OSError, ssl.SSLError) as error:
        raise ForetraceError(
            f"the certificate or its key cannot be used ({error.strerror or error}); give both as PEM files."
        ) from None


def _authority(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
