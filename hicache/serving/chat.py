"""From a conversation to the text of a prompt.

The model's own jinja template is used where it has one, in the environment that transformers gives it. Else ChatML
(Qwen, SmolLM2) or Llama 3's format, whichever control tokens the vocabulary has; else the contents alone, a line each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hicache.errors import BadInput
from hicache.serving.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class Message:
    """One turn; `role` is system, user, assistant or tool. `more` is what else a template may look at: the assistant's
    `tool_calls`, the `name` or `tool_call_id` of a tool's result."""

    role: str
    content: str
    more: Mapping[str, Any] = field(default_factory=dict)

    def for_template(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **self.more}

    def text(self) -> str:
        """The content, with tool calls behind it in the form of Hermes and Qwen, for formats that know none."""
        calls = [
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
            for call in self.more.get("tool_calls", ())
        ]
        return "\n".join([*filter(None, [self.content]), *calls]) if calls else self.content


@dataclass(frozen=True)
class ChatFormat:
    """A model's jinja template, and its special tokens by the names that a template has for them: bos_token, ..."""

    template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def render_chat(messages: Sequence[Message], tokenizer: Tokenizer, chat: ChatFormat) -> str:
    """Text up to where the assistant's answer begins, to be encoded without further control tokens.

    Control tokens written in a message are not escaped: whoever writes messages is trusted with the whole prompt.
    Raises BadInput without messages and if the template refuses them.
    """
    if not messages:
        raise BadInput("messages: the conversation is empty")
    if chat.template is not None:
        return _from_template(chat.template, messages, chat.special_tokens)
    if tokenizer.token_id("<|im_start|>") is not None:
        return _chatml(messages)
    if tokenizer.token_id("<|start_header_id|>") is not None:
        return _llama3(messages)
    return "".join(f"{message.text()}\n" for message in messages)


def _chatml(messages: Sequence[Message]) -> str:
    turns = [f"<|im_start|>{message.role}\n{message.text()}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def _llama3(messages: Sequence[Message]) -> str:
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    turns = [header.format(message.role) + f"{message.text().strip()}<|eot_id|>" for message in messages]
    return "<|begin_of_text|>" + "".join(turns) + header.format("assistant")


def _from_template(template: str, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> str:
    """As transformers' apply_chat_template: without tools and documents both are none, not undefined."""
    try:
        return _compiled(template).render(
            messages=[message.for_template() for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
        )
    except BadInput:
        raise
    except Exception as error:  # a template is a program, and may raise whatever Python does
        raise BadInput(f"messages: the chat template fails: {error}") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    """In the environment that templates are written for: `_compile_jinja_template` of transformers."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} marks what an assistant said, for training: here it is its body."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own form

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own filter escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(reason: str) -> str:
    raise BadInput(f"messages: {reason}")
