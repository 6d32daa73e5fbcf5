"""Time to the first token of a long prompt in real vLLM on a CPU: computed, and from the device, host and disk tiers.

    tests/engines/vllm/install.sh .venv-vllm
    .venv-vllm/bin/python benchmarks/peers/vllm_connector.py --folder /var/tmp

A Llama of random weights with 4 KiB of KV a token (float32, blocks of 128 tokens). Engines with and without the
connector take turns, each in a process of its own; one engine then finds on disk what another wrote. A figure is the
median over the prompts of all rounds; only ratios of one run say anything.

cold      nothing is cached; the connector's engine also stores on the host and begins to write to the disk
device    vLLM's own prefix cache
host      vLLM's cache was reset
disk      the first time in a new process; in the page cache of the system, unless the store goes around it
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "engines" / "vllm"
BLOCK = 128


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(3, 1000) for _ in range(tokens)] for _ in range(count)]


def measure(job: dict[str, Any]) -> dict[str, list[float]]:
    """In a process of its own: milliseconds by kind."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    options: dict[str, Any] = {}
    if job["tiers"]:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="HiCacheConnector",
            kv_connector_module_path="hicache.integrations.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"config": job["tiers"]},
        )
    tokens = job["tokens"]
    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK,
        max_model_len=tokens + 128,
        max_num_batched_tokens=tokens + 128,
        max_num_seqs=4,
        **options,
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)

    def once(prompt: list[int], cached: bool) -> float:
        begun = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        elapsed = (time.perf_counter() - begun) * 1e3
        whole = (tokens - 1) // BLOCK * BLOCK if cached else 0
        assert output.num_cached_tokens == whole, f"{output.num_cached_tokens} tokens were cached, not {whole}"
        return elapsed

    found: dict[str, list[float]] = {kind: [] for kind in job["kinds"]}
    warm = prompts(1, tokens, time.time_ns())[0]
    once(warm, cached=False)
    once(warm, cached=True)
    llm.reset_prefix_cache()
    if job["tiers"]:
        once(warm, cached=True)
    for prompt in prompts(job["prompts"], tokens, job["seed"]):
        for kind in job["kinds"]:
            if kind == "host":
                llm.reset_prefix_cache()
            found[kind].append(once(prompt, cached=kind != "cold"))
    return found


def in_process(job: dict[str, Any]) -> dict[str, list[float]]:
    sys.path.insert(0, str(TESTS))
    from engine_process import SETTINGS

    settings = {**SETTINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": job["processes"], "VLLM_LOGGING_LEVEL": "ERROR"}
    settings.pop("OMP_NUM_THREADS")
    done = subprocess.run(
        [sys.executable, __file__, "--job"],
        input=json.dumps(job),
        env={**os.environ, **settings, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    result: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    sys.path.insert(0, str(TESTS))
    from tiny_model import make_model

    model = str(make_model(folder / "model"))
    samples: dict[str, list[float]] = {}
    for turn in range(arguments.rounds):
        tiers = folder / f"tiers{turn}.yaml"
        store = folder / f"store{turn}"
        disk = f"{{tier: storage, path: {store}, size: 1GiB, prefetch: {{deadline: 10s}}}}"
        tiers.write_text(f"tiers:\n  - {{tier: host, size: 512MiB}}\n  - {disk}\n")
        job = {
            "model": model,
            "tokens": arguments.tokens,
            "prompts": arguments.prompts,
            "seed": turn,
            "processes": arguments.processes,
        }
        runs = [
            ("without", {"tiers": None, "kinds": ["cold", "device"]}),
            ("with", {"tiers": str(tiers), "kinds": ["cold", "device"]}),
            ("with", {"tiers": str(tiers), "kinds": ["disk", "host", "device"]}),
        ]
        for name, more in runs if turn % 2 == 0 else [runs[1], runs[0], runs[2]]:
            for kind, values in in_process({**job, **more}).items():
                samples.setdefault(f"{kind} {name}", []).extend(values)
        shutil.rmtree(store, ignore_errors=True)
    return samples


def report(samples: dict[str, list[float]], tokens: int) -> None:
    middle = {name: statistics.median(values) for name, values in samples.items()}
    device = middle["device with"]
    print(f"{tokens} tokens, milliseconds to the first token, median and range")
    for name, values in samples.items():
        print(f"  {name:16} {middle[name]:8.1f}   {min(values):8.1f} .. {max(values):8.1f}   n={len(values)}")
    print(f"host hit above a device hit  {middle['host with'] - device:8.1f} ms   (aimed at: 40)")
    print(f"disk hit above a device hit  {middle['disk with'] - device:8.1f} ms   (aimed at: 120)")
    print(f"cold, with / without         {middle['cold with'] / middle['cold without']:8.3f}      (aimed at: 1.02)")
    print(f"recompute / host hit         {middle['cold without'] / middle['host with']:8.1f}")
    print(f"recompute / disk hit         {middle['cold without'] / middle['disk with']:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="where the store lies meanwhile")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=4, help="in each process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", choices=["0", "1"], default="0", help="1: the engine's core in its own")
    parser.add_argument("--json", type=Path, default=None, help="all samples")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        out = os.dup(1)
        os.dup2(2, 1)  # whatever the engine prints goes to stderr
        found = measure(json.load(sys.stdin))
        with os.fdopen(out, "w") as stream:
            json.dump(found, stream)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        samples = compare(arguments, Path(name))
    if arguments.json:
        arguments.json.write_text(json.dumps(samples, indent=1))
    report(samples, arguments.tokens)


if __name__ == "__main__":
    main()
