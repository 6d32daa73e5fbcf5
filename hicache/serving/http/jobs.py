"""Between the event loop and the engine's thread: how many requests there may be, and what comes back for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from hicache.serving.async_engine import AsyncEngine
from hicache.serving.http.errors import ApiError, failed, overloaded, refused, stopping
from hicache.serving.outputs import EngineStopped, GenerationHandle, GenerationRequest, TokenOutput


class Gateway:
    """Takes at most `max_active` sequences at a time, waiting ones included. All on one event loop.

    `on_failure` is called when the engine has come to an end by itself.
    """

    def __init__(self, engine: AsyncEngine, max_active: int, on_failure: Callable[[], None] = lambda: None) -> None:
        self.engine = engine
        self.max_active = max_active
        self.active = 0
        self.stopping = False
        self.on_failure = on_failure
        self._jobs: set[Job] = set()

    def open(self, sequences: int) -> Job:
        """A place for a request of so many sequences; `Job.close` gives it back. Raises ApiError if there is none."""
        if self.stopping:
            raise stopping()
        if sequences > self.max_active:
            raise refused(f"{sequences} prompts in one request, {self.max_active} are possible", "prompt")
        if self.active + sequences > self.max_active:
            raise overloaded(f"{self.active} requests are running or waiting, {self.max_active} are possible")
        job = Job(self, sequences)
        self._jobs.add(job)
        self.active += sequences
        return job

    def refuse(self) -> None:
        """From now on take no new request."""
        self.stopping = True

    def abort_all(self) -> None:
        """End everything that runs or waits."""
        for job in list(self._jobs):
            job.abort()

    def left(self, job: Job, sequences: int) -> None:
        """For jobs: so many of its sequences are out of the engine; with the last one it ends."""
        self.active -= sequences
        if not job.pending:
            self._jobs.discard(job)


def _untold(output: TokenOutput) -> TokenOutput:
    """The end of a request, without the token that it ends with."""
    metrics = replace(output.metrics, output_tokens=0) if output.metrics is not None else None
    reason = "length" if output.finish_reason == "stop" else output.finish_reason
    return replace(output, token=None, text="", logprobs=None, finish_reason=reason, metrics=metrics)


class Job:
    """The sequences of one HTTP request, on their way through the engine.

    A place is free again when the engine has released the sequence, which may be after the client has gone.
    """

    def __init__(self, gateway: Gateway, sequences: int) -> None:
        self.silent = False
        """Whether the client wants the prompt to be computed and no answer: the one token that comes is not told."""
        self.handles: list[GenerationHandle] = []
        self.pending = sequences
        self._gateway = gateway
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[tuple[int, TokenOutput]] = asyncio.Queue()
        self._aborted = False

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        """Submit one request per sequence. Raises ApiError, or what the engine says about a request."""
        for index, request in enumerate(requests):
            if self._aborted:
                raise self._ended_early()
            try:
                stream = self._gateway.engine.submit(request, partial(self._on_output, index))
            except EngineStopped as error:
                raise self._engine_gone(error) from error
            self.handles.append(GenerationHandle(stream.rid))

    async def outputs(self) -> AsyncIterator[tuple[int, TokenOutput]]:
        """Index of the sequence and what came out, until all have ended. Raises ApiError if one ends before its end."""
        open_sequences = len(self.handles)
        while open_sequences:
            index, output = await self._outputs.get()
            if output.finish_reason == "error":
                raise self._failed(output.error or "the request has failed")
            if output.finish_reason == "abort":
                raise self._ended_early()
            open_sequences -= output.finished
            yield index, output

    def abort(self) -> None:
        """End what is left of it. Its outputs tell, if anybody listens."""
        self._aborted = True
        for handle in self.handles:
            if not handle.finished:
                self._gateway.engine.abort(handle.rid)

    def close(self) -> None:
        """Nobody listens any more: end what is left, and give back the places of what never began."""
        self.abort()
        never_began = self.pending - sum(not handle.finished for handle in self.handles)
        self._leave(never_began)

    def _on_output(self, index: int, output: TokenOutput) -> None:
        """On the engine's thread."""
        if self.silent:
            output = _untold(output)
        with suppress(RuntimeError):  # the loop is closed: the server is gone
            self._loop.call_soon_threadsafe(self._take, index, output)

    def _take(self, index: int, output: TokenOutput) -> None:
        self.handles[index].take(output)
        self._outputs.put_nowait((index, output))
        if output.finished:
            self._leave(1)

    def _leave(self, sequences: int) -> None:
        self.pending -= sequences
        self._gateway.left(self, sequences)

    def _ended_early(self) -> ApiError:
        return stopping() if self._gateway.stopping else failed("the request was aborted")

    def _failed(self, message: str) -> ApiError:
        if self._gateway.engine.failure is not None:
            self._gateway.on_failure()
        return failed(message)

    def _engine_gone(self, error: EngineStopped) -> ApiError:
        return stopping() if self._gateway.stopping else self._failed(str(error))
