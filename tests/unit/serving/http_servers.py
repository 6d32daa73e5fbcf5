"""A server in this process for the tests: a tiny model on a free port, and a client that is sockets and JSON."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from serving_engines import PAGE, tiers_of, tiny_model

from hicache.config import CacheConfig
from hicache.serving.async_engine import AsyncEngine
from hicache.serving.engine import Engine
from hicache.serving.http.server import bind
from hicache.serving.http.service import Service, ServiceOptions
from hicache.serving.outputs import EngineStopped
from hicache.serving.setup import serving_config

SECONDS = 60
"""Nothing waits as long."""

Json = dict[str, Any]


def config(device: int = 200, host: int = 400, disk: Path | None = None) -> CacheConfig:
    """Sizes in pages."""
    return serving_config(tiny_model(), tiers_of(device, host, disk), PAGE, poison=True)


@dataclass
class Running:
    """A service whose `run` is on a thread. `submitted` and `aborted` get the names of requests."""

    service: Service
    submitted: SimpleQueue[str] = field(default_factory=SimpleQueue)
    aborted: SimpleQueue[str] = field(default_factory=SimpleQueue)
    failure: EngineStopped | None = None

    def __post_init__(self) -> None:
        engine = self.engine
        submit, abort = engine.submit, engine.abort

        def noted_submit(request: Any, on_output: Any = None) -> Any:
            stream = submit(request, on_output)
            self.submitted.put(stream.rid)
            return stream

        def noted_abort(rid: str) -> None:
            abort(rid)
            self.aborted.put(rid)

        engine.submit, engine.abort = noted_submit, noted_abort  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def engine(self) -> AsyncEngine:
        return self.service.engine

    @property
    def port(self) -> int:
        return int(self.service.url.rpartition(":")[2])

    def _run(self) -> None:
        try:
            self.service.run()
        except EngineStopped as error:
            self.failure = error

    def ended(self) -> bool:
        """Wait for `run` to return."""
        self._thread.join(SECONDS)
        return not self._thread.is_alive()

    def stop(self) -> bool:
        self.service.stop()
        return self.ended()

    @contextmanager
    def held(self) -> Iterator[None]:
        """The engine stands still meanwhile."""
        stands, go_on = threading.Event(), threading.Event()

        def wait(engine: Engine) -> None:
            stands.set()
            go_on.wait(SECONDS)

        holder = threading.Thread(target=self.engine.call, args=(wait,))
        holder.start()
        stands.wait(SECONDS)
        try:
            yield
        finally:
            go_on.set()
            holder.join(SECONDS)

    def settle(self) -> dict[str, int]:
        """Wait until there is no request, account for every page, and return how requests have ended so far."""
        while self.engine.call(lambda engine: engine.has_work):
            pass  # each call lets the engine take a step
        self.engine.call(lambda engine: engine.settle())
        return dict(self.engine.call(lambda engine: engine.metrics.finished))

    # ---- the client -------------------------------------------------------------------------

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)

    def post(self, path: str, body: Json | bytes) -> http.client.HTTPResponse:
        """A response whose body has not been read."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = self.connect()
        connection.request("POST", f"/v1/{path}", raw, {"content-type": "application/json"})
        return connection.getresponse()

    def ask(self, path: str, **body: Any) -> Json:
        """What a good request is answered."""
        response = self.post(path, {"temperature": 0, "ignore_eos": True, **body})
        answer = json.load(response)
        assert response.status == 200, answer
        return answer

    def complete(self, prompt: Any, max_tokens: int = 6, **body: Any) -> Json:
        return self.ask("completions", prompt=prompt, max_tokens=max_tokens, **body)

    def chat(self, *contents: str, max_tokens: int = 6, **body: Any) -> Json:
        """User and assistant in turn."""
        return self.ask("chat/completions", messages=messages(*contents), max_tokens=max_tokens, **body)

    def get(self, path: str) -> tuple[int, Json]:
        connection = self.connect()
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.load(response)


def messages(*contents: str) -> list[Json]:
    return [{"role": ("user", "assistant")[turn % 2], "content": content} for turn, content in enumerate(contents)]


def events(response: http.client.HTTPResponse) -> Iterator[Json | str]:
    """Data of the events of a stream as they come, the last one as text."""
    for line in response:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip().decode()
            yield data if data == "[DONE]" else json.loads(data)


def cached(answer: Json) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@contextmanager
def running(tiers: CacheConfig | None = None, options: ServiceOptions | None = None) -> Iterator[Running]:
    """A server; at the end it is stopped and its cache closed."""
    sock = bind("127.0.0.1", 0)
    with Service(tiny_model(), tiers or config(), sock, options) as service:
        server = Running(service)
        yield server
        service.stop()
        assert server.stop()
