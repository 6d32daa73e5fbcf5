from __future__ import annotations

import os
from pathlib import Path

import pytest

from hicache.config import CacheConfig, check_machine, parse_config
from hicache.config.machine import host_memory_bytes
from hicache.errors import CapacityError, ConfigError

TEXT = """\
model: {name: example/small, layers: 4, kv_heads: 2, head_dim: 32, dtype: float16}
page_size: 16
tiers:
  - {tier: device, device: auto, size: 1MiB}
  - {tier: host, size: 2MiB, local_ranks: 4}
"""


def config(*lines: str) -> CacheConfig:
    return parse_config(TEXT + "\n".join(lines), source="t.yaml")


def with_store(path: Path) -> CacheConfig:
    return config(f"  - {{tier: storage, size: 8MiB, path: '{path}'}}")


def test_memory_counts_every_local_rank_and_a_device_pool_on_the_cpu() -> None:
    assert host_memory_bytes(config(), "cuda") == 4 * 2 * 2**20
    assert host_memory_bytes(config(), "cpu") == 4 * 3 * 2**20


def test_too_much_memory_is_refused_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(nbytes: int) -> None:
        asked.append(nbytes)
        raise CapacityError("12 MiB asked for, 1 MiB available")

    monkeypatch.setattr("hicache.host_pool.budget.check_host_budget", refuse)
    with pytest.raises(ConfigError, match=r"^t.yaml:5: tiers\[1\]\.size: 12 MiB asked for, 1 MiB available$"):
        check_machine(config(), device="cpu")
    assert asked == [12 * 2**20]


def test_more_memory_than_any_machine_has() -> None:
    huge = parse_config(TEXT, source="t.yaml", overrides=["tiers.1.size=500TiB", "page_size=512"])
    with pytest.raises(ConfigError, match=r"^--set tiers\.1\.size=500TiB: tiers\[1\]\.size: "):
        check_machine(huge)


def with_host(**keys: object) -> CacheConfig:
    overrides = [f"tiers.1.{key}={value}" for key, value in keys.items()]
    return parse_config(TEXT, source="t.yaml", overrides=overrides)


def test_pinning_is_judged_once_the_device_is_known() -> None:
    pinned = with_host(pinned="true")
    check_machine(pinned)
    check_machine(pinned, device="cuda:0")
    check_machine(config(), device="cpu")
    place = r"^--set tiers\.1\.pinned=true: tiers\[1\]\.pinned: "
    with pytest.raises(ConfigError, match=place + r"pinned: true needs a CUDA device, this one is cpu"):
        check_machine(pinned, device="cpu")


def test_a_numa_node_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.host_pool.numa.memory_nodes", lambda: [0, 1])
    with pytest.raises(ConfigError, match=r"^--set tiers\.1\.numa=7: tiers\[1\]\.numa: node 7 .*choose one of 0, 1$"):
        check_machine(with_host(numa=7))
    for fine in ("auto", "null"):
        check_machine(with_host(numa=fine))


def test_huge_pages_that_are_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "enabled"
    file.write_text("always madvise [never]\n")
    monkeypatch.setattr("hicache.host_pool.arena._THP", file)
    with pytest.raises(ConfigError, match=r"tiers\[1\]\.huge_pages: transparent huge pages are off: set .* to madvise"):
        check_machine(with_host(huge_pages="true"))
    check_machine(with_host(huge_pages="false"))


def test_a_store_may_exist_or_be_made_in_a_folder_that_does(tmp_path: Path) -> None:
    check_machine(with_store(tmp_path))
    check_machine(with_store(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == [], "a check makes nothing"


def test_a_store_whose_parent_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_machine(with_store(tmp_path / "no" / "store"))
    assert str(caught.value).startswith("t.yaml:6: tiers[2].path: ")
    assert f"the folder {tmp_path / 'no'} does not exist, create it first" in str(caught.value)


def test_a_store_path_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "store"):
        with pytest.raises(ConfigError, match=r"^t.yaml:6: tiers\[2\]\.path: .*file is not a folder$"):
            check_machine(with_store(path))


@pytest.mark.parametrize("name", ["", "new"])
def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def read_only(path: Path, mode: int, **options: bool) -> bool:
        return not (path == tmp_path and mode & os.W_OK)

    monkeypatch.setattr(os, "access", read_only)  # root may write everywhere, so permissions prove nothing
    with pytest.raises(ConfigError, match=r"^t.yaml:6: tiers\[2\]\.path: /.* is of user .* needs rwx there"):
        check_machine(with_store(tmp_path / name))


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    storage = with_store(Path("~/store")).storage
    assert storage is not None
    assert storage.folder == tmp_path / "store"
