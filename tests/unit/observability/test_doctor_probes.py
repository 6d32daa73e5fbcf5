"""Each question is asked in a process of its own; what happens to that process is a fact."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hicache.observability.doctor.facts import CupyFacts, NumbaFacts, TorchFacts
from hicache.observability.doctor.probes import ask


def package(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name that is found before any other."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))


CUPY = """
import types, warnings
warnings.warn("several CuPy packages are installed")
print("noise")
__version__ = "14.2.0"

def fail():
    raise RuntimeError("no libnvrtc")

cuda = types.SimpleNamespace(
    driver=types.SimpleNamespace(get_build_version=lambda: 13020),
    runtime=types.SimpleNamespace(getDeviceCount=lambda: 2),
    nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
)
"""


def test_cupy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "cupy", CUPY, monkeypatch)
    assert ask("cupy", CupyFacts) == CupyFacts(version="14.2.0", cuda=(13, 2), nvrtc=(13, 0), devices=2)


def test_cupy_without_devices_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = CUPY.replace("lambda: 2", "fail").replace("lambda: (13, 0)", "fail")
    package(tmp_path, "cupy", text, monkeypatch)
    error = "RuntimeError: no libnvrtc"
    assert ask("cupy", CupyFacts) == CupyFacts(version="14.2.0", cuda=(13, 2), nvrtc_error=error, error=error)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "ImportError: libcudart.so.13: cannot open"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its process ended with SIGSEGV"),
        ("import os; os._exit(3)", "its process ended with code 3: without a word"),
        ("import sys; sys.exit('no')", "its process ended with code 1: no"),
    ],
)
def test_a_package_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: str) -> None:
    package(tmp_path, "cupy", text, monkeypatch)
    assert ask("cupy", CupyFacts) == CupyFacts(error=error)


def test_a_package_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "cupy", "import threading; threading.Event().wait()", monkeypatch)
    assert ask("cupy", CupyFacts, timeout_s=1.0) == CupyFacts(error="no answer in 1 s")


def test_an_answer_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "cupy", "print('[]', flush=True); import os; os._exit(0)", monkeypatch)
    assert ask("cupy", CupyFacts).error.startswith("its process ended with code 0")


TORCH = """
import types
__version__ = "2.11.0+cu130"
version = types.SimpleNamespace(cuda="13.0")

def init():
    raise RuntimeError("The NVIDIA driver on your system is too old")

cuda = types.SimpleNamespace(is_available=lambda: {available}, init=init)
"""


def test_torch_says_why_it_has_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "torch", TORCH.format(available=False), monkeypatch)
    error = "RuntimeError: The NVIDIA driver on your system is too old"
    assert ask("torch", TorchFacts) == TorchFacts("2.11.0+cu130", (13, 0), False, error)


def test_torch_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "torch", TORCH.format(available=True), monkeypatch)
    assert ask("torch", TorchFacts) == TorchFacts("2.11.0+cu130", (13, 0), True)


def test_numba_that_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "numba", "raise ImportError('Numba needs NumPy 2.3 or less')", monkeypatch)
    assert ask("numba", NumbaFacts) == NumbaFacts(error="ImportError: Numba needs NumPy 2.3 or less")


def test_a_python_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", os.devnull)
    assert ask("torch", TorchFacts).error.startswith("PermissionError: ")
