"""Tokenizers, streaming of text, and prompts of conversations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_files import write_llama2c_tokenizer
from serving_models import STORIES

from hicache.errors import BadInput, ConfigError
from hicache.serving.chat import ChatFormat, Message, render_chat
from hicache.serving.gguf_tokenizer import gguf_tokenizer
from hicache.serving.tokenizer import ByteTokenizer, Detokenizer, decode
from hicache.serving.tokenizer_hf import SPLITS, byte_level_bpe, load_hf_tokenizer
from hicache.serving.tokenizer_pieces import PieceTokenizer, load_llama2c_tokenizer

HARD = "naïve 東京 🙂🏽 it's  12345\n\tend"


@given(st.binary(max_size=40))
def test_streamed_text_is_the_decoded_text(data: bytes) -> None:
    tokenizer, stream = ByteTokenizer(), Detokenizer(ByteTokenizer())
    parts = [stream.push(token) for token in data]
    assert "".join([*parts, stream.finish()]) == decode(tokenizer, list(data)) == data.decode("utf-8", "replace")


@given(st.text(max_size=30))
def test_no_character_is_streamed_in_part(text: str) -> None:
    stream = Detokenizer(ByteTokenizer())
    parts = [stream.push(token) for token in text.encode("utf-8", "ignore")]
    assert "".join(parts) == text.encode("utf-8", "ignore").decode() and stream.finish() == ""
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


def test_bytes_as_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("hé") == [256, 104, 195, 169] and tokenizer.encode("h", special=False) == [104]
    assert decode(tokenizer, [256, 104, 257, 258, 999]) == "h"
    assert tokenizer.token_id("</s>") == 257 and tokenizer.token_id("x") is None


def pieces() -> PieceTokenizer:
    named = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        " ",
        "a",
        "b",
        "ab",
        " a",
        "bb",
        "abb",
    ]
    scores = [0.0] * 262 + [-3.0, -2.0, -1.0, -4.0]
    return PieceTokenizer(named, scores, frozenset({0, 1, 2}), bos=1)


def test_pieces_join_by_score() -> None:
    tokenizer = pieces()
    named = {name: token for token, name in enumerate(tokenizer.pieces)}
    assert tokenizer.encode("abb") == [1, named[" a"], named["bb"]]
    assert tokenizer.encode("bab", special=False) == [named[" "], named["b"], named["ab"]]
    assert tokenizer.encode("é", special=False) == [named[" "], named["<0xC3>"], named["<0xA9>"]]
    assert tokenizer.encode("") == [1]
    assert decode(tokenizer, tokenizer.encode("bé a")) == " bé a"


@given(st.text(max_size=20))
def test_pieces_lose_nothing(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert decode(pieces(), pieces().encode(text)) == (" " + text if text else "")


def test_llama2c_tokenizer_file(tmp_path: Path) -> None:
    entries = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0), (b" ", -1.0), (b"\xc3\xa9", -2.0)]
    path = write_llama2c_tokenizer(tmp_path / "tok.bin", entries)
    tokenizer = load_llama2c_tokenizer(path, 5)
    assert tokenizer.encode("é") == [1, 3, 4] and decode(tokenizer, [1, 3, 4, 2]) == " é"
    with pytest.raises(ConfigError, match=r"tok\.bin: piece 5 of 6 is cut off"):
        load_llama2c_tokenizer(path, 6)
    with pytest.raises(ConfigError, match="bytes follow the 4 pieces"):
        load_llama2c_tokenizer(path, 4)


@pytest.mark.skipif(not STORIES.exists(), reason="needs the data beside the project")
def test_a_real_llama2c_tokenizer() -> None:
    tokenizer = load_llama2c_tokenizer(STORIES.with_name("tok512.bin"), 512)
    text = "Once upon a time, Lily saw a big, red ball."
    tokens = tokenizer.encode(text)
    assert decode(tokenizer, tokens) == " " + text and len(tokens) < 25
    assert decode(tokenizer, tokenizer.encode(HARD)) == " " + HARD


def alphabet() -> list[str]:
    tokenizers = pytest.importorskip("tokenizers")
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_vocabulary(pre: str) -> None:
    vocabulary = [*alphabet(), "it", "12", "<|end|>", "<tool>"]
    tokenizer = byte_level_bpe(vocabulary, ["i t", "1 2"], pre, [("<|end|>", True), ("<tool>", False)], bos=7)
    tokens = tokenizer.encode(HARD + "<|end|><tool>")
    assert tokenizer.vocab_size == 260 and tokens[0] == 7 and tokens[-2:] == [258, 259]
    assert decode(tokenizer, tokens[1:]) == HARD + "<tool>"
    assert 256 in tokens and (257 in tokens) == (pre not in ("smollm", "qwen2"))  # digit by digit
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(260) == b""
    stream = Detokenizer(tokenizer)
    parts = [stream.push(token) for token in tokens[1:]]
    assert "".join(parts) == HARD + "<tool>" and not any("\ufffd" in part for part in parts)


def test_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe([*alphabet(), "it"], ["i t"], "gpt-2", [], bos=None)
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer._inner.to_str())
    loaded = load_hf_tokenizer(path)
    assert loaded.encode(HARD) == tokenizer.encode(HARD) and decode(loaded, loaded.encode(HARD)) == HARD
    described = json.loads(path.read_text())
    described["decoder"] = None
    path.write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: its decoder is neither"):
        load_hf_tokenizer(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: "):
        load_hf_tokenizer(path)


def test_gguf_vocabularies() -> None:
    def read(**fields: object):  # type: ignore[no-untyped-def]
        named = {"tokenizer.ggml." + key: value for key, value in fields.items()}
        return gguf_tokenizer(Path("m.gguf"), lambda key, default: named.get(key, default))

    pieces = ["<unk>", "<s>", "</s>", "<0x41>", "▁", "b", "▁b"]
    common = {"model": "llama", "tokens": pieces, "token_type": [2, 3, 3, 6, 1, 1, 1], "bos_token_id": 1}
    tokenizer = read(**common, scores=[0, 0, 0, 0, -1, -2, -3])
    assert tokenizer.encode("bA") == [1, 6, 3] and decode(tokenizer, [1, 6, 3]) == " bA"
    assert read() is None
    with pytest.raises(ConfigError, match=r"m\.gguf: tokenizer 'bert' is unknown"):
        read(model="bert", tokens=["a"])
    with pytest.raises(ConfigError, match=r"m\.gguf: tokenizer\.ggml\.tokens is missing"):
        read(model="gpt2")
    with pytest.raises(ConfigError, match=r"m\.gguf: pre-tokenizer 'dbrx' is unknown"):
        read(model="gpt2", tokens=["a"], pre="dbrx")


class Named(ByteTokenizer):
    """Bytes, and one more name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def token_id(self, content: str) -> int | None:
        return 0 if content == self._name else None


