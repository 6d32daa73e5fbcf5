"""A built wheel and source distribution hold every module and CUDA source exactly once, below hicache."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("hicache", "host_pool", "kernels", "storage_backends")
FILES = ("LICENSE", "README.md", "pyproject.toml")
LINKED = SOURCES[1:]
CODE = (".py", ".cu", ".cuh")


def build(source: Path, out: Path, *kind: str) -> Path:
    """Build without isolation and so without a network; returns the one file made."""
    command = [sys.executable, "-m", "build", *kind, "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, links kept, so that a build leaves nothing in the repository."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, tmp_path_factory.mktemp("wheel"), "--wheel")


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, tmp_path_factory.mktemp("sdist"), "--sdist")


def modules_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if name.endswith(CODE))


def cuda_sources(wheel: Path) -> set[str]:
    return {Path(name).name for name in modules_in(wheel) if name.startswith("hicache/kernels/cuda/")}


def code_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in CODE]


def modules_of(checkout: Path) -> list[str]:
    """Where every module and every CUDA source belongs in a wheel."""
    own = [path for path in code_below(checkout / "hicache") if not any(p.is_symlink() for p in path.parents)]
    linked = [path for name in LINKED for path in code_below(checkout / name)]
    return sorted(
        [str(path.relative_to(checkout)) for path in own] + [f"hicache/{path.relative_to(checkout)}" for path in linked]
    )


def test_the_wheel_holds_every_module_once_below_hicache(checkout: Path, wheel: Path) -> None:
    assert modules_in(wheel) == modules_of(checkout)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"hicache"}
    assert "hicache/py.typed" in names
    assert "hicache/kernels/cuda/copy.cu" in names
    assert any(name.endswith("LICENSE") for name in names)


def test_a_wheel_from_the_source_distribution_is_the_same(
    wheel: Path, sdist: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    assert {path.name for path in code_below(source / "kernels" / "cuda")} == cuda_sources(wheel)
    again = build(source, tmp_path_factory.mktemp("again"), "--wheel")
    assert modules_in(again) == modules_in(wheel)


def test_the_wheel_imports_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import hicache, hicache.host_pool, hicache.kernels, hicache.storage_backends.base as base
assert hicache.__file__.startswith({str(tmp_path)!r}), hicache.__file__
assert base.__file__.startswith({str(tmp_path)!r}), base.__file__
from importlib.resources import files
found = {{file.name for file in (files("hicache.kernels") / "cuda").iterdir()}}
assert found == {cuda_sources(wheel)!r}, found
from hicache.observability.doctor.copies import cuda_sources
assert set(cuda_sources()) == {{name for name in found if name.endswith(".cu")}}
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code] if sys.version_info >= (3, 11) else [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
