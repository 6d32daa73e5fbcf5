"""The Python in docs/extending.md runs, and the backend in it passes the suite that the page recommends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hicache.testing.storage import StorageConformance

DOCS = Path(__file__).parents[2] / "docs"

SECTION = re.compile(r"^## A storage backend\n(.*?)^## ", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def snippets() -> list[str]:
    section = SECTION.search((DOCS / "extending.md").read_text())
    assert section is not None
    return CODE.findall(section.group(1))


def test_a_backend_takes_forty_lines() -> None:
    backend = snippets()[0]
    assert "class FileBackend(ManagedBackend)" in backend
    assert sum(bool(line.strip()) for line in backend.splitlines()) <= 40


def test_the_backend_of_the_page_passes_the_suite(tmp_path: Path) -> None:
    """In a pytest of its own, so that it registers its name there."""
    module = tmp_path / "test_page.py"
    module.write_text("\n".join(snippets()))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(module)]
    root = str(DOCS.parent)
    run = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, text=True, capture_output=True)
    assert run.returncode == 0, run.stdout
    promises = sum(name.startswith("test_") for name in vars(StorageConformance))
    assert f"{promises} passed" in run.stdout
