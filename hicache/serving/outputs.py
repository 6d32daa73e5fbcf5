"""What goes into the engine and what comes out of it: requests, tokens, and a handle that collects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from hicache.errors import BadInput, HiCacheError
from hicache.hashing import RequestNamespace
from hicache.serving.metrics import RequestMetrics
from hicache.serving.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why an answer ended: a stop token or string, `max_tokens`, the caller, or something that went wrong."""

MAX_TOP_LOGPROBS = 20


class EngineStopped(HiCacheError):
    """The engine was closed, or its thread has ended with an error; it takes no more requests."""


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be continued by at most `max_tokens` tokens.

    Requests of different `namespace` (tenant, adapter) share nothing. A higher `priority` goes first and may push
    out a lower one. The answer ends with one of the model's end tokens unless `ignore_eos`, with one of
    `sampling.stop_ids`, or before one of the strings `stop`, which needs a tokenizer. `top_logprobs` likeliest
    tokens are reported with each token; 0 reports the chosen one only, None nothing. `rid` names the request;
    the engine chooses a name where it is None. Raises BadInput for values out of range.
    """

    prompt: Sequence[int]
    max_tokens: int = 16
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rid: str | None = None
    namespace: RequestNamespace = field(default_factory=RequestNamespace)
    priority: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise BadInput("prompt: it is empty")
        if self.max_tokens < 1:
            raise BadInput(f"max_tokens is {self.max_tokens}, it must be at least 1")
        if "" in self.stop:
            raise BadInput("stop: the empty string would end every answer")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise BadInput(f"top_logprobs is {self.top_logprobs}, it must be 0 to {MAX_TOP_LOGPROBS}")


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities before temperature: of the chosen token, and of the likeliest ones."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenOutput:
    """What a step brought for one request: a token, the end, or both.

    `text` is what became certain: it may lag behind the tokens while a character or a stop string is incomplete.
    `token` is None where the request ended without one; then `error` may say why. The last output of a request
    has a `finish_reason` and its `metrics`.
    """

    rid: str
    token: int | None
    text: str = ""
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(eq=False)
class GenerationHandle:
    """Everything that has come out of a request so far."""

    rid: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, output: TokenOutput) -> None:
        """Add what a step brought."""
        if output.token is not None:
            self.token_ids.append(output.token)
        if output.logprobs is not None:
            self.logprobs.append(output.logprobs)
        self.text += output.text
        self.finish_reason, self.error, self.metrics = output.finish_reason, output.error, output.metrics


def logprobs_of(logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities under `logits`, float32 (vocab,): of `token`, and of the `count` likeliest in their order."""
    values = torch.log_softmax(logits, -1)
    best = torch.topk(values, min(count, len(values)))
    return TokenLogprobs(float(values[token]), tuple(zip(best.indices.tolist(), best.values.tolist())))
