"""From a body to what the engine is asked for."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from hicache.hashing import RequestNamespace
from hicache.serving.chat import ChatFormat, Message, render_chat
from hicache.serving.http.bodies import ChatBody, CompletionBody, RequestBody
from hicache.serving.http.errors import ApiError, refused
from hicache.serving.http.sessions import SessionKey, Sessions
from hicache.serving.outputs import GenerationHandle, GenerationRequest
from hicache.serving.sampling import SamplingParams
from hicache.serving.tokenizer import Tokenizer, decode

DEFAULT_TEMPERATURE = 1.0
DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_CHAT_TOKENS = 1024
TOKEN_BYTES = 256
"""No token stands for more text, so text far beyond the limit needs no tokenizer to be refused."""

_SEEDS = 1 << 64


@dataclass(frozen=True)
class Served:
    """The model that is served: its name for clients, and how its text becomes tokens.

    `max_tokens` is the longest prompt with its answer. `created` is in seconds since 1970.
    """

    name: str
    tokenizer: Tokenizer | None
    chat: ChatFormat
    max_tokens: int
    created: int = 0

    def check_name(self, name: str | None) -> None:
        """Raise ApiError 404 unless this is the model that is asked for; None is."""
        if name not in (None, self.name):
            message = f"the model {name!r} does not exist; this server has {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")


@dataclass(frozen=True)
class Prompt:
    """One prompt, as text (None if it came as tokens) and as tokens."""

    text: str | None
    tokens: Sequence[int]


_ROLES = {"developer": "system", "function": "tool"}
"""Newer and older names of what templates know."""


class Prompts:
    """Turns bodies into requests. Its methods may take a while; one thread at a time calls them."""

    def __init__(self, served: Served, sessions: Sessions) -> None:
        self._served = served
        self._sessions = sessions

    def of_chat(self, body: ChatBody) -> list[Prompt]:
        """The conversation as one prompt. Raises ApiError or BadInput."""
        messages = [Message(_ROLES.get(m.role, m.role), m.text, m.more) for m in body.messages]
        text = render_chat(messages, self._tokenizer("messages"), self._served.chat)
        return [self._cut(text, body, "messages", special=False)]

    def of_completion(self, body: CompletionBody) -> list[Prompt]:
        """Each prompt of the body. Raises ApiError."""
        prompts = body.prompts()
        if body.session_id is not None and len(prompts) > 1:
            raise refused("session_id is for one prompt at a time", "session_id")
        return [
            self._cut(prompt, body, "prompt", special=True) if isinstance(prompt, str) else Prompt(None, prompt)
            for prompt in prompts
        ]

    def requests(self, body: RequestBody, prompts: Sequence[Prompt], name: str) -> list[GenerationRequest]:
        """What the engine is asked for; `name` is the beginning of the requests' names. Raises ApiError or BadInput."""
        chat = isinstance(body, ChatBody)
        sampling = SamplingParams(
            temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
            top_k=body.top_k or 0,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=(secrets.randbits(63) if body.seed is None else body.seed) % _SEEDS,
            stop_ids=frozenset(body.stop_token_ids or ()),
        )
        default = DEFAULT_CHAT_TOKENS if chat else DEFAULT_COMPLETION_TOKENS
        return [
            GenerationRequest(
                prompt=prompt.tokens,
                max_tokens=self._answer_tokens(len(prompt.tokens), body.answer_tokens, default, chat) or 1,
                sampling=sampling,
                rid=f"{name}-{index}",
                namespace=RequestNamespace(salt=body.cache_salt),
                priority=body.priority or 0,
                stop=body.stops,
                ignore_eos=bool(body.ignore_eos),
                top_logprobs=_top_logprobs(body),
            )
            for index, prompt in enumerate(prompts)
        ]

    def remember(self, body: RequestBody, prompt: Prompt, answer: GenerationHandle) -> None:
        """Keep what was said in the body's session, if it has one and the answer's tokens are all of its text."""
        key, tokenizer = session_of(body), self._served.tokenizer
        if key is None or tokenizer is None or prompt.text is None or answer.finish_reason not in ("stop", "length"):
            return
        said = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
        if decode(tokenizer, said) == answer.text:
            self._sessions.remember(key, prompt.text + answer.text, [*prompt.tokens, *said])

    def _cut(self, text: str, body: RequestBody, param: str, special: bool) -> Prompt:
        tokenizer, key = self._tokenizer(param), session_of(body)
        if (least := len(text) // TOKEN_BYTES) > self._served.max_tokens:
            raise self._too_long(f"this is more than {least}", param)
        said = self._sessions.recall(key, text) if key is not None else None
        if said is None:
            return Prompt(text, tokenizer.encode(text, special))
        return Prompt(text, [*said.tokens, *tokenizer.encode(text[len(said.text) :], False)])

    def _tokenizer(self, param: str) -> Tokenizer:
        if self._served.tokenizer is None:
            raise refused("this model has no tokenizer: send prompt as token ids", param)
        return self._served.tokenizer

    def _answer_tokens(self, prompt: int, asked: int | None, default: int, chat: bool) -> int:
        room = self._served.max_tokens - prompt
        if room < (asked or 1):
            param = "messages" if chat else "prompt"
            total = f"{prompt} in the {param}, {asked or 1} for the answer"
            raise self._too_long(f"this is {prompt + (asked or 1)} ({total})", param)
        return asked if asked is not None else min(default, room)

    def _too_long(self, found: str, param: str) -> ApiError:
        longest = f"the longest prompt with its answer is {self._served.max_tokens} tokens here"
        return refused(f"{longest}, and {found}: send less or ask for less", param, "context_length_exceeded")


def session_of(body: RequestBody) -> SessionKey | None:
    """The session that a body belongs to."""
    return None if body.session_id is None else (body.cache_salt, body.session_id)


def _top_logprobs(body: RequestBody) -> int | None:
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionBody) else None
