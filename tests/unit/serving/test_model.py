"""The model's logits against a computation of its own, and which errors it names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from serving_models import GEOMETRIES, LLAMA, PAGE, STORIES, plain_logits, run, scattered_table, tokens_of

from hicache.device_pool import DevicePool
from hicache.errors import ConfigError, ProtocolError, TransferError
from hicache.serving.blocks import Chunk, Mode
from hicache.serving.model import Transformer
from hicache.serving.tokenizer import decode
from hicache.serving.weights import load_model
from hicache.serving.weights_random import random_tensors

torch.set_num_threads(1)


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_logits_are_those_of_the_formulas(name: str, mode: Mode) -> None:
    geometry = GEOMETRIES[name]
    tensors = random_tensors(geometry, seed=3)
    model, pool = Transformer(geometry, tensors, mode), DevicePool(geometry.layout(PAGE), 8)
    tokens = tokens_of(100, geometry.vocab)
    sizes = [40, 1, 1, 7, 16, 35]
    expected = plain_logits(geometry, tensors, tokens)[torch.tensor(sizes).cumsum(0) - 1]
    actual = run(model, pool, tokens, scattered_table(8), sizes)
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.15), ("float16", 0.02)])
def test_half_precision_is_near(dtype: str, tolerance: float) -> None:
    geometry = replace(LLAMA, dtype=dtype)
    tensors = random_tensors(geometry, seed=3)
    pool, tokens = DevicePool(geometry.layout(PAGE), 8), tokens_of(60, geometry.vocab)
    actual = run(Transformer(geometry, tensors), pool, tokens, scattered_table(8), [48, 12])
    expected = plain_logits(geometry, tensors, tokens)[[47, 59]]
    assert (actual - expected).abs().max() < tolerance


def test_a_step_serves_many_requests_at_once() -> None:
    tensors = random_tensors(LLAMA)
    model, pool = Transformer(LLAMA, tensors, "fast"), DevicePool(LLAMA.layout(PAGE), 8)
    first, second = tokens_of(20, LLAMA.vocab, 1), tokens_of(33, LLAMA.vocab, 2)
    table = scattered_table(8)
    model.forward([Chunk(first[:19], table[:19])], pool)
    logits = model.forward([Chunk(first[19:], table[:20]), Chunk(second, table[64 : 64 + 33])], pool)
    expected = torch.stack([plain_logits(LLAMA, tensors, tokens)[-1] for tokens in (first, second)])
    torch.testing.assert_close(logits.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_every_layer_waits_before_its_kv_is_read(mode: Mode) -> None:
    tensors = random_tensors(LLAMA)
    model, pool = Transformer(LLAMA, tensors, mode), DevicePool(LLAMA.layout(PAGE), 8)
    tokens, table = tokens_of(64, LLAMA.vocab), scattered_table(8)
    expected = run(model, pool, tokens, table, [32, 32])[-1]
    restored = DevicePool(LLAMA.layout(PAGE), 8)
    asked = []

    def wait(layer: int) -> None:
        asked.append(layer)
        restored.k(layer)[table[:32]], restored.v(layer)[table[:32]] = (
            pool.k(layer)[table[:32]],
            pool.v(layer)[table[:32]],
        )

    actual = model.forward([Chunk(tokens[32:], table[:64])], restored, wait)[0]
    assert asked == [0, 1, 2] and torch.equal(actual, expected)


def test_a_failed_load_ends_the_step() -> None:
    model, pool = Transformer(LLAMA, random_tensors(LLAMA)), DevicePool(LLAMA.layout(PAGE), 8)

    def wait(layer: int) -> None:
        raise TransferError("lost")

    with pytest.raises(TransferError, match="lost"):
        model.forward([Chunk(tokens_of(4, 259), torch.arange(4))], pool, wait)
    assert not pool.k(0).any()


def test_only_the_chunks_slots_are_written() -> None:
    model, pool = Transformer(LLAMA, random_tensors(LLAMA)), DevicePool(LLAMA.layout(PAGE), 8)
    for layer in range(LLAMA.layers):
        pool.k(layer).fill_(float("nan"))
        pool.v(layer).fill_(float("nan"))
    table = scattered_table(8)
    logits = run(model, pool, tokens_of(21, LLAMA.vocab), table, [20, 1])
    written = ~pool.v(2).isnan().flatten(1).any(1)
    assert not logits.isnan().any() and set(written.nonzero().flatten().tolist()) == set(table[:21].tolist())


def test_misuse_is_named() -> None:
    tensors = random_tensors(LLAMA)
    model, pool = Transformer(LLAMA, tensors), DevicePool(LLAMA.layout(PAGE), 2)
    with pytest.raises(ProtocolError, match="a chunk of 3 tokens cannot end a context of 2"):
        Chunk(torch.zeros(3, dtype=torch.int64), torch.arange(2))
    with pytest.raises(ProtocolError, match="outside the vocabulary of 259"):
        model.forward([Chunk(torch.tensor([259]), torch.arange(1))], pool)
    with pytest.raises(ProtocolError, match="1025 tokens exceed the model's context of 1024"):
        model.forward([Chunk(torch.tensor([0]), torch.zeros(1025, dtype=torch.int64))], pool)
    with pytest.raises(ConfigError, match="the pool is laid out as"):
        model.forward([], DevicePool(replace(LLAMA, head_dim=4).layout(PAGE), 2))
    with pytest.raises(ConfigError, match=r"model: tensor layers\.1\.q is missing"):
        Transformer(LLAMA, {name: tensor for name, tensor in tensors.items() if name != "layers.1.q"})
    with pytest.raises(ConfigError, match=r"tensor norm has shape \(4,\), the model needs \(48,\)"):
        Transformer(LLAMA, {**tensors, "norm": torch.zeros(4)})
    with pytest.raises(ConfigError, match=r"tensor norm is torch\.float16, the model's dtype is float32"):
        Transformer(LLAMA, {**tensors, "norm": torch.zeros(48).half()})
    with pytest.raises(ConfigError, match="tensor surplus has no place"):
        Transformer(LLAMA, {**tensors, "surplus": torch.zeros(1)})


@pytest.mark.skipif(not STORIES.exists(), reason="needs the data beside the project")
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_real_model_tells_its_story(mode: Mode) -> None:
    loaded = load_model(STORIES)
    assert loaded.tokenizer is not None
    model, pool = Transformer(loaded.geometry, loaded.tensors, mode), DevicePool(loaded.geometry.layout(PAGE), 8)
    tokens = loaded.tokenizer.encode("Once upon")
    table = scattered_table(8)
    told = len(tokens)
    logits = model.forward([Chunk(torch.tensor(tokens), table[:told])], pool)
    while len(tokens) < 70:
        tokens.append(int(logits[0].argmax()))
        logits = model.forward([Chunk(torch.tensor(tokens[-1:]), table[: len(tokens)])], pool)
    story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she"
    assert decode(loaded.tokenizer, tokens).strip().startswith(story)