TURNS = [Message("system", "Be brief."), Message("user", "Hi")]


def test_conversations_in_the_formats_of_the_vocabularies() -> None:
    chatml = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(TURNS, Named("<|im_start|>"), ChatFormat()) == chatml
    llama3 = (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert render_chat(TURNS, Named("<|start_header_id|>"), ChatFormat()) == llama3
    assert render_chat(TURNS, ByteTokenizer(), ChatFormat()) == "Be brief.\nHi\n"
    with pytest.raises(BadInput, match="the conversation is empty"):
        render_chat([], ByteTokenizer(), ChatFormat())


def test_conversations_by_template() -> None:
    template = "{{ bos_token }}{% for m in messages %}\n{{ m.role }}={{ m['content'] }};{% endfor %}"
    rendered = render_chat(TURNS, ByteTokenizer(), ChatFormat(template, {"bos_token": "<s>"}))
    assert rendered == "<s>system=Be brief.;user=Hi;"
    with pytest.raises(BadInput, match="messages: roles must alternate"):
        render_chat(TURNS, ByteTokenizer(), ChatFormat("{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(BadInput, match="the chat template fails"):
        render_chat(TURNS, ByteTokenizer(), ChatFormat("{{ messages[0].__class__.__mro__[1].x() }}"))
    with pytest.raises(BadInput, match="the chat template fails"):
        render_chat(TURNS, ByteTokenizer(), ChatFormat("{% for"))


USER, ANSWER = Message("user", "ist 3 < 5 & größer?"), Message("assistant", "ja")
TEMPLATES = {
    "{% if tools is not none or documents is not none %}X{% endif %}{{ messages[0].content }}": "ist 3 < 5 & größer?",
    "{{ messages[0].content | tojson }}": '"ist 3 < 5 & größer?"',
    "{{ messages[1] | tojson(ensure_ascii=True, indent=1, sort_keys=True) }}": (
        '{\n "content": "ja",\n "role": "assistant"\n}'
    ),
    "{{ [1, 2] | tojson(separators=(',', ':')) }}": "[1,2]",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}": "user",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}": "assistant",
    "{% for m in messages %}{% generation %}{{ m.content[0] }}{% endgeneration %}{% endfor %}": "ij",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}": "1",
    "{{ strftime_now('%Y') | length }}": "4",
    "{{ unk_token is defined }}{{ eos_token }}": "False</s>",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_have_what_transformers_gives_them(template: str) -> None:
    chat = ChatFormat(template, {"eos_token": "</s>"})
    assert render_chat([USER, ANSWER], ByteTokenizer(), chat) == TEMPLATES[template]


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content + 1 }}", "{{ 1 // 0 }}", "{{ messages[9].content.x }}", "{{ 'a' | nothing }}"]
)
def test_whatever_a_template_raises_is_the_clients_error_with_the_reason(template: str) -> None:
    with pytest.raises(BadInput, match=r"messages: the chat template fails: .+"):
        render_chat([USER], ByteTokenizer(), ChatFormat(template))


def test_tool_calls_are_told() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 3}}}
    turns = [USER, Message("assistant", "", {"tool_calls": [call]}), Message("tool", "5", {"tool_call_id": "1"})]
    template = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
    assert render_chat(turns, ByteTokenizer(), ChatFormat(template)) == "3"
    plain = render_chat(turns, ByteTokenizer(), ChatFormat())
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>' in plain
