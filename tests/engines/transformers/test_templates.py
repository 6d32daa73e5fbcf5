# ruff: noqa: E501 - templates are as their models have them
"""Chat templates are rendered as transformers renders them, character by character."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from hicache.serving.chat import ChatFormat, Message, render_chat
from hicache.serving.tokenizer import ByteTokenizer

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü < 2"}}}
CONVERSATIONS = {
    "one": [Message("user", " Grüße & <b>\n")],
    "turns": [
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "Hello."),
        Message("user", "?"),
    ],
    "tools": [
        Message("user", "add"),
        Message("assistant", "", {"tool_calls": [CALL]}),
        Message("tool", "3", {"tool_call_id": "c1", "name": "add"}),
    ],
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
"""As in the families that they are named after: what each of them needs of its environment."""
TEMPLATES = {
    "chatml": """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "llama": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " + date_string + "\n\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}{{- "TOOLS" }}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {{- message.tool_calls[0].function.arguments | tojson }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
""",
    "generation": """{%- for message in messages %}
{% if message.role == 'assistant' %}{% generation %}{% set said = message.content %}{{ said }}{{ eos_token }}{% endgeneration %}
{% else %}{{ message.role }}: {{ message.content }}{% endif %}
{%- endfor %}""",
    "controls": """{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}
    {{ message | tojson(indent=2) }}
    {% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}""",
    "namespace": """{%- set ns = namespace(last=-1) -%}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor -%}
{{ ns.last }}{{ messages | map(attribute='role') | join(',') }}{{ documents is none }}{{ messages[-1].content.strip() }}""",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_a_conversation_becomes_the_same_text(name: str, conversation: str) -> None:
    turns = CONVERSATIONS[conversation]
    chats: list[Any] = [[turn.for_template() for turn in turns]]
    (expected,), _ = render_jinja_template(chats, chat_template=TEMPLATES[name], add_generation_prompt=True, **TOKENS)
    assert render_chat(turns, ByteTokenizer(), ChatFormat(TEMPLATES[name], TOKENS)) == expected
