"""The engine behind its thread: streams, aborts, closing, and what happens when it fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving_engines import ask, reference, tiers_of, tiny_engine

from hicache.errors import BadInput, CapacityError, ConfigError
from hicache.serving.async_engine import AsyncEngine
from hicache.serving.engine import Engine
from hicache.serving.outputs import EngineStopped, TokenOutput

PROMPT = list(b"a prompt for the thread")


@pytest.fixture
def served() -> Iterator[AsyncEngine]:
    engine = AsyncEngine(lambda: tiny_engine(tiers_of(40)))
    yield engine
    assert engine.close(drain=False, timeout=20)


def test_tokens_are_streamed_as_they_come(served: AsyncEngine) -> None:
    outputs = list(served.submit(ask(PROMPT, 4)))
    assert [output.token for output in outputs] == reference([ask(PROMPT, 4)])[0]
    assert [output.finish_reason for output in outputs] == [None, None, None, "length"]


def test_many_threads_are_served_at_once(served: AsyncEngine) -> None:
    requests = [ask([*PROMPT, number], 5) for number in range(8)]
    found: dict[int, list[int]] = {}

    def client(number: int) -> None:
        found[number] = served.submit(requests[number]).result().token_ids

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(60)
    assert [found[number] for number in range(8)] == reference(requests)


def test_a_listener_instead_of_the_stream(served: AsyncEngine) -> None:
    outputs, done = list[TokenOutput](), threading.Event()

    def listen(output: TokenOutput) -> None:
        outputs.append(output)
        if output.finished:
            done.set()
        raise ValueError("the client is gone")  # nobody is harmed

    served.submit(ask(PROMPT, 3), listen)
    assert done.wait(20) and len(outputs) == 3
    assert len(served.submit(ask(PROMPT, 3)).result().token_ids) == 3


def test_abort_ends_the_stream(served: AsyncEngine) -> None:
    stream = served.submit(ask(PROMPT, 120))
    first = next(iter(stream))
    stream.abort()
    handle = stream.result()
    assert first.token is not None and handle.finish_reason == "abort"
    served.abort("nobody")


def test_what_can_never_run_is_refused_at_once(served: AsyncEngine) -> None:
    with pytest.raises(CapacityError):
        served.submit(ask(PROMPT, 500))
    stream = served.submit(ask(PROMPT, 100, rid="a"))
    with pytest.raises(BadInput, match="already"):
        served.submit(ask(PROMPT, 1, rid="a"))
    stream.abort()


def test_calls_run_between_steps(served: AsyncEngine) -> None:
    served.submit(ask(PROMPT, 2)).result()
    assert served.call(lambda engine: engine.report())["run"]["output_tokens"] == 2
    with pytest.raises(ZeroDivisionError):
        served.call(lambda engine: 1 // 0)
    assert served.call(lambda engine: threading.current_thread().name) == "engine"


def test_close_drains() -> None:
    served = AsyncEngine(lambda: tiny_engine(tiers_of(40)))
    streams = [served.submit(ask([*PROMPT, number], 10)) for number in range(4)]
    assert served.close(timeout=60) and served.close()
    assert [stream.result().finish_reason for stream in streams] == ["length"] * 4
    for late in (lambda: served.submit(ask(PROMPT)), lambda: served.call(lambda engine: None)):
        with pytest.raises(EngineStopped):
            late()
    served.abort("nobody")


def test_close_without_draining_aborts() -> None:
    served = AsyncEngine(lambda: tiny_engine(tiers_of(40)))
    stream = served.submit(ask(PROMPT, 120))
    assert served.close(drain=False, timeout=60)
    assert stream.result().finish_reason == "abort"


def test_an_engine_that_cannot_be_made() -> None:
    def make() -> Engine:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        AsyncEngine(make)


def test_nobody_waits_for_an_engine_that_has_failed() -> None:
    def make() -> Engine:
        engine = tiny_engine(tiers_of(40))
        engine.model.forward = lambda *arguments: 1 // 0  # type: ignore[method-assign]
        return engine

    served = AsyncEngine(make)
    handle = served.submit(ask(PROMPT, 4)).result()
    assert handle.finish_reason == "error" and "failed" in str(handle.error)
    assert served.close()
    assert isinstance(served.failure, ZeroDivisionError)
    with pytest.raises(EngineStopped, match="failed"):
        served.submit(ask(PROMPT))


def test_copies_land_while_nothing_is_asked(tmp_path: Path) -> None:
    served = AsyncEngine(lambda: tiny_engine(tiers_of(40, 20, tmp_path)))
    served.submit(ask(PROMPT, 4)).result()
    for _ in range(400):
        if served.call(lambda engine: engine.cache.stats().storage_pages):
            break
        threading.Event().wait(0.01)
    assert served.call(lambda engine: engine.cache.stats().storage_pages)
    assert served.close()
