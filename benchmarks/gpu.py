"""Measures hicache on a GPU, in less than eight minutes and without a network, and prints a JSON table.

    python3 benchmarks/gpu.py [--json FILE] [--quick] [--skip-tests] [--device cpu] [--path DIR]

It runs from a checkout. JSON goes to stdout, and to FILE after every part; progress, and a table for people, to
stderr. A part that fails is reported in its place, and the exit code is 1 at the end. `--quick` moves little, to see
that it works; with `--device cpu` it works without a GPU, less the tests and the copies.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

Part = Callable[[], dict[str, Any]]

BUDGETS = {"machine": 20, "tests": 210, "copies": 80, "overlap": 40, "steps": 40, "ttft": 60}
"""Seconds for each part, 450 in all."""

TESTS = ("tests/gpu", "tests/conformance/test_kernels.py")

ARENA_BYTES = 4 << 30

_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected|xfailed)")


class OutOfTime(Exception):
    """A part took longer than its budget."""


def main(arguments: list[str] | None = None) -> int:
    """Run all parts. 0 if all went well, else 1."""
    options = _options(arguments)
    begun = time.monotonic()
    report: dict[str, Any] = {"device": options.device, "quick": options.quick, "parts": {}, "seconds": {}}
    for name, part in _parts(options).items():
        start = time.monotonic()
        _say(f"{name}: {start - begun:.0f} s so far")
        report["parts"][name] = _attempt(name, part)
        report["seconds"][name] = round(time.monotonic() - start, 1)
        report["goals"] = goals(report["parts"])
        _write(options.json, report)
    print(json.dumps(report, indent=2))
    _show(report)
    return 1 if any("error" in part or part.get("failed") for part in report["parts"].values()) else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--quick", action="store_true", help="move little, to see that it works")
    parser.add_argument("--skip-tests", action="store_true", help="do not run tests/gpu")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")
    parser.add_argument("--path", type=Path, metavar="DIR", help="folder for the disk tier (default: a temporary one)")
    return parser.parse_args(arguments)


def _parts(options: argparse.Namespace) -> dict[str, Part]:
    """What is to be run, in this order."""
    parts: dict[str, Part] = {"machine": lambda: machine(options.device)}
    if options.device != "cpu":
        if not options.skip_tests:
            parts["tests"] = run_tests
        parts["copies"] = lambda: _copies(options)
    parts["overlap"] = lambda: _overlap(options)
    parts["steps"] = lambda: _steps(options)
    parts["ttft"] = lambda: _ttft(options)
    return parts


def _attempt(name: str, part: Part) -> dict[str, Any]:
    try:
        with _limit(BUDGETS[name]):
            return part()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Raise OutOfTime in the block after so many seconds; calls of C code end first."""

    def over(number: int, frame: object) -> None:
        raise OutOfTime(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- parts --------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    """Where this runs, and on what."""
    versions = {name: _version(name) for name in ("torch", "numpy", "cupy-cuda13x", "cupy-cuda12x", "numba", "lmdb")}
    described = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "revision": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {name: version for name, version in versions.items() if version is not None},
    }
    return described if device == "cpu" else {**described, **_card(device)}


def _card(device: str) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(device)
    link = "pcie.link.gen.current,pcie.link.width.current,pcie.link.gen.max,pcie.link.width.max"
    return {
        "card": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "pcie (generation, lanes; now, most)": _output("nvidia-smi", f"--query-gpu={link}", "--format=csv,noheader"),
        "arenas": _arenas(device),
    }


