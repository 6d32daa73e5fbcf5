from __future__ import annotations

from pathlib import Path

import pytest

from hicache.config import CacheConfig, Capacity, config_from_mapping, load_config, parse_config
from hicache.errors import ConfigError
from hicache.hashing import StoreIdentity
from hicache.layout import KVLayout
from hicache.types import Tier

TEXT = """\
model:
  name: example/small
  layers: 4
  kv_heads: 2
  head_dim: 32
  dtype: float16
page_size: 16
tiers:
  - tier: device
    size: 8192 tokens
  - tier: host
    size: 24MiB
    write: write_through
  - tier: storage
    path: /tmp
    size: 128MiB
    prefetch:
      policy: timeout
"""
LAYOUT = KVLayout(4, 2, 32, 16, "float16")


def config(*changes: tuple[str, str]) -> CacheConfig:
    """The configuration above with pieces of text replaced; every piece must be there."""
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return parse_config(text, source="t.yaml")


def refusal(*changes: tuple[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        config(*changes)
    return str(caught.value)


def test_defaults() -> None:
    made = config()
    assert made.host is not None
    assert made.storage is not None
    assert (made.poison, made.device.device, made.device.eviction) == (False, "auto", "adaptive")
    assert (made.host.pinned, made.host.eviction, made.host.selective_hits) == ("auto", "lru", 2)
    assert (made.host.huge_pages, made.host.numa) == (False, "auto")
    assert (made.storage.backend, made.storage.values, made.storage.durability) == ("lmdb", "slab", "batch")
    assert (made.storage.threads, made.queue_bytes()) == (2, 256 * 2**20)
    assert (made.storage.queue_time, made.storage.load_deadline, made.storage.store_deadline) == (10.0, 5.0, 30.0)
    assert made.storage.admission.model_dump() == {"policy": "all", "min_hits": 2, "min_priority": 1}
    assert made.storage.prefetch.model_dump(mode="json") == {
        "policy": "timeout",
        "deadline": "200ms",
        "min_pages": 1,
    }


def test_placement_of_the_host_memory() -> None:
    for text, numa in (("auto", "auto"), ("0", 0), ("3", 3), ("null", None)):
        made = config(("24MiB", f"24MiB\n    huge_pages: true\n    numa: {text}"))
        assert made.host is not None
        assert (made.host.huge_pages, made.host.numa) == (True, numa)
        assert made.model_dump(mode="json")["tiers"][1]["numa"] == numa


def test_layout_and_identity() -> None:
    made = config(("  dtype: float16\n", "  dtype: float16\n  revision: abc\n  tp_rank: 1\n  tp_size: 2\n"))
    assert made.layout() == KVLayout(4, 1, 32, 16, "float16"), "two ranks share two heads"
    assert made.identity() == StoreIdentity(made.layout(), "example/small", "abc", tp_rank=1, tp_size=2)


def test_ranks_beyond_the_heads_hold_replicas() -> None:
    made = config(("  dtype: float16\n", "  tp_size: 8\n"))
    assert made.layout().num_kv_heads == 1


def test_capacities_in_pages_tokens_and_bytes() -> None:
    made = config()
    assert made.capacity(Tier.DEVICE) == Capacity(512, 16, 16384, 512 * 16384)
    assert made.capacity(Tier.HOST) == Capacity(1536, 16, 16384, 24 * 2**20)
    storage = made.capacity(Tier.STORAGE)
    assert storage is not None
    assert storage.budget_bytes == 2**27
    assert storage.page_bytes == 16384
    assert 7600 < storage.num_pages < 8192, "the index comes out of the budget"


@pytest.mark.parametrize("values", ["slab", "inline"])
@pytest.mark.parametrize("pages", [100, 1000, 100_000])
def test_a_store_of_so_many_pages_gets_room_for_its_index(values: str, pages: int) -> None:
    made = config(("size: 128MiB", f"size: {pages} pages\n    values: {values}"))
    storage = made.capacity(Tier.STORAGE)
    assert storage is not None
    assert pages <= storage.num_pages <= pages + 1
    assert storage.budget_bytes > pages * storage.page_bytes


def test_a_codec_that_halves_pages_doubles_the_store() -> None:
    plain, halved = config().capacity(Tier.STORAGE), config(("size: 128MiB", "size: 128MiB\n    codec: int8"))
    smaller = halved.capacity(Tier.STORAGE)
    assert plain is not None
    assert smaller is not None
    assert smaller.page_bytes == 12288  # 8 KiB of codes and the scales
    assert smaller.num_pages > plain.num_pages * 1.3


def test_codec_and_tenant_are_part_of_the_identity() -> None:
    made = config(("size: 128MiB", "size: 128MiB\n    codec: int8\n    tenant: blue"))
    assert made.identity().differences(config().identity().flat()) == ["codec", "tenant"]


def test_what_the_host_tier_quantises_is_stored_as_it_is() -> None:
    made = config(("size: 24MiB", "size: 24MiB\n    codec: int8"))
    assert made.identity() == config(("size: 128MiB", "size: 128MiB\n    codec: int8")).identity()
    assert made.storage_options()["encoded"] is True
    host = made.capacity(Tier.HOST)
    assert host is not None
    assert host.page_bytes == made.host_format().page_stride == 12288


def test_options_of_the_storage_backend() -> None:
    made = config(("size: 128MiB", "size: 128MiB\n    eviction: slru\n    ttl: 7d\n    quota: 1024 pages"))
    assert made.storage_options() == {
        "values": "slab",
        "durability": "batch",
        "eviction": "slru",
        "ttl": 7 * 86400.0,
        "quota_bytes": 1024 * 16384,
        "encoded": False,
        "shrink": False,
    }
    assert made.model_dump(mode="json")["tiers"][2]["ttl"] == "7d"
    other = config(("size: 128MiB", "size: 128MiB\n    backend: redis\n    options: {host: there}"))
    assert other.storage_options() == {"host": "there"}


def test_host_and_disk_pages_are_aligned_and_budgets_are_kept() -> None:
    made = config(("layers: 4", "layers: 3"), ("kv_heads: 2", "kv_heads: 1"), ("24MiB", "1MB"), ("8192 tokens", "1MB"))
    device, host = made.capacity(Tier.DEVICE), made.capacity(Tier.HOST)
    assert device is not None
    assert host is not None
    assert (device.page_bytes, host.page_bytes) == (6144, 8192)
    assert (device.num_pages, host.num_pages, host.budget_bytes) == (162, 122, 10**6)


def test_lower_tiers_may_be_left_out() -> None:
    made = parse_config(TEXT[: TEXT.index("  - tier: host")])
    assert made.host is None
    assert made.storage is None
    assert made.capacity(Tier.HOST) is None
    assert made.queue_bytes() == 0


def test_known_models_bring_their_geometry_and_written_keys_win() -> None:
    text = "model: {name: Qwen/Qwen3-8B, head_dim: 64}\ntiers: [{tier: device, size: 8GiB}]"
    assert parse_config(text).layout() == KVLayout(36, 8, 64, 64, "bfloat16")


def test_pipeline_stages_must_say_how_many_layers_they_hold() -> None:
    text = "model: {name: Qwen/Qwen3-8B, pp_size: 2}\ntiers: [{tier: device, size: 8GiB}]"
    with pytest.raises(ConfigError, match=r"config:1: model\.layers: this key is missing"):
        parse_config(text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    size: 24", "    sise: 24", "t.yaml:12: tiers[1].sise: unknown key, did you mean 'size'? (and 1 more)"),
        ("page_size: 16", "pagesize: 16", "t.yaml:7: pagesize: unknown key, did you mean 'page_size'?"),
        ("  layers: 4", "  layer: 4", "t.yaml:3: model.layer: unknown key, did you mean 'layers'? (and 1 more)"),
        (
            "      policy: t",
            "      polcy: t",
            "t.yaml:18: tiers[2].prefetch.polcy: unknown key, did you mean 'policy'?",
        ),
        (
            "    size: 8192 tokens",
            "    size: 1GiB\n    write: write_back",
            "t.yaml:11: tiers[0].write: unknown key, the keys here are device, eviction, queue_aware, size, tier",
        ),
        ("    size: 24MiB\n", "", "t.yaml:11: tiers[1].size: this key is missing"),
        ("  name: example/small\n", "", "t.yaml:1: model.name: this key is missing"),
        ("24MiB", "24", "t.yaml:12: tiers[1].size: 24: a size needs a unit: B, KB, MB"),
        ("24MiB", "24Mib", "t.yaml:12: tiers[1].size: '24Mib': unit 'Mib' is not known, did you mean MiB?"),
        ("page_size: 16", "page_size: 48", "t.yaml:7: page_size: 48 does not divide 512: use a power of two"),
        ("page_size: 16", "page_size: 1024", "t.yaml:7: page_size: 1024 does not divide 512"),
        ("page_size: 16", "page_size: 0", "t.yaml:7: page_size: 0 does not divide 512"),
        ("page_size: 16", "page_size: '16'", "t.yaml:7: page_size: should be a valid integer, got '16'"),
        ("page_size: 16", "page_size: yes", "t.yaml:7: page_size: should be a valid integer, got True"),
        (
            "size: 24MiB",
            "size: 24MiB\n    pinned: 7",
            "t.yaml:13: tiers[1].pinned: 7 is not one of 'auto', True or False",
        ),
        (
            "size: 24MiB",
            "size: 24MiB\n    huge_pages: 2MiB",
            "t.yaml:13: tiers[1].huge_pages: should be a valid boolean",
        ),
        ("size: 24MiB", "size: 24MiB\n    numa: gpu", "t.yaml:13: tiers[1].numa: 'gpu' is not auto, the number of a"),
        ("size: 24MiB", "size: 24MiB\n    numa: yes", "t.yaml:13: tiers[1].numa: True is not auto, the number of a"),
        ("size: 24MiB", "size: 24MiB\n    numa: -1", "t.yaml:13: tiers[1].numa: -1 is not auto, the number of a"),
        (
            "size: 8192 tokens\n  - tier: host",
            "size: 1MiB\n    device: cpu\n  - tier: host\n    pinned: true",
            "t.yaml:13: tiers[1].pinned: pinned: true needs a CUDA device, this one is cpu: use pinned: auto",
        ),
        ("size: 24MiB", "size: 24MiB\n    size: 1MiB", "t.yaml:13: tiers[1].size: this key is given twice"),
        ("tier: host", "tier: hots", "t.yaml:11: tiers[1]: 'hots' is not one of 'device', 'host', 'storage', did you"),
        ("  - tier: host\n    size", "  - size", "t.yaml:11: tiers[1]: the key 'tier' is missing"),
        (
            "write: write_through",
            "write: write_thru",
            "t.yaml:13: tiers[1].write: 'write_thru' is not one of 'write_through', 'write_through_selective' or "
            "'write_back', did you mean 'write_through'?",
        ),
        (
            "    path: /tmp",
            "    eviction: lfu",
            "t.yaml:15: tiers[2].eviction: 'lfu' is not one of 'lru', 'slru'",
        ),
        ("size: 128MiB", "size: 128MiB\n    codec: zst", "t.yaml:17: tiers[2].codec: 'zst' is not one of"),
        ("size: 128MiB", "size: 128MiB\n    ttl: 5", "t.yaml:17: tiers[2].ttl: 5: a duration needs a unit"),
        ("size: 128MiB", "size: 128MiB\n    quota: 1KiB", "t.yaml:17: tiers[2].quota: 1KiB holds no page"),
        ("size: 128MiB", "size: 128MiB\n    options: {a: 1}", "t.yaml:17: tiers[2].options: has no effect with"),
        ("size: 128MiB", "size: 1MiB", "t.yaml:16: tiers[2].size: a storage budget of 1.0 MiB does not hold one batch"),
        ("policy: timeout", "policy: tmeout", "t.yaml:18: tiers[2].prefetch.policy: 'tmeout' is not one of"),
        ("policy: timeout", "deadline: 200", "t.yaml:18: tiers[2].prefetch.deadline: 200: a duration needs a unit"),
        ("dtype: float16", "dtype: fp16", "t.yaml:6: model.dtype: 'fp16' is not one of"),
        ("dtype: float16", "revision: 12345678", "t.yaml:6: model.revision: 12345678 is read as a number, put it in"),
        ("  - tier: device", "  - device: gpu\n    tier: device", "t.yaml:9: tiers[0].device: 'gpu' is not auto, cpu"),
        (
            "size: 24MiB",
            "size: 1KiB",
            "t.yaml:12: tiers[1].size: 1KiB holds no page: one page of 16 tokens takes 16",
        ),
        ("8192 tokens", "15 tokens", "t.yaml:10: tiers[0].size: 15 tokens holds no page"),
        ("8192 tokens", "0 pages", "t.yaml:10: tiers[0].size: 0 pages holds no page"),
        ("    path: /tmp", "    path: /tmp\n    queue: 1KiB", "t.yaml:16: tiers[2].queue: 1KiB holds no page"),
        ("24MiB", "3000000000 pages", "t.yaml:12: tiers[1].size: 3000000000 pages is 3000000000 pages, there can be"),
        ("    path: /tmp\n", "", "t.yaml:14: tiers[2]: missing key 'path'"),
        (
            "path: /tmp",
            "backend: memory\n    path: /tmp",
            "t.yaml:16: tiers[2].path: has no effect with backend: mem",
        ),
        (
            "24MiB",
            "24MiB\n    selective_hits: 3",
            "t.yaml:13: tiers[1].selective_hits: has no effect with write: wri",
        ),
        (
            "timeout",
            "best_effort\n      deadline: 1s",
            "t.yaml:19: tiers[2].prefetch.deadline: has no effect with pol",
        ),
        ("policy: timeout", "policy: timeout\n    queue_time: 10", "t.yaml:19: tiers[2].queue_time: 10: a duration"),
        ("policy: timeout", "policy: timeout\n    load_deadline: 0s", "t.yaml:19: tiers[2].load_deadline: '0s': "),
        (
            "policy: timeout",
            "policy: timeout\n    admission: {min_hits: 3}",
            "t.yaml:19: tiers[2].admission.min_hits: has no effect with policy: all, it is for hits",
        ),
        (
            "policy: timeout",
            "policy: timeout\n    admission: {policy: hits, min_priority: 3}",
            "t.yaml:19: tiers[2].admission.min_priority: has no effect with policy: hits, it is for priority",
        ),
        (
            "policy: timeout",
            "policy: timeout\n    admission: {policy: hit}",
            "t.yaml:19: tiers[2].admission.policy: 'hit' is not one of 'all', 'hits', 'tinylfu' or 'priority', did you",
        ),
        ("  dtype: float16", "  tp_rank: 1", "t.yaml:6: model.tp_rank: 1 must be less than tp_size, which is 1"),
        ("  dtype: float16", "  tp_size: 3", "t.yaml:6: model.tp_size: 3 ranks cannot share 2 KV heads evenly"),
        ("  dtype: float16", "  kind: mla", "t.yaml:4: model.kv_heads: 2 must be 1 for kind mla"),
    ],
)
def test_every_mistake_names_its_line_and_the_mend(old: str, new: str, message: str) -> None:
    text = refusal((old, new))
    assert text.startswith(message)
    assert "\n" not in text


def tiers(*names: str) -> str:
    sections = {"device": "size: 1GiB", "host": "size: 1GiB", "storage": "size: 1GiB, path: /tmp"}
    lines = [f"  - {{tier: {name}, {sections[name]}}}" for name in names]
    return "\n".join([TEXT[: TEXT.index("tiers:")] + "tiers:", *lines])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("host", "device"), "t.yaml:10: tiers[1]: device after host: the order is device, host, storage"),
        (("device", "storage", "host"), "t.yaml:11: tiers[2]: host after storage"),
        (("device", "host", "host"), "t.yaml:11: tiers[2]: a second host tier"),
        (("device", "storage"), "t.yaml:10: tiers[1]: a storage tier needs a host tier before it"),
        (("host", "storage"), "t.yaml:8: tiers: there is no device tier"),
    ],
)
def test_tier_order(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(tiers(*names), source="t.yaml")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["", "[]", "just words", "tiers"])
def test_what_is_no_mapping(text: str) -> None:
    with pytest.raises(ConfigError, match="a configuration is a mapping with the keys model, page_size, tiers"):
        parse_config(text)


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ("[]", "t.yaml:8: tiers: there is no device tier, it must be the first"),
        ("{tier: device}", "t.yaml:8: tiers: should be a list, got {'tier': 'device'}"),
        ("[3]", "t.yaml:8: tiers[0]: should be a mapping of keys to values, got 3"),
        ("", "t.yaml:8: tiers: should be a list, got None"),
    ],
)
def test_tiers_that_are_no_list_of_mappings(tiers: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"{TEXT[: TEXT.index('tiers:')]}tiers: {tiers}", source="t.yaml")
    assert str(caught.value) == message


