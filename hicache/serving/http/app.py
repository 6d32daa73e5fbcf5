"""The ASGI application: routes, disconnects, event streams."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hicache.errors import BadInput, CapacityError
from hicache.serving.http.answers import Answers, ChatAnswers, CompletionAnswers, Json
from hicache.serving.http.bodies import AnyBody, ChatBody, CompletionBody, RequestBody, parse_body
from hicache.serving.http.errors import ApiError, failed, refused
from hicache.serving.http.health import health_of
from hicache.serving.http.jobs import Gateway, Job
from hicache.serving.http.prompts import Prompt, Prompts, Served
from hicache.serving.http.sessions import Sessions

T = TypeVar("T")

MAX_BODY_BYTES = 8 << 20
BODY_SECONDS = 30.0
"""How long a client may take to send a body."""

_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_DONE = b"data: [DONE]\n\n"

log = logging.getLogger(__name__)


class Endpoint:
    """What the routes do. Text is cut into tokens on a thread of its own, so that long prompts hold up nobody."""

    def __init__(self, gateway: Gateway, served: Served) -> None:
        self.gateway = gateway
        self.served = served
        self.prompts = Prompts(served, Sessions())
        self._cutter = ThreadPoolExecutor(1, "tokenizer")

    async def completions(self, request: Request) -> Response:
        body = await self._body(CompletionBody, request)
        answers = CompletionAnswers(f"cmpl-{uuid4().hex}", self.served, body.wants_usage)
        return AnswerResponse(self, body, answers, len(body.prompts()), lambda: self.prompts.of_completion(body))

    async def chat(self, request: Request) -> Response:
        body = await self._body(ChatBody, request)
        answers = ChatAnswers(f"chatcmpl-{uuid4().hex}", self.served, body.wants_usage)
        return AnswerResponse(self, body, answers, 1, lambda: self.prompts.of_chat(body))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self.served.check_name(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        status, body = await asyncio.to_thread(health_of, self.gateway)
        return JSONResponse({**body, "model": self.served.name}, status)

    async def cut(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread for text."""
        return await asyncio.get_running_loop().run_in_executor(self._cutter, work)

    async def _body(self, kind: type[AnyBody], request: Request) -> AnyBody:
        try:
            raw = await asyncio.wait_for(_read(request), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body has not come within {BODY_SECONDS:g} s", code="timeout") from None
        body = parse_body(kind, raw)
        self.served.check_name(body.model)
        return body

    def _model(self) -> Json:
        served = self.served
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "hicache",
            "max_model_len": served.max_tokens,
        }


class AnswerResponse(Response):
    """Serves one request from its place in the gateway to its last byte.

    Whatever ends this (the end, an error, a client that has gone, a cancelled task) ends the request in the engine.
    Nothing is sent before the first output, so that everything until then has a status of its own.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        body: RequestBody,
        answers: Answers,
        sequences: int,
        cut: Callable[[], list[Prompt]],
    ) -> None:
        self._endpoint = endpoint
        self._body = body
        self._answers = answers
        self._sequences = sequences
        self._cut = cut
        self._prompts: list[Prompt] = []
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._endpoint.gateway.open(self._sequences)
        watch = asyncio.ensure_future(_when_gone(receive, job.abort))
        try:
            await self._start(job)
            if self._body.stream:
                await self._stream(job, send)
            else:
                await self._whole(job, scope, receive, send)
        finally:
            watch.cancel()
            job.close()

    async def _start(self, job: Job) -> None:
        self._prompts = await self._endpoint.cut(self._cut)
        job.silent = self._body.answer_tokens == 0
        job.start(self._endpoint.prompts.requests(self._body, self._prompts, self._answers.name))

    async def _outputs(self, job: Job) -> AsyncIterator[Json]:
        """The pieces of the answer; what was said is kept before the last one is told."""
        async for index, output in job.outputs():
            if output.finished:
                self._endpoint.prompts.remember(self._body, self._prompts[index], job.handles[index])
            piece = self._answers.piece(index, output)
            if piece is not None:
                yield piece

    async def _whole(self, job: Job, scope: Scope, receive: Receive, send: Send) -> None:
        async for _ in self._outputs(job):
            pass
        await JSONResponse(self._answers.whole(job.handles))(scope, receive, send)

    async def _stream(self, job: Job, send: Send) -> None:
        pieces = self._outputs(job)
        first = await anext(pieces)  # raises what has a status
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
        for piece in (*self._answers.first_pieces(self._sequences), first):
            await _send_event(send, piece)
        try:
            async for piece in pieces:
                await _send_event(send, piece)
            last = self._answers.last_piece(job.handles)
        except ApiError as error:  # the status is out
            last = error.body()
        if last is not None:
            await _send_event(send, last)
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})


def make_app(gateway: Gateway, served: Served) -> Starlette:
    """The application. It leaves starting and closing the engine to its caller."""
    endpoint = Endpoint(gateway, served)
    routes = [
        Route("/v1/completions", endpoint.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
        Route("/v1/models", endpoint.models),
        Route("/v1/models/{name:path}", endpoint.model),
        Route("/health", endpoint.health),
    ]
    handlers: Mapping[Any, Any] = {
        ApiError: _on_error,
        BadInput: _on_error,
        CapacityError: _on_error,
        ClientDisconnect: _on_error,
        HTTPException: _on_error,
        Exception: _on_error,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


async def _on_error(request: Request, error: Exception) -> Response:
    found = _as_api_error(request, error)
    return JSONResponse(found.body(), found.status, found.headers)


def _as_api_error(request: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (BadInput, CapacityError)):
        name = str(error).partition(":")[0]
        return refused(str(error), name if name.isidentifier() else None, "invalid_value")
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code=code)
    if isinstance(error, ClientDisconnect):
        return refused("the client has gone")  # nobody reads it
    return failed("internal error")


async def _read(request: Request) -> bytes:
    """The body. Raises ApiError 413 if it is too long."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is longer than {MAX_BODY_BYTES >> 20} MiB", code="request_too_large")
        parts.append(part)
    return b"".join(parts)


async def _when_gone(receive: Receive, act: Callable[[], None]) -> None:
    """Call `act` once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    act()


async def _send_event(send: Send, data: Json) -> None:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})
