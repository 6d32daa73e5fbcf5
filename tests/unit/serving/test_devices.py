"""What differs by device, as far as a CPU can tell: attention by other kernels, identities, who waits for what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from serving_engines import PAGE as ENGINE_PAGE
from serving_engines import ask, tiers_of, tiny_engine, tiny_model
from serving_models import LLAMA, PAGE, tokens_of

from hicache.config import config_from_mapping
from hicache.device_pool import DevicePool
from hicache.errors import ConfigError, TransferError
from hicache.serving import devices, setup
from hicache.serving.attention import Attention, Span, flash_sdpa, pinned_sdpa, torch_sdpa
from hicache.serving.blocks import Chunk
from hicache.serving.executor import TransformerModel
from hicache.serving.loaded import backend_name
from hicache.serving.model import Transformer
from hicache.serving.scheduler import SchedulerOptions
from hicache.serving.setup import build_engine, on_its_device, serving_config
from hicache.serving.weights_random import random_tensors

# ---- attention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [2, 6])
@pytest.mark.parametrize("rows, context", [(1, 1), (1, 23), (7, 7), (7, 23)])
@pytest.mark.parametrize("attention", [flash_sdpa, pinned_sdpa])
def test_every_attention_computes_the_same(attention: Attention, rows: int, context: int, kv_heads: int) -> None:
    draw = torch.Generator().manual_seed(rows + context)
    query = torch.randn(rows, 6, 8, generator=draw)
    keys, values = (torch.randn(40, kv_heads, 8, generator=draw) for _ in range(2))
    table = torch.randperm(40, generator=draw)[:context]
    span = Span(context - rows, rows, table, context)
    found, expected = attention(query, keys, values, span), torch_sdpa(query, keys, values, span)
    assert found.shape == query.shape
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)


def test_flash_attention_stays_in_the_type_of_the_model() -> None:
    draw = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(9, 4, 16, generator=draw).bfloat16() for _ in range(3))
    span = Span(0, 9, torch.arange(9), 9)
    found = flash_sdpa(query, keys, values, span)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, torch_sdpa(query, keys, values, span), atol=0.03, rtol=0.0)


def test_fast_mode_with_flash_attention_is_near_exact_mode() -> None:
    tensors, tokens = random_tensors(LLAMA, seed=5), tokens_of(60, LLAMA.vocab)
    logits = []
    for model in (Transformer(LLAMA, tensors), Transformer(LLAMA, tensors, "fast", flash_sdpa)):
        pool, slots = DevicePool(LLAMA.layout(PAGE), 4), torch.arange(60)
        model.forward([Chunk(tokens[:40], slots[:40])], pool)
        logits.append(model.forward([Chunk(tokens[40:], slots)], pool)[0])
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0.0)


def test_each_device_has_its_attention() -> None:
    chosen = {
        (device, mode): devices.attention_for(mode, torch.device(device))
        for device in ("cpu", "cuda:1")
        for mode in ("exact", "fast")
    }
    assert chosen == {
        ("cpu", "exact"): torch_sdpa,
        ("cpu", "fast"): torch_sdpa,
        ("cuda:1", "exact"): pinned_sdpa,
        ("cuda:1", "fast"): flash_sdpa,
    }


# ---- the model ----------------------------------------------------------------------------------


def test_a_layer_is_read_after_its_wait_only() -> None:
    """Restored KV of a layer comes when the model asks for it, over poison."""
    model, tokens = Transformer(LLAMA, random_tensors(LLAMA, seed=5)), tokens_of(3 * PAGE, LLAMA.vocab)
    slots, pages = torch.arange(3 * PAGE), torch.arange(2, dtype=torch.int32).numpy()
    source, target = (DevicePool(LLAMA.layout(PAGE), 3) for _ in range(2))
    model.forward([Chunk(tokens[: 2 * PAGE], slots[: 2 * PAGE])], source)
    target.poison(pages)
    waits: list[int] = []

    def restore(layer: int) -> None:
        waits.append(layer)
        for copy, plane in ((target.k, source.k), (target.v, source.v)):
            copy(layer)[: 2 * PAGE] = plane(layer)[: 2 * PAGE]

    chunk = Chunk(tokens[2 * PAGE :], slots)
    found = model.forward([chunk], target, restore)
    assert torch.equal(found, model.forward([chunk], source)) and waits == list(range(LLAMA.layers))


def test_a_pool_on_another_device_is_refused() -> None:
    tensors = {name: tensor.to("meta") for name, tensor in random_tensors(LLAMA).items()}
    model = Transformer(LLAMA, tensors, attention=torch_sdpa)
    chunk = Chunk(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ConfigError, match="the pool is on cpu, the model on meta: give both the same device"):
        model.forward([chunk], DevicePool(LLAMA.layout(PAGE), 1))


def test_weights_that_are_there_already_are_shared() -> None:
    loaded = tiny_model()
    assert loaded.to("cpu").tensors["embed"] is loaded.tensors["embed"]
    assert TransformerModel(loaded).record() is None


# ---- names --------------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU to speak of, not to compute on."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return "cuda:0"


def test_names_of_devices(card: str) -> None:
    assert devices.device_name("cpu") == "cpu" and devices.device_name(card) == "cuda:0, NVIDIA H200"
    cpu = f"{torch.__version__}/{torch.backends.cpu.get_cpu_capability()}/{devices.cpu_bits()}"
    assert backend_name("exact") == f"torch-sdpa/exact16/{cpu}"
    assert backend_name("fast", card) == f"torch-sdpa/fast/{torch.__version__}/cuda13.0/NVIDIA H200/sm_90/highest"


def test_a_store_is_of_one_kind_of_device(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, tiers = tiny_model(), tiers_of(8)
    on_cpu = serving_config(loaded, tiers, ENGINE_PAGE)
    assert on_cpu.identity() == loaded.identity(ENGINE_PAGE)
    monkeypatch.setattr(setup, "resolve_device", lambda device: card)
    on_gpu = serving_config(loaded, tiers, ENGINE_PAGE)
    assert on_gpu.identity() == loaded.identity(ENGINE_PAGE, "exact", card) != on_cpu.identity()
    assert on_gpu.where("tiers") == on_cpu.where("tiers") and on_gpu.tiers == on_cpu.tiers


def test_a_configuration_keeps_its_places() -> None:
    section = {**tiny_model().model_section("fast"), "attention_backend": "another"}
    mapping: dict[str, Any] = {"model": section, "page_size": ENGINE_PAGE, "tiers": tiers_of(8)}
    config = on_its_device(config_from_mapping(mapping), "fast")
    assert config.model == config_from_mapping({**mapping, "model": tiny_model().model_section("fast")}).model


# ---- the engine ---------------------------------------------------------------------------------


def test_only_steps_that_choose_a_token_wait_for_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(tiers_of(16), SchedulerOptions(step_tokens=8, chunk_tokens=8, reserve=0.0))
    moved, cpu = 0, torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal moved
        moved += 1
        return cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    engine.generate([ask(range(3, 35), max_tokens=3)])
    assert (engine.metrics.steps, moved) == (32 // 8 + 2, 3)
    engine.close()


def test_copies_come_after_a_step_that_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU its first layers may still be computed, and write to pages that a retraction has freed."""
    engine, event, seen = tiny_engine(tiers_of(8)), object(), list[object]()
    engine.add_request(ask(range(3, 20)))

    def broken(*arguments: object) -> torch.Tensor:
        raise TransferError("layer 1 did not arrive")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", broken)
        patch.setattr(engine.model, "record", lambda: event)
        patch.setattr(engine._scheduler, "recover", lambda: 1)
        patch.setattr(engine.cache, "end_step", seen.append)
        assert engine.step() == [] and seen == [event]
    engine.close()


