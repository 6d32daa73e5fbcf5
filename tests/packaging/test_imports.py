"""What importing hicache does and does not bring in, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(code: str, *, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `code` in `cwd`, which is on sys.path there, as for a user with a checkout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(cwd), *filter(None, sys.path)])}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "module",
    ["hicache", "hicache.tree", "hicache.policies", "hicache.hashing", "hicache.config", "hicache.cli"],
)
def test_torch_is_not_imported(module: str) -> None:
    done = python(f"import sys, {module}; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr or f"import {module} imports torch"


def test_config_check_does_not_import_torch() -> None:
    done = python(
        "import sys; from hicache.cli import run;"
        "code = run(['config', 'check', 'examples/small.yaml']); sys.exit(code or 'torch' in sys.modules)"
    )
    assert done.returncode == 0, done.stderr or "config check imports torch"


@pytest.mark.parametrize("name", ["host_pool", "storage_backends"])
def test_folders_refuse_to_be_top_level_packages(name: str) -> None:
    done = python(f"import {name}")
    assert done.returncode != 0
    assert f"import this package as hicache.{name}" in done.stderr


def test_a_real_kernels_package_wins_over_our_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("ours = False\n")
    done = python(f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; sys.exit(kernels.ours)")
    assert done.returncode == 0, done.stderr


def test_one_module_object_for_a_linked_package() -> None:
    done = python("import hicache.host_pool as package, sys; sys.exit('host_pool' in sys.modules)")
    assert done.returncode == 0, done.stderr
