"""Weights are told apart by their content: whole files, and samples of large ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from hicache.config import weights
from hicache.config.weights import files_digest, weight_files


def made(folder: Path, content: bytes = b"x" * 5000, name: str = "model.safetensors") -> list[Path]:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return weight_files(folder)


def test_the_same_content_has_the_same_digest_wherever_it_lies_and_whenever_it_was_written(tmp_path: Path) -> None:
    one = files_digest(made(tmp_path / "one"))
    os.utime(tmp_path / "one" / "model.safetensors", (1, 1))
    assert files_digest(weight_files(tmp_path / "one")) == one
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "link").symlink_to(tmp_path / "two")
    assert files_digest(weight_files(tmp_path / "two")) == files_digest(weight_files(tmp_path / "link")) == one


def test_other_content_of_the_same_size_and_time_is_seen(tmp_path: Path) -> None:
    found = set()
    for value in b"abc":
        files = made(tmp_path, bytes([value]) * 5000)
        os.utime(files[0], (1, 1))
        found.add(files_digest(files))
    assert len(found) == 3


def test_shards_do_not_run_into_each_other(tmp_path: Path) -> None:
    for folder, parts in (("a", (b"12", b"3")), ("b", (b"1", b"23")), ("c", (b"123",))):
        for number, part in enumerate(parts):
            made(tmp_path / folder, part, f"{number}.safetensors")
    assert len({files_digest(weight_files(tmp_path / folder)) for folder in "abc"}) == 3


def tensors(count: int, size: int) -> bytes:
    """A file in the format of safetensors, of `count` tensors of `size` bytes."""
    entries = {
        f"t{n}": {"dtype": "U8", "shape": [size], "data_offsets": [n * size, n * size + size]} for n in range(count)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(count * size)


def test_of_a_large_file_each_tensor_and_each_stretch_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "WHOLE_BYTES", 1 << 20)
    content = tensors(300, 20_000)
    assert len(content) > 5 << 20
    start = content.index(b"\0" * 100)
    found = {files_digest(made(tmp_path, content))}
    changed = [start + number * 20_000 for number in (0, 1, 150, 299)]  # the first byte of a tensor
    changed += [2 << 20, len(content) - 1, 20]  # a stretch, the end, the header
    for place in changed:
        found.add(files_digest(made(tmp_path, content[:place] + b"!" + content[place + 1 :])))
    assert len(found) == 1 + len(changed)


@pytest.mark.parametrize("content", [b"\xff" * (2 << 20), (9).to_bytes(8, "little") + b"not json!" + bytes(2 << 20)])
def test_a_large_file_that_is_no_safetensors_has_a_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(weights, "WHOLE_BYTES", 1 << 20)
    assert len({files_digest(made(tmp_path, content)), files_digest(made(tmp_path, content[:-1] + b"!"))}) == 2


def test_what_is_no_folder_has_no_files(tmp_path: Path) -> None:
    assert weight_files(tmp_path / "absent") == []
