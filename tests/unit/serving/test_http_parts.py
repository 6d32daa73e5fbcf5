"""Parts of the HTTP endpoint that need no server: bodies, sessions, names of tokens, prompts of models without text."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hicache.serving.chat import ChatFormat
from hicache.serving.http.answers import ChatAnswers, token_name, usage_of
from hicache.serving.http.bodies import ChatBody, CompletionBody, parse_body
from hicache.serving.http.errors import ApiError, overloaded
from hicache.serving.http.prompts import Prompt, Prompts, Served
from hicache.serving.http.sessions import Sessions
from hicache.serving.outputs import GenerationHandle, TokenLogprobs, TokenOutput
from hicache.serving.tokenizer import ByteTokenizer


def completion(text: str) -> CompletionBody:
    return parse_body(CompletionBody, text.encode())


def served(tokenizer: ByteTokenizer | None) -> Served:
    return Served("m", tokenizer, ChatFormat(), 100)


# ---- bodies -------------------------------------------------------------------------------------


def test_nulls_and_unknown_fields_are_as_if_left_out() -> None:
    body = completion('{"prompt": "a", "n": null, "stop": null, "temperature": 1, "logit_bias": {}, "user": "me"}')
    assert (body.stops, body.temperature, body.prompts()) == ((), 1.0, ["a"])


def test_the_newer_name_of_max_tokens_comes_first() -> None:
    raw = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "max_completion_tokens": 7}'
    assert parse_body(ChatBody, raw).answer_tokens == 7


@pytest.mark.parametrize("items", [b"-1,", b'"a",'])
def test_a_million_wrong_items_are_one_error(items: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionBody, b'{"prompt": [1,' + items * 1_000_000 + b"1]}")
    assert caught.value.param == "prompt[1]"


def test_errors_have_openai_form_and_only_the_busy_say_when_to_come_again() -> None:
    error = overloaded("full")
    assert error.body() == {"error": {"message": "full", "type": "server_error", "param": None, "code": "overloaded"}}
    assert error.headers["retry-after"].isdecimal() and ApiError(400, "no").headers == {}


# ---- sessions -----------------------------------------------------------------------------------


def test_a_session_is_recalled_by_what_begins_with_it() -> None:
    sessions = Sessions()
    sessions.remember((None, "s"), "abc", [1, 2])
    said = sessions.recall((None, "s"), "abcd")
    assert said is not None and list(said.tokens) == [1, 2]
    assert sessions.recall((None, "s"), "ab") is None
    assert sessions.recall(("salt", "s"), "abcd") is None


def test_the_session_that_was_silent_longest_is_forgotten() -> None:
    sessions = Sessions(max_sessions=2, max_tokens=10)
    for name in "abca":
        sessions.remember((None, name), name, [1] * 4)
    assert [sessions.recall((None, name), name) is not None for name in "abc"] == [True, False, True]
    sessions.remember((None, "d"), "d", [1] * 10)
    assert len(sessions) == 1
    sessions.remember((None, "e"), "e", [1] * 11)
    assert len(sessions) == 0


@pytest.mark.parametrize(
    ("tokens", "text", "reason", "kept"),
    [
        (list(b"yes"), "yes", "length", list(b"pyes")),
        ([*b"yes", ByteTokenizer.EOS], "yes", "stop", list(b"pyes")),
        (list(b"yes!"), "ye", "stop", None),  # a stop string
        (list(b"yes"), "yes", "abort", None),
    ],
)
def test_only_answers_whose_tokens_are_all_of_their_text_are_kept(
    tokens: list[int], text: str, reason: str, kept: list[int] | None
) -> None:
    sessions = Sessions()
    prompts = Prompts(served(ByteTokenizer()), sessions)
    answer = GenerationHandle("r", tokens, text, finish_reason=reason)  # type: ignore[arg-type]
    prompts.remember(completion('{"prompt": "p", "session_id": "s"}'), Prompt("p", list(b"p")), answer)
    said = sessions.recall((None, "s"), f"p{text}more")
    assert (None if said is None else list(said.tokens)) == kept


# ---- prompts and answers ------------------------------------------------------------------------


def test_a_model_without_tokenizer_takes_token_ids_only() -> None:
    prompts = Prompts(served(None), Sessions())
    assert prompts.of_completion(completion('{"prompt": [1, 2]}')) == [Prompt(None, [1, 2])]
    with pytest.raises(ApiError, match="token ids"):
        prompts.of_completion(completion('{"prompt": "text"}'))


def test_an_answer_of_unnamed_length_fills_what_room_there_is() -> None:
    prompts = Prompts(served(ByteTokenizer()), Sessions())
    body = completion('{"prompt": [1]}')
    lengths = [prompts.requests(body, [Prompt(None, [1] * size)], "r")[0].max_tokens for size in (1, 90, 99)]
    assert lengths == [16, 10, 1]
    with pytest.raises(ApiError) as caught:
        prompts.requests(body, [Prompt(None, [1] * 100)], "r")
    assert caught.value.code == "context_length_exceeded"


@dataclass
class OneToken:
    raw: bytes
    vocab_size = 1

    def encode(self, text: str, special: bool = True) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        return self.raw

    def token_id(self, content: str) -> int | None:
        return None


def test_tokens_without_text_have_names() -> None:
    assert token_name(OneToken(b"caf\xc3\xa9"), 5)[0] == "café"
    assert token_name(OneToken(b"\xc3"), 5) == ("bytes:\\xc3", b"\xc3")
    assert token_name(OneToken(b""), 5)[0] == token_name(None, 5)[0] == "token_id:5"


def test_impossible_tokens_have_a_logprob_that_json_knows() -> None:
    answers = ChatAnswers("r", served(ByteTokenizer()))
    piece = answers.piece(0, TokenOutput("r", 65, logprobs=TokenLogprobs(-float("inf"))))
    assert piece is not None
    assert piece["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    assert answers.piece(0, TokenOutput("r", 65)) is None
    assert usage_of([])["total_tokens"] == 0
