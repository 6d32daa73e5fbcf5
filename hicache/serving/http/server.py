"""The process around the application: a socket, uvicorn, signals, and an end that leaves the disk in order.

The first SIGINT or SIGTERM takes no more requests and lets those that are there finish for `grace` seconds; then, or
with the second signal, they are aborted. The cache is closed in any case.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from hicache.errors import ConfigError
from hicache.serving.http.jobs import Gateway

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 2048
_LAST_SECONDS = 5
"""After `grace`, for clients that do not read what they asked for."""

log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A socket on this address; port 0 is one that is free. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    family, _, _, _, address = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"{host} port {port} cannot be used: {error.strerror}") from None
    return sock


def url_of(sock: socket.socket) -> str:
    """Where clients find the server."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer:
    """Serves `app` on `sock` until it is told to stop."""

    def __init__(
        self, app: Any, gateway: Gateway, sock: socket.socket, grace: float = 10.0, access_log: bool = False
    ) -> None:
        self._gateway = gateway
        self._sock = sock
        self._grace = grace
        self._loop: asyncio.AbstractEventLoop | None = None
        gateway.on_failure = self._stop
        self._server = _Server(
            uvicorn.Config(
                app,
                http="h11",
                loop="asyncio",
                ws="none",
                lifespan="off",
                access_log=access_log,
                log_level="info" if access_log else "warning",
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=int(grace) + _LAST_SECONDS,
            )
        )

    def run(self) -> None:
        """Serve; in the main thread signals stop it. The engine is left to the caller to be closed."""
        asyncio.run(self._run())

    def stop(self) -> None:
        """What a signal does, from any thread. Ignored before `run` and after it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        with _signals(self._loop, self._stop):
            await self._server.serve([self._sock])

    def _stop(self) -> None:
        if self._gateway.stopping:
            self._gateway.abort_all()
            return
        self._gateway.refuse()
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(self._grace, self._gateway.abort_all)


class _Server(uvicorn.Server):
    """Signals are not uvicorn's, which would end the process with them in the end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def _signals(loop: asyncio.AbstractEventLoop, act: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for number in SIGNALS:
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
