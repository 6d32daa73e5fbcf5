"""The HTTP endpoint over a tiny model: what is answered, what is refused, and what leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from http_servers import Running, cached, config, events, messages, running
from serving_engines import PAGE, TINY, tiny_model

from hicache.serving.http import app
from hicache.serving.http.service import ServiceOptions
from hicache.serving.outputs import GenerationRequest
from hicache.serving.scheduler import SchedulerOptions
from hicache.serving.setup import plain_engine

STORY = "Once upon a time there was a cache that remembered everything it had ever been told"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One for all tests that leave it as it was."""
    with running() as server:
        yield server


def few(max_running: int, max_waiting: int = 0, grace: float = 30.0) -> ServiceOptions:
    return ServiceOptions(SchedulerOptions(max_running=max_running), max_waiting=max_waiting, grace=grace)


# ---- answers ------------------------------------------------------------------------------------


def test_a_completion_is_what_the_engine_says(server: Running) -> None:
    answer = server.complete(STORY)
    tokens = tiny_model().tokenizer.encode(STORY)  # type: ignore[union-attr]
    engine = plain_engine(tiny_model(), TINY.context)
    expected = engine.generate([GenerationRequest(tokens, 6, ignore_eos=True)])[0]
    engine.close()
    assert answer["object"] == "text_completion" and answer["model"] == "random"
    assert answer["choices"] == [{"index": 0, "text": expected.text, "logprobs": None, "finish_reason": "length"}]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        len(tokens),
        6,
        len(tokens) + 6,
    )
    assert sum(usage["prompt_tokens_details"]["cached_tokens_by_tier"].values()) == cached(answer)


def test_prompts_are_text_or_tokens_one_or_several(server: Running) -> None:
    encode = tiny_model().tokenizer.encode  # type: ignore[union-attr]
    texts = ["A cache", "B cache", "A cache again"]
    alone = [server.complete(text)["choices"][0]["text"] for text in texts]
    for prompt in (texts, [encode(text) for text in texts]):
        answer = server.complete(prompt)
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(alone))
        assert answer["usage"]["completion_tokens"] == 18
    assert server.complete(encode(texts[0]))["choices"][0]["text"] == alone[0]


def test_a_chat_has_roles_parts_and_a_reason(server: Running) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    said = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}]
    answer = server.ask("chat/completions", messages=said, max_tokens=9, max_completion_tokens=3, unknown_field=[1])
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion" and answer["usage"]["completion_tokens"] == 3
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    plain = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    again = server.ask("chat/completions", messages=plain, max_tokens=3)
    assert again["choices"][0]["message"] == choice["message"]


