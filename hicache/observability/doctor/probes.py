"""Asks driver, torch, CuPy and numba, each in a process of its own.

A broken installation may raise anything, kill its process or never answer; here each of these is a fact. Nothing that
they load, allocate or print stays in the process that asks.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import msgspec

from hicache.observability.doctor.driver import read_driver
from hicache.observability.doctor.facts import CupyFacts, DriverFacts, NumbaFacts, TorchFacts
from hicache.observability.doctor.finding import in_one_line
from hicache.observability.doctor.readers import cupy_wheels, installed, read_cupy, read_numba, read_torch

TIMEOUT_S = 120.0
"""Longest wait for one answer: a first import of torch from a slow disk takes most of a minute."""

_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hicache.observability.doctor.probes import answer; answer(sys.argv[2])"
)

FactsT = TypeVar("FactsT", DriverFacts, TorchFacts, CupyFacts, NumbaFacts)


@dataclass(frozen=True)
class Facts:
    """All of them."""

    driver: DriverFacts
    torch: TorchFacts
    cupy: CupyFacts
    numba: NumbaFacts


def probe_all() -> Facts:
    """Ask all at once. A question about what is not installed takes no process."""
    wheels = cupy_wheels()
    with ThreadPoolExecutor(4) as pool:
        driver = pool.submit(ask, "driver", DriverFacts)
        torch = pool.submit(ask, "torch", TorchFacts)
        cupy = pool.submit(ask, "cupy", CupyFacts) if wheels else None
        numba = pool.submit(ask, "numba", NumbaFacts) if installed("numba") else None
        return Facts(
            driver.result(),
            torch.result(),
            replace(cupy.result(), wheels=wheels) if cupy else CupyFacts(),
            replace(numba.result(), version=installed("numba")) if numba else NumbaFacts(),
        )


def ask(name: str, kind: type[FactsT], timeout_s: float = TIMEOUT_S) -> FactsT:
    """The answer of `READERS[name]` in a new process; facts with an error if it gives none."""
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return kind(error=f"no answer in {timeout_s:.0f} s")
    except OSError as error:
        return kind(error=in_one_line(error))
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=kind)
    except (IndexError, msgspec.DecodeError):
        return kind(error=_death(done))


def answer(name: str) -> None:
    """In the child: read the facts and print them as the last line."""
    warnings.simplefilter("ignore")
    facts = READERS[name]()
    print("\n" + json.dumps(asdict(facts)), flush=True)


READERS: dict[str, Callable[[], DriverFacts | TorchFacts | CupyFacts | NumbaFacts]] = {
    "driver": read_driver,
    "torch": read_torch,
    "cupy": read_cupy,
    "numba": read_numba,
}


def _death(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"its process ended with {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines() or ["without a word"]
    return f"its process ended with code {done.returncode}: {lines[-1]}"
