"""From a conversation to the text of a prompt.

The model's own jinja template is used where it has one and jinja2 is installed. Else ChatML (Qwen, SmolLM2) or
Llama 3's format, whichever control tokens the vocabulary has; else the contents alone, a line each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from hicache.errors import BadInput
from hicache.serving.tokenizer import Tokenizer


@dataclass(frozen=True)
class Message:
    """One turn; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class ChatFormat:
    """A model's jinja template, and the names of the tokens that it may print."""

    template: str | None = None
    bos_token: str = ""
    eos_token: str = ""


def render_chat(messages: Sequence[Message], tokenizer: Tokenizer, chat: ChatFormat) -> str:
    """Text up to where the assistant's answer begins, to be encoded without further control tokens.

    Control tokens written in a message are not escaped: whoever writes messages is trusted with the whole prompt.
    Raises BadInput without messages and if the template refuses them.
    """
    if not messages:
        raise BadInput("messages: the conversation is empty")
    jinja = _jinja() if chat.template is not None else None
    if jinja is not None and chat.template is not None:
        return _from_template(jinja, messages, chat)
    if tokenizer.token_id("<|im_start|>") is not None:
        return _chatml(messages)
    if tokenizer.token_id("<|start_header_id|>") is not None:
        return _llama3(messages)
    return "".join(f"{message.content}\n" for message in messages)


def _chatml(messages: Sequence[Message]) -> str:
    turns = [f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def _llama3(messages: Sequence[Message]) -> str:
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    turns = [header.format(message.role) + f"{message.content.strip()}<|eot_id|>" for message in messages]
    return "<|begin_of_text|>" + "".join(turns) + header.format("assistant")


def _jinja() -> Any | None:
    try:
        return import_module("jinja2.sandbox"), import_module("jinja2")
    except ImportError:
        return None


def _from_template(jinja: Any, messages: Sequence[Message], chat: ChatFormat) -> str:
    sandbox, errors = jinja
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    try:
        rendered: str = environment.from_string(chat.template).render(
            messages=[asdict(message) for message in messages],
            add_generation_prompt=True,
            bos_token=chat.bos_token,
            eos_token=chat.eos_token,
        )
    except errors.TemplateError as error:
        raise BadInput(f"messages: the chat template fails: {error}") from error
    return rendered


def _refuse(reason: str) -> str:
    raise BadInput(f"messages: {reason}")