def _arenas(device: str) -> dict[str, dict[str, float]]:
    """Seconds to allocate, populate and pin host memory, with small and with huge pages."""
    from hicache.host_pool.arena import Placement
    from hicache.host_pool.pinning import CudaRegistrar
    from hicache.host_pool.pool import HostPool
    from hicache.layout import KVLayout

    layout = KVLayout(32, 8, 128, 16, "bfloat16")
    found = {}
    for name, huge in (("small pages", False), ("huge pages", True)):
        pool = HostPool(layout, ARENA_BYTES // layout.page_stride, True, Placement(huge), CudaRegistrar(device))
        found[name] = {"bytes": pool.nbytes, **asdict(pool.startup)}
        pool.close()
    return found


def run_tests() -> dict[str, Any]:
    """tests/gpu in a process of its own: its counts, and its last lines if not all passed."""
    strict = [] if find_spec("pytest_timeout") else ["-o", "addopts=--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *strict, *TESTS]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "quick"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=BUDGETS["tests"] - 5
        )
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        return {"error": f"not done after {late.timeout:.0f} s", "output": text.splitlines()[-20:]}
    lines = done.stdout.splitlines()
    found = _COUNTS.findall(lines[-1]) if lines else []
    counts = {word.rstrip("s") if word == "errors" else word: int(number) for number, word in found}
    failed = done.returncode != 0
    tail = {"output": [*lines[-60:], *done.stderr.splitlines()[-10:]]} if failed else {}
    return {"counts": counts, "failed": failed, "exit_code": done.returncode, **tail}


def _copies(options: argparse.Namespace) -> dict[str, Any]:
    from hicache.bench import copy_cuda

    moved = (16 << 20) if options.quick else copy_cuda.MOVED_BYTES
    return copy_cuda.run(options.device, moved, _say)


def _overlap(options: argparse.Namespace) -> dict[str, Any]:
    from hicache.bench import gpu_overlap

    sizes = gpu_overlap.QUICK if options.quick else gpu_overlap.Sizes()
    return gpu_overlap.run(_model(options), options.device, sizes, _say)


def _steps(options: argparse.Namespace) -> dict[str, Any]:
    from hicache.bench import gpu_steps

    return gpu_steps.run(options.device, gpu_steps.QUICK if options.quick else gpu_steps.Sizes(), _say)


def _ttft(options: argparse.Namespace) -> dict[str, Any]:
    from hicache.bench import gpu_ttft

    sizes = gpu_ttft.QUICK if options.quick else gpu_ttft.Sizes()
    with tempfile.TemporaryDirectory(prefix="hicache-gpu-", dir=options.path) as folder:
        return gpu_ttft.run(_model(options), options.device, Path(folder), sizes, _say)


def _model(options: argparse.Namespace) -> Any:
    from hicache.bench.gpu_model import LLAMA_1B, TINY, device_model
    from hicache.device_pool import resolve_device

    return device_model(TINY if options.quick else LLAMA_1B, resolve_device(options.device))


# ---- what was aimed at --------------------------------------------------------------------------


def goals(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """[{goal, value, target, met}] of the parts that were measured; `value` is the worst of its kind."""
    found = []
    copies = [row for row in parts.get("copies", {}).get("results", []) if row["target"] is not None]
    for target in sorted({row["target"] for row in copies}, reverse=True):
        rows = [row for row in copies if row["target"] == target]
        least = min(row["layer_bytes"] for row in rows) >> 10
        for way in ("gather", "scatter", "by_layer"):
            value = min(row[way] for row in rows)
            name = f"{way} of random pages, of memcpy, from {least} KiB a layer on"
            found.append(_goal(name, value, target, value >= target))
    for case in parts.get("overlap", {}).get("cases", []):
        name = f"prefill while loading, {case['case']}, of the longer of both"
        found.append(_goal(name, case["ratio"], parts["overlap"]["target"], case["met"]))
    for row in parts.get("ttft", {}).get("rows", []):
        if "load_ratio" in row:
            name = "TTFT of a host hit, of the longer of load and device hit"
            found.append(_goal(name, row["load_ratio"], parts["ttft"]["load_target"], row["met"]))
    return found


def _goal(name: str, value: float, target: float, met: bool) -> dict[str, Any]:
    return {"goal": name, "value": round(value, 3), "target": target, "met": met}


# ---- output -------------------------------------------------------------------------------------


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(stderr=True)
    for name, part in report["parts"].items():
        if "error" in part:
            console.print(f"[red]{name}: {part['error']}[/]", markup=True)
    for table in _tables(report):
        console.print(table, "")


def _tables(report: dict[str, Any]) -> Iterator[Any]:
    parts = report["parts"]
    if "counts" in parts.get("tests", {}):
        yield f"tests: {', '.join(f'{count} {word}' for word, count in parts['tests']['counts'].items())}"
    if "results" in parts.get("copies", {}):
        yield _copy_table(parts["copies"]["results"])
    if "cases" in parts.get("overlap", {}):
        yield _overlap_table(parts["overlap"]["cases"])
    if "calls" in parts.get("steps", {}):
        yield _step_table(parts["steps"])
    if "rows" in parts.get("ttft", {}):
        yield _ttft_table(parts["ttft"])
    table = _table("goal", "value", "target", "met")
    for goal in report["goals"]:
        sign = "yes" if goal["met"] else "no"
        table.add_row(goal["goal"], f"{goal['value']:.2f}", f"{goal['target']:g}", sign)
    yield table


def _copy_table(rows: list[dict[str, Any]]) -> Any:
    table = _table("K+V of a layer", "pages", "path", "memcpy down/up GB/s", "gather", "scatter", "by layer", "chose")
    for row in rows:
        memcpy = f"{row['memcpy_down_gb_s']:.1f} / {row['memcpy_up_gb_s']:.1f}"
        ratios = (f"{row[way]:.2f}" if way in row else "" for way in ("gather", "scatter", "by_layer"))
        name = f"{row['layer_bytes'] >> 10} KiB"
        table.add_row(name, row["pages"], row["path"], memcpy, *ratios, row["chose"] or "")
    return table


def _overlap_table(cases: list[dict[str, Any]]) -> Any:
    table = _table("overlap", "prefix", "suffix", "load", "GB/s", "compute", "together", "ratio")
    for case in cases:
        times = {name: f"{case[f'{name}_ms']:.2f} ms" for name in ("load", "compute", "together")}
        shape = (case["case"], f"{case['prefix_tokens']:,}", f"{case['suffix_tokens']:,}")
        speed = (times["load"], f"{case['load_gb_s']:.1f}", times["compute"])
        table.add_row(*shape, *speed, times["together"], f"{case['ratio']:.2f}")
    return table


def _step_table(steps: dict[str, Any]) -> Any:
    table = _table("scheduler's thread", "calls", "p50 µs", "p99 µs", "most µs")
    for name, figures in steps["calls"].items():
        table.add_row(name, str(figures["calls"]), *(f"{figures[key]:,.0f}" for key in ("p50_us", "p99_us", "max_us")))
    load = steps["load_back"]
    name = f"init_load_back: {steps['layers']} layers, {steps['prompt_tokens']:,} tokens"
    table.add_row(name, "", f"{load['p50_us']:,.0f}", "", f"{load['max_us']:,.0f}")
    return table


def _ttft_table(ttft: dict[str, Any]) -> Any:
    table = _table(f"prefix of {ttft['prefix_tokens']:,} tokens from", "TTFT", "times faster")
    for row in ttft["rows"]:
        table.add_row(row["source"], f"{row['ttft_ms']:,.1f} ms", f"{row['speedup']:.1f}")
    same = "the same bits" if ttft["logits_equal"] else "not the same bits"
    table.caption = f"its load alone {ttft['load_ms']:.1f} ms; all answers equal, their first logits are {same}"
    return table


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints, None if there is no such command or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    sys.exit(main())
