"""The `openai` client against `hicache serve` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

ROOT = Path(__file__).parents[2]
SECONDS = 60
"""Nothing takes as long."""

QUESTIONS = [
    "Tell me about radix trees, and about the pages that lie in them.",
    "And what happens when the device is full?",
    "Then what happens when the host is full?",
]
GREEDY: dict[str, Any] = {"model": "random", "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A server and a client of it."""
    command = [sys.executable, "-m", "hicache", "serve", "--port", "0", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+/v1", line)
            if url is None:
                process.kill()
                raise AssertionError(f"{line}{process.communicate()[1]}")
            with openai.OpenAI(base_url=url.group(), api_key="none", max_retries=0, timeout=SECONDS) as client:
                yield process, client
        finally:
            process.kill()


def ended(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    """Exit code after a signal, and what was said on stderr."""
    process.send_signal(number)
    error = process.communicate(timeout=SECONDS)[1]
    return process.returncode, error


def ask(client: Any, messages: list[Any], **fields: Any) -> tuple[str, Any]:
    """One streamed turn: the answer, and the details of its prompt."""
    messages_so_far = list(messages)
    text, details = "", None
    stream = client.chat.completions.create(
        messages=messages_so_far, stream=True, stream_options={"include_usage": True}, **{**GREEDY, **fields}
    )
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        details = chunk.usage.prompt_tokens_details if chunk.usage is not None else details
    return text, details


def talk(client: Any, **fields: Any) -> tuple[list[str], list[Any]]:
    """A conversation; all answers, and details of all prompts."""
    messages: list[Any] = [{"role": "system", "content": "You are a cache and remember everything."}]
    answers, details = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        text, detail = ask(client, messages, **fields)
        messages.append({"role": "assistant", "content": text})
        answers.append(text)
        details.append(detail)
    return answers, details


def test_a_chat_sees_cached_tokens_grow_and_find_them_on_disk_after_a_restart(tmp_path: Path) -> None:
    store = ("--store", str(tmp_path / "store"))
    with served(*store) as (process, client):
        answers, details = talk(client)
        cached = [detail.cached_tokens for detail in details]
        assert cached[0] == 0 and cached == sorted(set(cached))
        assert [model.id for model in client.models.list()] == ["random"]
        assert ended(process, signal.SIGTERM) == (0, "closing the cache ...\n")
    with served(*store) as (process, client):
        again, details = talk(client)
        assert again == answers
        first = details[0]
        assert first.cached_tokens > 0 and first.cached_tokens_by_tier["storage"] == first.cached_tokens
        assert ended(process, signal.SIGINT) == (0, "closing the cache ...\n")


def test_what_the_client_raises_and_what_it_may_send() -> None:
    with served("--name", "mine", "--set", "tiers.0.size=512 tokens", "--policy", "lpm") as (process, client):
        hello = [{"role": "user", "content": "Hello"}]
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="other", messages=hello)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(model="mine", prompt="a" * 600)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
        with pytest.raises(openai.BadRequestError) as several:
            client.chat.completions.create(model="mine", messages=hello, n=2)
        assert several.value.param == "n"
        answer = client.completions.create(
            model="mine",
            prompt=["Hello", "World"],
            max_tokens=4,
            logprobs=1,
            seed=1,
            stop=["never"],
            extra_body={"cache_salt": "me", "session_id": None, "priority": 1, "ignore_eos": True},
        )
        assert [choice.index for choice in answer.choices] == [0, 1] and answer.usage.completion_tokens == 8
        assert [len(choice.logprobs.tokens) for choice in answer.choices] == [4, 4]
        assert ended(process, signal.SIGTERM)[0] == 0


def test_two_signals_in_the_middle_of_a_stream_end_it_with_an_error() -> None:
    hello = [{"role": "user", "content": QUESTIONS[0]}]
    with served() as (process, client):
        stream = client.chat.completions.create(messages=hello, stream=True, **{**GREEDY, "max_tokens": 4000})
        next(stream)
        process.send_signal(signal.SIGINT)
        with pytest.raises(OSError):  # soon nobody else gets in
            while True:
                socket.create_connection((client.base_url.host, client.base_url.port), SECONDS).close()
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            for _ in stream:
                pass
        assert process.communicate(timeout=SECONDS)[1] == "closing the cache ...\n"
        assert process.returncode == 0
