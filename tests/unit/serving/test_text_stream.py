"""Streamed text: stop strings end it, incomplete ones and characters are held back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hicache.serving.text_stream import TextStream
from hicache.serving.tokenizer import ByteTokenizer


def stream(text: str, *stop: str) -> tuple[list[str], bool]:
    """What comes out for each byte, and at the end; whether it stopped."""
    out = TextStream(ByteTokenizer(), stop)
    pieces = [out.push(byte) for byte in text.encode()]
    return [*pieces, out.finish()], out.stopped


def test_text_comes_as_it_is() -> None:
    assert stream("abc") == (["a", "b", "c", ""], False)


def test_a_character_comes_when_it_is_complete() -> None:
    assert stream("é") == (["", "é", ""], False)


def test_a_stop_string_and_what_follows_are_left_out() -> None:
    assert stream("one\n\ntwo", "\n\n") == (["o", "n", "e", "", "", "", "", "", ""], True)


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    assert stream("aabx", "aac") == (["", "", "aab", "x", ""], False)
    assert stream("xaa", "aac") == (["x", "", "", "aa"], False)


def test_the_first_of_several_counts() -> None:
    pieces, stopped = stream("abcd", "cd", "bcd")
    assert ("".join(pieces), stopped) == ("a", True)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_comes_out_is_the_text_up_to_the_stop_string_that_is_complete_first(text: str, stops: list[str]) -> None:
    pieces, stopped = stream(text, *stops)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    head = text[: ends[0]] if ends else text
    expected = min((head[: head.index(stop)] for stop in stops if stop in head), key=len, default=text)
    assert ("".join(pieces), stopped) == (expected, bool(ends))
