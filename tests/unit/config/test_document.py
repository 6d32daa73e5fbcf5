from __future__ import annotations

import pytest

from hicache.config.document import Document, Problem, override, read_document
from hicache.errors import ConfigError

TEXT = """\
page_size: 64
tiers:
  - {tier: device, size: 8GiB}
  - tier: host
    size: 1GiB
    nested: {a: 1,
             b: 2}
"""


def read(text: str = TEXT) -> Document:
    return read_document(text, "t.yaml")


def test_data_is_plain() -> None:
    assert read().data == {
        "page_size": 64,
        "tiers": [{"tier": "device", "size": "8GiB"}, {"tier": "host", "size": "1GiB", "nested": {"a": 1, "b": 2}}],
    }


def test_every_value_knows_its_line() -> None:
    document = read()
    assert document.where(("page_size",)) == "t.yaml:1: page_size"
    assert document.where(("tiers", 0, "size")) == "t.yaml:3: tiers[0].size"
    assert document.where(("tiers", 1)) == "t.yaml:4: tiers[1]"
    assert document.where(("tiers", 1, "size")) == "t.yaml:5: tiers[1].size"
    assert document.where(("tiers", 1, "nested", "b")) == "t.yaml:7: tiers[1].nested.b"
    assert document.where(()) == "t.yaml:1"


def test_what_is_not_there_stands_where_it_would_be() -> None:
    assert read().where(("tiers", 1, "nested", "c")) == "t.yaml:6: tiers[1].nested.c"
    assert Document("mapping", {}).where(("tiers",)) == "mapping: tiers"


def test_errors_give_the_first_problem_and_the_number_of_the_others() -> None:
    one, two = Problem(("page_size",), "is odd"), Problem(("tiers",), "are few")
    assert str(read().error([one])) == "t.yaml:1: page_size: is odd"
    assert str(read().error([two, one, one])) == "t.yaml:2: tiers: are few (and 2 more)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 2\n  c: 3\n", "t.yaml:4: b.c: this key is given twice, remove one"),
        ("a: 1\nb: [1, 2\nc: 3\n", "t.yaml:3: not valid YAML"),
        ("a: 1\nb: c: d\n", "t.yaml:2: not valid YAML"),
        ("a: 1\nb: !!python/object:os.system {}\n", "t.yaml:2: not valid YAML: the tag"),
        ("a: 1\nb: !strange 2\n", "t.yaml:2: not valid YAML"),
        ("a: 1\n[b]: 2\n", "t.yaml:2: a key must be a word"),
        ("a: 1\n---\nb: 2\n", "t.yaml:2: not valid YAML"),
        ("a: &loop [*loop]\n", "t.yaml:1: nested too deeply"),
        ("[" * 5000, "t.yaml: not valid YAML"),
        ("a: \0\n", "t.yaml: not valid YAML"),
        ("a: !!int x\n", "t.yaml: not valid YAML"),
    ],
)
def test_bad_yaml_is_one_line_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_overrides_replace_and_add() -> None:
    document = override(read(), ["tiers.1.size=2 GiB", "tiers[0].new.deep=[1, x]", "page_size=16"])
    assert document.data == {
        "page_size": 16,
        "tiers": [
            {"tier": "device", "size": "8GiB", "new": {"deep": [1, "x"]}},
            {"tier": "host", "size": "2 GiB", "nested": {"a": 1, "b": 2}},
        ],
    }


def test_overrides_leave_the_original_alone() -> None:
    document = read()
    override(document, ["tiers.1.size=2GiB"])
    assert document.data == read().data


def test_the_origin_of_an_overridden_value_is_the_override() -> None:
    document = override(read(), ["tiers.1.nested={b: 3}"])
    assert document.where(("tiers", 1, "nested", "b")) == "--set tiers.1.nested={b: 3}: tiers[1].nested.b"
    assert document.where(("tiers", 1, "size")) == "t.yaml:5: tiers[1].size"


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("page_size", "write it as key.path=value"),
        ("=3", "write it as key.path=value"),
        ("a..b=3", "write it as key.path=value"),
        ("tiers.2.size=1GiB", "there is no tiers[2] to set"),
        ("tiers.host.size=1GiB", "there is no tiers.host to set"),
        ("page_size.x=1", "there is no page_size.x to set"),
        ("page_size=[1", "not valid YAML"),
    ],
)
def test_bad_overrides_name_themselves(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override(read(), [assignment])
    assert str(caught.value).startswith(f"--set {assignment}")
    assert message in str(caught.value)