def test_the_report_names_the_device() -> None:
    engine = build_engine(tiny_model(), serving_config(tiny_model(), tiers_of(4), ENGINE_PAGE))
    assert engine.report()["evidence"]["device"] == engine.cache.tiers.device_pool.device == "cpu"
    engine.close()


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    tiers = [{**tiers_of(4)[0], "device": "cuda"}]
    with pytest.raises(ConfigError, match="cuda"):
        serving_config(tiny_model(), tiers, ENGINE_PAGE)


def test_on_a_cpu_nothing_is_copied() -> None:
    chunks = [Chunk(torch.arange(2), torch.arange(5)), Chunk(torch.arange(1), torch.arange(1))]
    assert devices.upload(chunks, torch.device("cpu")) is chunks


def test_an_upload_is_one_copy_of_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        assert device.type == "cuda" and non_blocking
        copied.append(len(tensor))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "to", to)
    chunks = [Chunk(torch.arange(2), torch.arange(10, 15)), Chunk(torch.arange(20, 21), torch.arange(30, 31))]
    moved = devices.upload(chunks, torch.device("cuda:0"))
    assert copied == [9]
    assert [(part.tokens.tolist(), part.table.tolist()) for part in moved] == [
        ([0, 1], [10, 11, 12, 13, 14]),
        ([20], [30]),
    ]
