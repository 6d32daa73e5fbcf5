"""The package table, the folders and the links in hicache/ tell the same story."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OUTSIDE = ("host_pool", "kernels", "storage_backends")
"""Top-level folders that install below hicache."""


def pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text()


def declared_packages() -> list[str]:
    """`packages` of pyproject.toml, read by hand: Python 3.10 has no tomllib."""
    table = re.search(r"^packages = \[\n(.*?)^\]", pyproject(), re.DOTALL | re.MULTILINE)
    assert table is not None
    return re.findall(r'"([^"]+)"', table[1])


def folders_with_modules() -> set[str]:
    """Dotted names of all folders below hicache/ that hold Python modules, links included."""
    found = set()
    for folder, subfolders, files in os.walk(ROOT / "hicache", followlinks=True):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        if any(name.endswith(".py") for name in files):
            found.add(".".join(Path(folder).relative_to(ROOT).parts))
    return found


def test_every_package_is_declared_once() -> None:
    declared = declared_packages()
    assert sorted(set(declared)) == declared, "sorted, and none twice"
    assert set(declared) == folders_with_modules()


@pytest.mark.parametrize("name", OUTSIDE)
def test_links_and_package_dir_point_to_the_folders(name: str) -> None:
    link = ROOT / "hicache" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert f'"hicache.{name}" = "{name}"' in pyproject()


def test_there_are_no_other_links() -> None:
    links = {path.name for path in (ROOT / "hicache").rglob("*") if path.is_symlink()}
    assert links == set(OUTSIDE)


def test_kernels_is_a_namespace_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would shadow the PyPI package of that name"


def test_every_other_package_is_a_regular_one() -> None:
    for package in declared_packages():
        if package != "hicache.kernels":
            assert (ROOT / Path(*package.split(".")) / "__init__.py").exists(), package


def test_cuda_sources_are_data_and_no_package() -> None:
    files = [path for path in (ROOT / "kernels" / "cuda").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".cu", ".cuh"}, "package-data takes only these"
    assert {path.parent for path in files} == {ROOT / "kernels" / "cuda"}, "and only from this folder"
    assert '"hicache.kernels" = ["cuda/*.cu", "cuda/*.cuh"]' in pyproject()
