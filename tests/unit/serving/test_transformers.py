"""Whole folders written by `transformers`, against its own logits; skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from serving_models import PAGE, scattered_table, tokens_of

from hicache.device_pool import DevicePool
from hicache.serving.blocks import Chunk
from hicache.serving.model import Transformer
from hicache.serving.weights import load_model

transformers = pytest.importorskip("transformers")

SIZES = {
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "vocab_size": 259,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = [
    ("Llama", {"tie_word_embeddings": True}),
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Llama", {"rope_parameters": LLAMA3}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    ("Mistral", {"head_dim": 16, "sliding_window": None}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 16}),
]


@pytest.mark.parametrize("family, settings", MODELS)
def test_logits_equal_those_of_transformers(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(**SIZES, **settings)
    theirs = getattr(transformers, family + "ForCausalLM")(config).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    theirs.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "float32")
    tokens, pool = tokens_of(100, 259), DevicePool(loaded.geometry.layout(PAGE), 8)
    ours = Transformer(loaded.geometry, loaded.tensors).forward([Chunk(tokens, scattered_table(8)[:100])], pool)
    with torch.inference_mode():
        expected = theirs.float()(tokens[None]).logits[0, -1]
    torch.testing.assert_close(ours[0], expected, atol=2e-5, rtol=2e-5)
