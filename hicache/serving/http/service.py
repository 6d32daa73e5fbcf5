"""Engine, application and server as one thing that runs and is closed."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from types import TracebackType

from hicache.config import CacheConfig
from hicache.serving.async_engine import AsyncEngine
from hicache.serving.http.app import make_app
from hicache.serving.http.jobs import Gateway
from hicache.serving.http.prompts import Served
from hicache.serving.http.server import HttpServer, url_of
from hicache.serving.loaded import LoadedModel
from hicache.serving.outputs import EngineStopped
from hicache.serving.scheduler import SchedulerOptions
from hicache.serving.setup import build_engine

CLOSE_SECONDS = 60.0


@dataclass(frozen=True)
class ServiceOptions:
    """`name` is the model's for clients (None: its own). `max_waiting` requests may wait beside those that run;
    after a signal those that are there have `grace` seconds."""

    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    name: str | None = None
    max_waiting: int = 256
    grace: float = 10.0
    access_log: bool = False


class Service:
    """A model over a cache on a socket, as a context manager: leaving it closes the cache.

    The constructor starts the engine and raises ConfigError if that cannot be.
    """

    def __init__(
        self, loaded: LoadedModel, config: CacheConfig, sock: socket.socket, options: ServiceOptions | None = None
    ) -> None:
        options = options or ServiceOptions()
        self.url = url_of(sock)
        self.engine = AsyncEngine(lambda: build_engine(loaded, config, options.scheduler))
        longest = self.engine.call(lambda engine: engine.max_tokens)
        name = options.name or loaded.name
        self.served = Served(name, loaded.tokenizer, loaded.chat, longest, created=int(time.time()))
        self.gateway = Gateway(self.engine, options.scheduler.max_running + options.max_waiting)
        app = make_app(self.gateway, self.served)
        self._server = HttpServer(app, self.gateway, sock, options.grace, options.access_log)

    def run(self) -> None:
        """Serve until `stop`, or a signal in the main thread. Raises EngineStopped if the engine has failed."""
        self._server.run()
        if self.engine.failure is not None:
            raise EngineStopped(f"the engine has failed: {self.engine.failure}")

    def stop(self) -> None:
        """Take no more requests and end soon; called again, at once. From any thread."""
        self._server.stop()

    def close(self) -> bool:
        """Bring what only memory has to the disk. False if that was not done in time."""
        return self.engine.close(drain=False, timeout=CLOSE_SECONDS)

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