def test_a_stream_is_the_same_answer_in_pieces(server: Running) -> None:
    whole = server.chat("Tell me", max_tokens=12)["choices"][0]["message"]["content"]
    body = {"messages": messages("Tell me"), "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
    response = server.post("chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert response.getheader("content-type", "").startswith("text/event-stream")
    *pieces, usage, done = events(response)
    assert done == "[DONE]"
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}  # type: ignore[index]
    choices = [piece["choices"][0] for piece in pieces]  # type: ignore[index]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12  # type: ignore[index]
    assert len({piece["id"] for piece in [*pieces, usage]}) == 1  # type: ignore[index]
    *_, last, done = events(server.post("chat/completions", body))
    assert "usage" not in last and done == "[DONE]"


def test_several_prompts_stream_side_by_side(server: Running) -> None:
    texts = ["A cache", "B cache"]
    whole = [choice["text"] for choice in server.complete(texts)["choices"]]
    body = {"prompt": texts, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": True}
    found = ["", ""]
    for event in events(server.post("completions", body)):
        for choice in event["choices"] if isinstance(event, dict) else ():
            found[choice["index"]] += choice["text"]
    assert found == whole


def test_stop_strings_and_stop_tokens(server: Running) -> None:
    text = server.complete(STORY, 12, logprobs=0)["choices"][0]
    stop = text["text"][4:6]
    answer = server.complete(STORY, 12, stop=[stop, "never said"])["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (text["text"][: text["text"].index(stop)], "stop")
    assert server.complete(STORY, 12, stop=stop)["choices"][0] == answer
    first = server.complete(STORY, 1, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    token = next(t for t in range(256) if server_name(t) == first[0])
    assert server.complete(STORY, 12, stop_token_ids=[token])["choices"][0]["finish_reason"] == "stop"


def server_name(token: int) -> str:
    from hicache.serving.http.answers import token_name

    return token_name(tiny_model().tokenizer, token)[0]


def test_logprobs(server: Running) -> None:
    found = server.complete(STORY, 3, logprobs=2)["choices"][0]["logprobs"]
    assert [max(top.values()) for top in found["top_logprobs"]] == pytest.approx(found["token_logprobs"])
    assert len(found["tokens"]) == len(found["text_offset"]) == 3
    content = server.chat(STORY, max_tokens=2, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in content] == [item["top_logprobs"][0]["token"] for item in content]
    assert server.chat(STORY, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_the_seed_decides_what_is_drawn(server: Running) -> None:
    one, two, again, free = (
        server.complete(STORY, 12, temperature=1, **seed)["choices"][0]["text"]
        for seed in ({"seed": -1}, {"seed": 2}, {"seed": -1}, {})
    )
    assert one == again and len({one, two, free}) == 3


def test_models(server: Running) -> None:
    status, found = server.get("/v1/models")
    assert status == 200 and [model["id"] for model in found["data"]] == ["random"]
    assert server.get("/v1/models/random") == (200, found["data"][0])
    status, error = server.get("/v1/models/other/model")
    assert (status, error["error"]["code"]) == (404, "model_not_found")


# ---- what the cache had -------------------------------------------------------------------------


def test_cached_tokens_and_salts(server: Running) -> None:
    prompt = STORY + " and a secret"
    assert [cached(server.complete(prompt, cache_salt=salt)) > 0 for salt in ("a", "a", "b", "a")] == [
        False,
        True,
        False,
        True,
    ]
    answer = server.complete(prompt, cache_salt="b", priority=3)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]["device"] == cached(answer)


def test_a_session_goes_on_with_the_tokens_of_the_answer(server: Running) -> None:
    """The tiny model says bytes that are no text; as text they would come back as other tokens."""

    def second_turn(**fields: Any) -> int:
        first = server.chat(STORY, max_tokens=40, **fields)["choices"][0]["message"]["content"]
        assert "�" in first
        return cached(server.chat(STORY, first, "And then?", max_tokens=4, **fields))

    alone, together = second_turn(cache_salt="x"), second_turn(cache_salt="y", session_id="s")
    assert alone // PAGE == (len(STORY) + 1) // PAGE
    assert together >= len(STORY) + 40 - PAGE


def test_a_session_that_says_something_else_begins_anew(server: Running) -> None:
    server.chat("One story", session_id="t", cache_salt="z")
    other = server.chat("Another story", "no", "yes", session_id="t", cache_salt="z")
    assert other["choices"] == server.chat("Another story", "no", "yes")["choices"]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
ASSISTANTS: dict[str, dict[str, Any]] = {
    "null": {"content": None},
    "nothing": {},
    "empty": {"content": ""},
    "no parts": {"content": []},
    "refusal": {"content": None, "refusal": "no"},
    "refusal as a part": {"content": [{"type": "refusal", "refusal": "no"}]},
    "empty lists": {"content": "x", "tool_calls": [], "function_call": None, "audio": None, "annotations": []},
    "calls": {"content": None, "tool_calls": [CALL]},
    "an older call": {"content": None, "function_call": CALL["function"]},
}


@pytest.mark.parametrize("case", ASSISTANTS)
def test_what_an_assistant_has_said_may_be_without_content(server: Running, case: str) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", **ASSISTANTS[case]}]
    if "calls" in case:
        turns.append({"role": "tool", "tool_call_id": "1", "name": "f", "content": "5"})
    body = {"messages": [*turns, {"role": "user", "content": "go on"}], "max_tokens": 2, "seed": 1.0, "stop": None}
    response = server.post(CHAT, body)
    answer = json.load(response)
    assert response.status == 200 and answer["usage"]["completion_tokens"] == 2, answer


def test_no_answer_is_asked_for(server: Running) -> None:
    """The prompt is computed, and found by the next request."""
    prompt = "a prompt that is computed for later " * 3
    first = server.complete(prompt, cache_salt="none", max_tokens=0)
    assert first["choices"][0]["text"] == "" and first["choices"][0]["finish_reason"] == "length"
    assert first["usage"]["completion_tokens"] == 0 and first["usage"]["prompt_tokens"] > len(prompt)
    again = server.complete(prompt, cache_salt="none", max_tokens=4)
    assert cached(again) > 0 and again["usage"]["completion_tokens"] == 4
    chat = server.chat("hi", max_completion_tokens=0)
    assert chat["choices"][0]["message"]["content"] == "" and chat["usage"]["completion_tokens"] == 0


# ---- what is refused ----------------------------------------------------------------------------

CHAT, COMPLETION = "chat/completions", "completions"
REFUSED: dict[str, tuple[str, Any, int, str | None, str | None]] = {
    "not JSON": (CHAT, b'{"messages": [', 400, None, "invalid_json"),
    "not UTF-8": (COMPLETION, b'{"prompt": "\xff"}', 400, None, "invalid_json"),
    "no body": (COMPLETION, b"", 400, None, "invalid_json"),
    "not an object": (CHAT, b"[]", 400, None, None),
    "no prompt": (COMPLETION, {}, 400, "prompt", "missing_parameter"),
    "empty prompt list": (COMPLETION, {"prompt": []}, 400, "prompt", "invalid_value"),
    "empty token list": (COMPLETION, {"prompt": [[]]}, 400, "prompt", "invalid_value"),
    "mixed prompt": (COMPLETION, {"prompt": [1, "a"]}, 400, "prompt[1]", "invalid_value"),
    "token of no vocabulary": (COMPLETION, {"prompt": [10**6]}, 400, "prompt", "invalid_value"),
    "no messages": (CHAT, {"messages": []}, 400, "messages", "invalid_value"),
    "unknown role": (CHAT, {"messages": [{"role": "x", "content": "a"}]}, 400, "messages[0].role", "invalid_value"),
    "image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages[0].content[0].type",
        "invalid_value",
    ),
    "text for a number": (COMPLETION, {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens", "invalid_value"),
    "negative tokens": (COMPLETION, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens", "invalid_value"),
    "half a token": (COMPLETION, {"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens", "invalid_value"),
    "token beyond int32": (COMPLETION, {"prompt": [2**32 + 5]}, 400, "prompt", "invalid_value"),
    "negative token": (COMPLETION, {"prompt": [-1]}, 400, "prompt[0]", "invalid_value"),
    "half a character": (CHAT, b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', 400, None, "invalid_json"),
    "user without content": (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "missing_parameter"),
    "null for a user": (
        CHAT,
        {"messages": [{"role": "user", "content": None}]},
        400,
        "messages[0].content",
        "missing_parameter",
    ),
    "cold": (COMPLETION, {"prompt": "a", "temperature": -1}, 400, "temperature", "invalid_value"),
    "top_p": (COMPLETION, {"prompt": "a", "top_p": 1.5}, 400, "top_p", "invalid_value"),
    "empty stop": (COMPLETION, {"prompt": "a", "stop": ["b", ""]}, 400, "stop[1]", "invalid_value"),
    "empty salt": (COMPLETION, {"prompt": "a", "cache_salt": ""}, 400, "cache_salt", "invalid_value"),
    "several answers": (CHAT, {"messages": messages("a"), "n": 2}, 400, "n", "unsupported_parameter"),
    "echo": (COMPLETION, {"prompt": "a", "echo": True}, 400, "echo", "unsupported_parameter"),
    "penalty": (COMPLETION, {"prompt": "a", "presence_penalty": 1}, 400, "presence_penalty", "unsupported_parameter"),
    "tools": (CHAT, {"messages": messages("a"), "tools": [{}]}, 400, "tools", "unsupported_parameter"),
    "stream options": (COMPLETION, {"prompt": "a", "stream_options": {}}, 400, "stream_options", None),
    "unknown model": (COMPLETION, {"prompt": "a", "model": "gpt"}, 404, "model", "model_not_found"),
    "long prompt": (COMPLETION, {"prompt": "a" * 2000}, 400, "prompt", "context_length_exceeded"),
    "endless prompt": (COMPLETION, {"prompt": "a" * 1_000_000}, 400, "prompt", "context_length_exceeded"),
    "long chat": (CHAT, {"messages": messages("a" * 2000)}, 400, "messages", "context_length_exceeded"),
    "long answer": (COMPLETION, {"prompt": "a", "max_tokens": 5000}, 400, "prompt", "context_length_exceeded"),
    "session of two": (COMPLETION, {"prompt": ["a", "b"], "session_id": "s"}, 400, "session_id", None),
    "too many prompts": (COMPLETION, {"prompt": ["a"] * 400}, 400, "prompt", None),
    "huge body": (COMPLETION, b'{"prompt": "' + b"a" * (9 << 20) + b'"}', 413, None, "request_too_large"),
    "no such path": ("nothing", {}, 404, None, "not_found"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_are_told_what_is_wrong(server: Running, case: str) -> None:
    path, body, status, param, code = REFUSED[case]
    response = server.post(path, body)
    error = json.load(response)["error"]
    assert (response.status, error["param"], error["code"]) == (status, param, code), error
    assert error["type"] == "invalid_request_error" and error["message"]
    assert server.service.gateway.active == 0


def test_a_bad_stream_has_a_status(server: Running) -> None:
    response = server.post(COMPLETION, {"prompt": "a" * 2000, "stream": True})
    assert response.status == 400 and json.load(response)["error"]["code"] == "context_length_exceeded"


def test_other_methods(server: Running) -> None:
    status, body = server.get("/v1/completions")
    assert (status, body["error"]["code"]) == (405, "method_not_allowed")


# ---- clients that go ----------------------------------------------------------------------------


def test_a_client_that_goes_in_the_middle_harms_nobody() -> None:
    long = {"prompt": STORY, "max_tokens": 600, "temperature": 0, "ignore_eos": True, "stream": True}
    with running() as server:
        expected = server.complete("Somebody else", 40)["choices"]
        with ThreadPoolExecutor(1) as other:
            response = server.post(COMPLETION, long)
            next(events(response))
            answer = other.submit(server.complete, "Somebody else", 40)
            response.close()
            assert answer.result()["choices"] == expected
        assert server.aborted.get(timeout=60)
        assert server.settle() == {"length": 2, "abort": 1}
        assert server.service.gateway.active == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_while_it_waits_is_never_served(stream: bool) -> None:
    body = {"prompt": STORY, "max_tokens": 20, "stream": stream}
    with running() as server:
        with server.held():
            connection = server.connect()
            connection.request("POST", "/v1/completions", json.dumps(body))
            rid = server.submitted.get(timeout=60)
            connection.close()
            assert server.aborted.get(timeout=60) == rid
        assert server.settle() == {"abort": 1}
        assert server.engine.call(lambda engine: engine.metrics.output_tokens) == 0


def test_a_client_that_goes_before_its_body_has_come(server: Running) -> None:
    connection = server.connect()
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-length", "100")
    connection.endheaders(b'{"prompt"')
    connection.close()
    assert server.complete("still there")["choices"]


def test_a_body_that_does_not_come_is_not_waited_for(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.01)
    connection = server.connect()
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-length", "100")
    connection.endheaders(b'{"prompt"')
    response = connection.getresponse()
    assert (response.status, response.getheader("connection")) == (408, "close")
    assert json.load(response)["error"]["code"] == "timeout"


# ---- many clients -------------------------------------------------------------------------------


def test_a_full_queue_says_come_again() -> None:
    with running(options=few(max_running=1, max_waiting=1)) as server, ThreadPoolExecutor(2) as clients:
        with server.held():
            waiting = [clients.submit(server.complete, f"Client {number}") for number in range(2)]
            for _ in waiting:
                server.submitted.get(timeout=60)
            response = server.post(COMPLETION, {"prompt": "One more"})
            error = json.load(response)["error"]
            assert (response.status, error["type"], error["code"]) == (503, "server_error", "overloaded")
            assert int(response.getheader("retry-after", "0")) > 0
        assert all(answer.result()["choices"] for answer in waiting)
        assert server.complete("One more")["choices"]


def test_two_hundred_at_once_get_what_they_get_alone() -> None:
    prompts = [f"{'A shared beginning. ' * (number % 3)}Client {number % 50} asks" for number in range(200)]
    with running(config(device=100, host=300)) as server:
        alone = {prompt: server.complete(prompt, 8)["choices"] for prompt in sorted(set(prompts))}
        with ThreadPoolExecutor(200) as clients:
            answers = list(clients.map(lambda prompt: server.complete(prompt, 8), prompts))
        assert [answer["choices"] for answer in answers] == [alone[prompt] for prompt in prompts]
        assert server.settle() == {"length": 200 + len(alone)}
        assert server.service.gateway.active == 0


# ---- the end ------------------------------------------------------------------------------------


def test_a_stream_is_finished_within_the_grace(tmp_path: Path) -> None:
    body = {"prompt": STORY, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    with running(config(disk=tmp_path / "store")) as server:
        found = events(server.post(COMPLETION, body))
        next(found)
        server.service.stop()
        *_, last, done = found
        assert last["choices"][0]["finish_reason"] == "length" and done == "[DONE]"  # type: ignore[index]
        assert server.ended() and server.settle() == {"length": 1}
    with running(config(disk=tmp_path / "store")) as server:
        tiers = server.complete(STORY)["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
        assert tiers["storage"] >= len(STORY) // PAGE * PAGE - PAGE


def test_without_grace_a_stream_ends_with_an_error_and_the_disk_has_what_was_computed(tmp_path: Path) -> None:
    body = {"prompt": STORY, "max_tokens": 600, "temperature": 0, "ignore_eos": True, "stream": True}
    with running(config(disk=tmp_path / "store")) as server:
        found = events(server.post(COMPLETION, body))
        next(found)
        server.service.stop()
        server.service.stop()
        *_, last, done = found
        assert last["error"]["code"] == "shutting_down" and done == "[DONE]"  # type: ignore[index]
        assert server.ended() and server.settle() == {"abort": 1}
    with running(config(disk=tmp_path / "store")) as server:
        assert cached(server.complete(STORY)) >= len(STORY) // PAGE * PAGE - PAGE


def test_who_waits_at_the_end_gets_a_503() -> None:
    with running(options=few(max_running=1, max_waiting=4)) as server, ThreadPoolExecutor(1) as clients:
        with server.held():
            waiting = clients.submit(server.post, COMPLETION, {"prompt": STORY})
            rid = server.submitted.get(timeout=60)
            server.service.stop()
            server.service.stop()
            assert server.aborted.get(timeout=60) == rid
        response = waiting.result()
        assert (response.status, json.load(response)["error"]["code"]) == (503, "shutting_down")
        assert response.getheader("retry-after") is not None


def test_an_engine_that_fails_ends_the_server() -> None:
    with running() as server:

        def fail(*_: object) -> None:
            raise MemoryError("no memory")

        server.engine.call(lambda engine: setattr(engine.model, "forward", fail))
        response = server.post(COMPLETION, {"prompt": STORY})
        assert response.status == 500 and "no memory" in json.load(response)["error"]["message"]
        assert server.ended() and "no memory" in str(server.failure)


# ---- health -------------------------------------------------------------------------------------


def test_health_without_and_with_a_disk(tmp_path: Path, server: Running) -> None:
    status, found = server.get("/health")
    assert (status, found["status"], found["storage"], found["model"]) == (200, "ok", None, "random")
    assert found["engine"]["running"] == found["engine"]["active"] == 0
    with running(config(disk=tmp_path / "store")) as other:
        other.complete(STORY)
        other.settle()
        storage = other.get("/health")[1]["storage"]
        assert (storage["loads"], storage["stores"]) == ("on", "on") and storage["pages"] > 0
