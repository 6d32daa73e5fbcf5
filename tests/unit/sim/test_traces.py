from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hicache.errors import TraceError
from hicache.sim.traces import in_order, read_trace
from hicache.sim.workload import BlockPrompt, TraceRequest, private_token

SHARED = Path(os.environ.get("HICACHE_SHARED", Path(__file__).parents[4] / "shared")) / "data"

TRIE = """\
# block_size=4 src=test
t_ms,session,in_tokens,out_tokens,attach,new
0,7,8,5,-1,2
10,7,10,6,1,1
20,-1,5,0,0,0
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def mooncake(**changes: object) -> str:
    line = {"timestamp": 3, "input_length": 600, "output_length": 2, "hash_ids": [10**18, 4]}
    return json.dumps({**line, **changes})


def bailian(**changes: object) -> str:
    line = {
        "chat_id": 1,
        "parent_chat_id": -1,
        "timestamp": 1.5,
        "input_length": 20,
        "output_length": 9,
        "type": "text",
        "turn": 1,
        "hash_ids": [900, 901],
    }
    return json.dumps({**line, **changes})


def tokens(request: TraceRequest) -> list[int]:
    return [int(token) for token in request.tokens()]


def test_trie_prompts_are_paths(tmp_path: Path) -> None:
    first, second, third = read_trace(write(tmp_path / "t.csv", TRIE))
    assert tokens(first) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert tokens(second) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert tokens(third) == [0, 1, 2, 3, private_token(2)]
    assert (second.rid, second.arrival_ms, second.session, second.output_len) == ("1", 10.0, "7", 6)
    assert third.session is None
    assert third.output is None


def test_gzip_is_told_from_the_content(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(TRIE.encode()))
    assert len(list(read_trace(path))) == 3


def test_limit_stops_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", TRIE + "not a line\n")
    assert len(list(read_trace(path, limit=3))) == 3


def test_mooncake_has_blocks_of_512_and_ids_of_any_size(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", mooncake() + "\n\n" + mooncake(hash_ids=[10**18, 5]) + "\n")
    first, second = (request.tokens() for request in read_trace(path))
    assert len(first) == len(second) == 600
    assert np.array_equal(first[:512], second[:512])
    assert not np.intersect1d(first[512:], second[512:]).size


def test_bailian_has_blocks_of_16_seconds_and_chats(tmp_path: Path) -> None:
    follow = bailian(chat_id=2, parent_chat_id=1, timestamp=2.25, turn=2)
    third = bailian(chat_id=3, parent_chat_id=2)
    orphan = bailian(chat_id=8, parent_chat_id=6)
    lines = "\n".join([bailian(), follow, third, orphan])
    requests = list(read_trace(write(tmp_path / "b.jsonl", lines)))
    assert [request.session for request in requests] == ["1", "1", "1", "6"]
    assert requests[1].arrival_ms == 2250.0
    assert tokens(requests[0]) == list(range(20))


def arrivals(path: Path) -> list[float]:
    return [request.arrival_ms for request in in_order(list(read_trace(path)))[0]]


def test_lines_are_put_in_order_of_time(tmp_path: Path) -> None:
    """Two traces one behind the other, or a shuffled one; lines of one time stay in their order."""
    times = [0, 10, 20, 10, 10, 5]
    text = "\n".join(mooncake(timestamp=time, input_length=index + 513) for index, time in enumerate(times))
    found, late = in_order(list(read_trace(write(tmp_path / "m.jsonl", text))))
    assert [request.arrival_ms for request in found] == [0, 5, 10, 10, 10, 20] and late == 2
    assert [request.prompt_len - 513 for request in found] == [0, 5, 1, 3, 4, 2]
    assert in_order(found) == (found, 0) and in_order([]) == ([], 0)


@pytest.mark.parametrize("line", [mooncake, bailian])
@pytest.mark.parametrize("unit", [1.0, 1e3, 1e6, 1e9])
def test_an_epoch_tells_its_unit_by_its_size(tmp_path: Path, line: Callable[..., str], unit: float) -> None:
    """Whatever unit the format has: seconds, ms, µs and ns since 1970 are nine digits apart."""
    start = 1_764_590_400
    text = "\n".join(line(timestamp=(start + seconds) * unit) for seconds in (0, 1, 61))
    assert arrivals(write(tmp_path / "t.jsonl", text)) == pytest.approx([0, 1000, 61_000], abs=0.01)


def test_times_since_the_start_are_in_the_unit_of_the_format(tmp_path: Path) -> None:
    month = 30 * 86400
    text = "\n".join(mooncake(timestamp=time) for time in (5, month * 1000))
    assert arrivals(write(tmp_path / "m.jsonl", text)) == [5, month * 1000]
    text = "\n".join(bailian(timestamp=time) for time in (0, month))
    assert arrivals(write(tmp_path / "b.jsonl", text)) == [0, month * 1000]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the file is empty"),
        ("\n \n", "the file is empty"),
        ("hello\n", ":1: neither a trie CSV"),
        ("# nothing here\n", ":1: no block_size"),
        ("# block_size=0\nx\n", ":1: no block_size"),
        ("# block_size=4\n", ":2: the columns must be t_ms,"),
        ("# block_size=4\nt_ms,session\n", ":2: the columns must be t_ms,"),
        ("# block_size=4\nt_ms,session,in_tokens,out_tokens,attach,new\n", ":1: a header and no request"),
        (TRIE + "1,2,3\n", ":6: 3 values instead of 6"),
        (TRIE + "x,1,4,1,-1,1\n", ":6: Expected `float`"),
        (TRIE + "nan,1,4,1,-1,1\n", ":6: Expected `float`"),
        (TRIE + "0,1,0,1,-1,0\n", ":6: Expected `int` >= 1"),
        (TRIE + "0,1,4,1,3,1\n", ":6: attach is 3 and only 3 blocks came before"),
        (TRIE + "0,1,9,1,-1,1\n", ":6: 1 blocks for a prompt of 9 tokens; at 4 tokens a block it must have 2 or 3"),
        (TRIE + "0,1,4,1,-1,2\n", ":6: 2 blocks for a prompt of 4 tokens; at 4 tokens a block it must have 1"),
        (TRIE + "0,1,2000000000,1,-1,600000000\n", ":6: block 600000002 of request 3 does not fit"),
        (mooncake() + "\n{oops\n", ":2: JSON is malformed"),
        (mooncake() + "\n" + mooncake(timestamp=-1), ":2: Expected `float` >= 0"),
        (mooncake(timestamp=None), ":1: Expected `float`, got `null`"),
        (mooncake(timestamp="2026-12-01"), ":1: Expected `float`, got `str`"),
        (TRIE + "inf,1,4,1,-1,1\n", ":6: Expected `float`"),
        (mooncake() + "\n" + mooncake(hash_ids="x"), ":2: Expected `array`"),
        (mooncake() + "\n" + mooncake(hash_ids=[1, -1]), ":2: Expected `int` >= 0"),
        (mooncake() + "\n" + mooncake(hash_ids=[1]) + "\n" + mooncake(hash_ids=[]), ":3: 0 blocks for a prompt"),
        ('{"timestamp": 1}\n', ":1: Object missing required field `input_length`"),
        (bailian() + "\n" + bailian(input_length="3"), ":2: Expected `int`"),
        (bailian() + "\n" + mooncake(), ":2: Object missing required field `chat_id`"),
    ],
)
def test_a_malformed_trace_is_one_line_with_the_place(tmp_path: Path, text: str, complaint: str) -> None:
    path = write(tmp_path / "bad", text)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(str(path))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        list(read_trace(tmp_path / "absent"))
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_trace(tmp_path))
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(TRIE.encode() * 50)[:-40])
    with pytest.raises(TraceError, match="gzip data is damaged"):
        list(read_trace(cut))
    binary = tmp_path / "binary"
    binary.write_bytes(TRIE.encode() + b"\xff\xfe\n")
    with pytest.raises(TraceError, match=":6: not UTF-8"):
        list(read_trace(binary))


def canonical(requests: list[TraceRequest]) -> list[tuple[int, bytes]]:
    """Prompts with their blocks renamed in order of appearance."""
    names: dict[int, int] = {}
    prompts = []
    for request in requests:
        assert isinstance(request.prompt, BlockPrompt)
        renamed = [names.setdefault(block, len(names)) for block in request.prompt.blocks.tolist()]
        prompts.append((request.prompt_len, np.array(renamed, np.int32).tobytes()))
    return prompts


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real traces are not here")
def test_the_published_trace_and_its_trie_hold_the_same_prompts() -> None:
    trie = list(read_trace(SHARED / "mooncake_conversation.trie.csv.gz"))
    published = list(read_trace(SHARED / "mooncake_conversation.jsonl.gz"))
    assert len(trie) == 12_031
    assert canonical(trie) == canonical(published)
    assert [request.arrival_ms for request in trie] == [request.arrival_ms for request in published]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real traces are not here")
@pytest.mark.parametrize(
    ("name", "requests", "hit_rate"),
    [("mooncake_conversation", 12_031, 0.374), ("claudecode_60", 4_204, 0.950), ("sharegpt_4000", 13_723, 0.600)],
)
def test_an_infinite_cache_reaches_the_known_hit_rate(name: str, requests: int, hit_rate: float) -> None:
    seen: set[int] = set()
    hits = total = count = 0
    for request in read_trace(SHARED / f"{name}.trie.csv.gz"):
        assert isinstance(request.prompt, BlockPrompt)
        new = [block for block in request.prompt.blocks.tolist() if block not in seen]
        seen.update(new)
        old = (len(request.prompt.blocks) - len(new)) * request.prompt.block_size
        hits += min(old, request.prompt_len)
        total += request.prompt_len
        count += 1
    assert count == requests
    assert round(hits / total, 3) == hit_rate