def test_overrides_go_through_the_same_validation() -> None:
    made = parse_config(TEXT, overrides=["tiers.1.size=1MiB", "page_size=32"])
    assert made.capacity(Tier.HOST) == Capacity(32, 32, 32768, 2**20)
    with pytest.raises(ConfigError, match=r"^--set page_size=33: page_size: 33 does not divide 512"):
        parse_config(TEXT, overrides=["page_size=33"])


def test_mappings_go_through_the_same_validation() -> None:
    model = {"name": "Qwen/Qwen3-8B"}
    made = config_from_mapping({"model": model, "tiers": [{"tier": "device", "size": "8GiB"}]})
    assert made.page_size == 64
    with pytest.raises(ConfigError, match=r"^engine: tiers\[0\]\.size: 8: a size needs a unit"):
        config_from_mapping({"model": model, "tiers": [{"tier": "device", "size": 8}]}, source="engine")


def test_places_survive_loading() -> None:
    assert config().where("tiers", 1, "size") == "t.yaml:12: tiers[1].size"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe")
    for path, reason in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "Is a dir"), (binary, "not UTF-8")):
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value).startswith(f"{path}: cannot be read: ")
        assert reason in str(caught.value)


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[3] / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_the_examples_are_valid(path: Path) -> None:
    load_config(path)
