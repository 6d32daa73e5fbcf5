"""Bodies of requests. Unknown fields are ignored; known ones that would change the answer are obeyed or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from hicache.serving.http.errors import ApiError, refused
from hicache.serving.outputs import MAX_TOP_LOGPROBS

MAX_STOPS = 16
UNSUPPORTED = "unsupported_parameter"
_PRIORITIES = 1 << 31


def _whole(value: object) -> object:
    """JSON has one kind of number: 1.0 is an integer, too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Integer, Field(ge=0)]
Priority = Annotated[int, Field(ge=-_PRIORITIES, lt=_PRIORITIES)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
StopString = Annotated[str, Field(min_length=1)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
TokenId = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]  # with one wrong item, there may be a million
TokenLists = Annotated[list[Tokens], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None


class RequestBody(_Body):
    """What both endpoints take. None, or a field left out, is OpenAI's default.

    `cache_salt`, `session_id`, `priority`, `top_k`, `ignore_eos` and `stop_token_ids` are extensions.
    """

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Integer | None = None
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Integer | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None

    cache_salt: Name | None = None
    session_id: Name | None = None
    priority: Priority | None = None
    top_k: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Tokens | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def answer_tokens(self) -> int | None:
        """The longest answer that the client asks for; 0: it wants the prompt to be computed, and no answer."""
        return self.max_tokens

    def check(self) -> None:
        """Raise ApiError for what is understood and cannot be done."""
        if self.n not in (None, 1):
            raise refused(f"n is {self.n}: one answer per prompt is given, ask again for more", "n", UNSUPPORTED)
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options has no effect without stream: true", "stream_options")
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise unsupported(name)


class CompletionBody(RequestBody):
    """POST /v1/completions. `logprobs` is the number of likeliest tokens to report with each one."""

    prompt: str | Annotated[Tokens | Texts | TokenLists, Field(min_length=1)]
    logprobs: Logprobs | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        for name in ("echo", "suffix"):
            if getattr(self, name):
                raise unsupported(name)
        if self.best_of not in (None, 1):
            raise refused(f"best_of is {self.best_of}: one answer per prompt is given", "best_of", UNSUPPORTED)

    def prompts(self) -> list[str | list[int]]:
        """Each has an answer of its own."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class TextPart(_Body):
    type: Literal["text"]
    text: str


class RefusalPart(_Body):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class FunctionCall(_Body):
    name: str
    arguments: str


class ToolCall(_Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Templates write arguments as JSON themselves: they get the object, as transformers documents it."""
        try:
            arguments = json.loads(self.function.arguments)
        except ValueError:
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {**({"id": self.id} if self.id is not None else {}), "type": self.type, "function": function}


Parts = Annotated[list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]], Field(fail_fast=True)]


class MessageBody(_Body):
    """One turn. An assistant's may be without content: it called tools, or refused, or said nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Parts | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if self.content is None:
            return self.refusal or ""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def more(self) -> dict[str, Any]:
        """What templates may look at besides role and content."""
        calls = list(self.tool_calls or ())
        if self.function_call is not None:  # the older form of the same
            calls.append(ToolCall(function=self.function_call))
        found: dict[str, Any] = {"tool_calls": [call.for_template() for call in calls]} if calls else {}
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        return {**found, **{name: value for name, value in named.items() if value is not None}}


class ChatBody(RequestBody):
    """POST /v1/chat/completions. `max_completion_tokens` is the newer name of `max_tokens`, and comes first."""

    messages: Annotated[list[MessageBody], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def answer_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def check(self) -> None:
        super().check()
        for index, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                place = f"messages[{index}].content"
                raise refused(f"{place}: Field required for role {message.role}", place, "missing_parameter")
        for name in ("tools", "functions"):
            if getattr(self, name):
                raise unsupported(name)
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise unsupported("response_format")
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs needs logprobs: true", "top_logprobs")


AnyBody = TypeVar("AnyBody", bound=RequestBody)


def unsupported(name: str) -> ApiError:
    """For a field that would change the answer, and cannot."""
    return refused(f"{name} is not supported: leave it out", name, UNSUPPORTED)


def parse_body(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """A checked body. Raises ApiError that names the field."""
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise _from_details(error.errors(include_url=False, include_context=False)) from None
    body.check()
    return body


def _from_details(details: Sequence[ErrorDetails]) -> ApiError:
    """Of several the deepest: with unions, the one that was meant."""
    detail = max(details, key=_depth)
    if detail["type"] == "json_invalid":
        return refused(
            f"the body is not valid JSON: {detail['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json"
        )
    if not detail["loc"]:
        return refused(f"the body should be a JSON object: {detail['msg']}")
    param = _param(detail["loc"])
    if detail["type"] == "union_tag_invalid":  # a part of a kind that this server has not
        return refused(f"{param}.type: should be 'text' or 'refusal'", f"{param}.type", "invalid_value")
    message = detail["msg"].removeprefix("Input ")
    return refused(
        f"{param}: {message}", param, "missing_parameter" if detail["type"] == "missing" else "invalid_value"
    )


def _depth(detail: ErrorDetails) -> tuple[int, bool]:
    return sum(isinstance(part, int) for part in detail["loc"]), detail["type"] == "too_short"


def _param(loc: Sequence[int | str]) -> str:
    """messages[1].content, without the names of the alternatives that pydantic tried."""
    parts = [part for part in loc if isinstance(part, int) or part.isidentifier()]
    named = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts if part not in _ALTERNATIVES]
    return "".join(named).removeprefix(".")


_ALTERNATIVES = {"str", "int", "float", "bool", "constrained"}
