"""The engine on a thread of its own, for servers: requests and aborts come in from any thread, tokens go out.

One thread owns engine and cache. Others leave calls in its inbox; it takes them between steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

from hicache.errors import BadInput
from hicache.serving.engine import Engine
from hicache.serving.outputs import EngineStopped, GenerationHandle, GenerationRequest, TokenOutput

T = TypeVar("T")
OnOutput = Callable[[TokenOutput], None]

_POLL_SECONDS = 0.005
"""How often copies in flight are looked at while there is no request."""

log = logging.getLogger(__name__)


class AnswerStream:
    """The outputs of one request as they come; iterate from one thread."""

    def __init__(self, rid: str, abort: Callable[[str], None]) -> None:
        self.rid = rid
        self._abort = abort
        self._outputs: SimpleQueue[TokenOutput] = SimpleQueue()

    def __iter__(self) -> Iterator[TokenOutput]:
        """Blocks for each output; the last one has a `finish_reason`. One pass only."""
        while True:
            output = self._outputs.get()
            yield output
            if output.finished:
                return

    def put(self, output: TokenOutput) -> None:
        """For the engine."""
        self._outputs.put(output)

    def abort(self) -> None:
        """End the request; the iteration ends with it."""
        self._abort(self.rid)

    def result(self) -> GenerationHandle:
        """Wait for the end; everything that came out."""
        handle = GenerationHandle(self.rid)
        for output in self:
            handle.take(output)
        return handle


class AsyncEngine:
    """Runs an engine. `make` builds it on the thread that will own it; what it raises, the constructor raises."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._wake = threading.Condition()
        self._inbox: list[Callable[[Engine], None]] = []
        self._listeners: dict[str, OnOutput] = {}
        self._calls: set[Future[Any]] = set()
        self._numbers = count()
        self._closing = False
        self._drain = True
        self._failure: BaseException | None = None
        started: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._main, args=(make, started), name="engine", daemon=True)
        self._thread.start()
        self._engine = started.result()

    # ---- from any thread --------------------------------------------------------------------

    def submit(self, request: GenerationRequest, on_output: OnOutput | None = None) -> AnswerStream:
        """Queue a request. Its outputs go to the stream, or to `on_output`, called on the engine's thread: it must
        return at once, as `loop.call_soon_threadsafe` does.

        Raises BadInput or CapacityError for a request that can never run, EngineStopped once the engine is closed.
        """
        self._engine.check(request)
        rid = request.rid if request.rid is not None else f"stream-{next(self._numbers)}"
        stream = AnswerStream(rid, self.abort)
        with self._wake:
            self._refuse_if_closed()
            if rid in self._listeners:
                raise BadInput(f"rid: there is a request {rid!r} already")
            self._listeners[rid] = on_output or stream.put
            self._post(lambda engine: self._add(engine, replace(request, rid=rid)))
        return stream

    def abort(self, rid: str) -> None:
        """End a request, in whatever state it is. Unknown ones and those that have ended are ignored."""
        with self._wake:
            if not self._thread_over:
                self._post(lambda engine: _ignore(engine.abort(rid)))

    def call(self, work: Callable[[Engine], T], timeout: float = 60.0) -> T:
        """Run `work` between two steps, for reports or a flush, and return what it returns or raise what it raises.

        Raises EngineStopped once the engine is closed, TimeoutError after `timeout` seconds.
        """
        result: Future[T] = Future()
        with self._wake:
            self._refuse_if_closed()
            self._calls.add(result)
            self._post(lambda engine: _resolve(result, lambda: work(engine)))
        try:
            return result.result(timeout)
        finally:
            self._calls.discard(result)

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine's thread, if it was not `close`."""
        return self._failure

    def close(self, drain: bool = True, timeout: float = 60.0) -> bool:
        """Take no more requests, finish those that are there or (`drain` off) abort them, and close the cache.

        After `timeout` seconds the rest is aborted, too. False if the cache is not closed even then, as long again
        afterwards. Idempotent.
        """
        with self._wake:
            self._closing, self._drain = True, self._drain and drain
            self._wake.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._wake:
                self._drain = False
                self._wake.notify_all()
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def _thread_over(self) -> bool:
        return self._failure is not None or not self._thread.is_alive()

    def _refuse_if_closed(self) -> None:
        if self._failure is not None:
            raise EngineStopped(f"the engine has failed: {self._failure}")
        if self._closing:
            raise EngineStopped("the engine is closed")

    def _post(self, message: Callable[[Engine], None]) -> None:
        self._inbox.append(message)
        self._wake.notify_all()

    # ---- on the engine's thread -------------------------------------------------------------

    def _main(self, make: Callable[[], Engine], started: Future[Engine]) -> None:
        try:
            engine = make()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(engine)
        failure: BaseException | None = None
        try:
            self._serve(engine)
        except BaseException as error:  # a bug, or memory is gone: nobody is left waiting
            log.exception("the engine has failed")
            failure = error
        try:
            ends = engine.close()
            if failure is None:
                self._deliver(ends)
        except BaseException as error:
            log.exception("the engine was not closed")
            failure = failure or error
        self._release_all(failure)

    def _serve(self, engine: Engine) -> None:
        while True:
            for message in self._take(engine):
                message(engine)
            if self._closing and not (engine.has_work and self._drain) and not self._inbox:
                return
            if engine.has_work or engine.cache.in_flight:
                self._deliver(engine.step())

    def _take(self, engine: Engine) -> list[Callable[[Engine], None]]:
        """What has come in; waits for it while there is nothing else to do."""
        with self._wake:
            if not (self._inbox or self._closing or engine.has_work):
                self._wake.wait(_POLL_SECONDS if engine.cache.in_flight else None)
            messages, self._inbox = self._inbox, []
            return messages

    def _add(self, engine: Engine, request: GenerationRequest) -> None:
        engine.add_request(request)  # was checked when it was submitted

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            with self._wake:
                take = self._listeners.pop if output.finished else self._listeners.get
                listener = take(output.rid, None)
            try:
                if listener is not None:
                    listener(output)
            except Exception:  # a client that is gone is no reason to stop
                log.exception("the listener of %s has failed", output.rid)

    def _release_all(self, failure: BaseException | None) -> None:
        """Whoever still waits gets an end."""
        with self._wake:
            self._failure, self._closing = failure, True
            listeners, self._listeners = self._listeners, {}
            calls, self._calls = self._calls, set()
            self._inbox.clear()
        message = f"the engine has failed: {failure}" if failure is not None else "the engine is closed"
        for rid, listener in listeners.items():
            listener(TokenOutput(rid, None, finish_reason="error", error=message))
        for call in calls:
            if not call.done():
                call.set_exception(EngineStopped(message))


def _ignore(_: object) -> None:
    pass


def _resolve(result: Future[T], work: Callable[[], T]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)
