"""Answers in OpenAI's form: whole, or in pieces."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hicache.serving.http.prompts import Served
from hicache.serving.outputs import GenerationHandle, TokenLogprobs, TokenOutput
from hicache.serving.tokenizer import Tokenizer

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not."""


def usage_of(handles: Sequence[GenerationHandle]) -> Json:
    """Tokens of all sequences of a request; `cached_tokens_by_tier` is an extension, and sums to `cached_tokens`."""
    found = [handle.metrics for handle in handles if handle.metrics is not None]
    prompt, answer = sum(m.prompt_tokens for m in found), sum(m.output_tokens for m in found)
    cached: Counter[str] = Counter()
    for metrics in found:
        cached.update(metrics.cached_tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached.total(), "cached_tokens_by_tier": dict(cached)},
    }


class Answers(ABC):
    """The JSON of one request. `pieces` are what a stream consists of."""

    object_name: str
    piece_name: str

    def __init__(self, name: str, served: Served, wants_usage: bool = False) -> None:
        self._served = served
        self._created = int(time.time())
        self.name = name
        self._wants_usage = wants_usage

    def whole(self, handles: Sequence[GenerationHandle]) -> Json:
        """The answer at once."""
        choices = [self._choice(index, handle) for index, handle in enumerate(handles)]
        return {**self._head(self.object_name), "choices": choices, "usage": usage_of(handles)}

    def first_pieces(self, sequences: int) -> list[Json]:
        """What comes before any text."""
        return []

    def piece(self, index: int, output: TokenOutput) -> Json | None:
        """What a step of the engine brought; None if there is nothing to tell yet."""
        if not (output.text or output.finished or output.logprobs is not None):
            return None
        return self._piece([self._delta(index, output)])

    def last_piece(self, handles: Sequence[GenerationHandle]) -> Json | None:
        """The usage, if it is wanted."""
        return {**self._head(self.piece_name), "choices": [], "usage": usage_of(handles)} if self._wants_usage else None

    def _piece(self, choices: list[Json]) -> Json:
        usage = {"usage": None} if self._wants_usage else {}
        return {**self._head(self.piece_name), "choices": choices, **usage}

    def _head(self, object_name: str) -> Json:
        return {"id": self.name, "object": object_name, "created": self._created, "model": self._served.name}

    @abstractmethod
    def _choice(self, index: int, handle: GenerationHandle) -> Json: ...

    @abstractmethod
    def _delta(self, index: int, output: TokenOutput) -> Json: ...


class ChatAnswers(Answers):
    """Of /v1/chat/completions."""

    object_name = "chat.completion"
    piece_name = "chat.completion.chunk"

    def first_pieces(self, sequences: int) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        head = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in range(sequences)]
        return [self._piece([choice]) for choice in head]

    def _choice(self, index: int, handle: GenerationHandle) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": handle.text, "refusal": None},
            "logprobs": self._logprobs(handle.token_ids, handle.logprobs),
            "finish_reason": handle.finish_reason,
        }

    def _delta(self, index: int, output: TokenOutput) -> Json:
        tokens, logprobs = _of_output(output)
        return {
            "index": index,
            "delta": {"content": output.text} if output.text else {},
            "logprobs": self._logprobs(tokens, logprobs),
            "finish_reason": output.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json | None:
        if not logprobs:
            return None
        content = [
            {
                **self._chance(token, found.chosen),
                "top_logprobs": [self._chance(other, value) for other, value in found.top],
            }
            for token, found in zip(tokens, logprobs)
        ]
        return {"content": content, "refusal": None}

    def _chance(self, token: int, logprob: float) -> Json:
        name, raw = token_name(self._served.tokenizer, token)
        return {"token": name, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}


class CompletionAnswers(Answers):
    """Of /v1/completions. Text offsets count the characters of the answer that were out before a token."""

    object_name = "text_completion"
    piece_name = "text_completion"

    def __init__(self, name: str, served: Served, wants_usage: bool = False) -> None:
        super().__init__(name, served, wants_usage)
        self._offsets: Counter[int] = Counter()

    def _choice(self, index: int, handle: GenerationHandle) -> Json:
        logprobs = self._logprobs(0, handle.token_ids, handle.logprobs)
        return {"index": index, "text": handle.text, "logprobs": logprobs, "finish_reason": handle.finish_reason}

    def _delta(self, index: int, output: TokenOutput) -> Json:
        tokens, logprobs = _of_output(output)
        found = self._logprobs(self._offsets[index], tokens, logprobs)
        self._offsets[index] += sum(len(token_name(self._served.tokenizer, token)[0]) for token in tokens)
        return {"index": index, "text": output.text, "logprobs": found, "finish_reason": output.finish_reason}

    def _logprobs(self, offset: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json | None:
        if not logprobs:
            return None
        names = [token_name(self._served.tokenizer, token)[0] for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": [max(found.chosen, LEAST_LOGPROB) for found in logprobs],
            "top_logprobs": [self._likeliest(found) for found in logprobs],
            "text_offset": list(accumulate(map(len, names[:-1]), initial=offset)),
        }

    def _likeliest(self, found: TokenLogprobs) -> Json:
        return {token_name(self._served.tokenizer, token)[0]: max(value, LEAST_LOGPROB) for token, value in found.top}


def token_name(tokenizer: Tokenizer | None, token: int) -> tuple[str, bytes]:
    """What a token is called and the bytes it stands for; "token_id:N" where those are no text."""
    raw = tokenizer.token_bytes(token) if tokenizer is not None else b""
    try:
        return raw.decode() or f"token_id:{token}", raw
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def _of_output(output: TokenOutput) -> tuple[list[int], list[TokenLogprobs]]:
    tokens = [] if output.token is None else [output.token]
    return tokens, [] if output.logprobs is None else [output.logprobs]
