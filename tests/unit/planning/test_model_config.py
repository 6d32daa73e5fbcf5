from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import ConfigError
from hicache.planning.model_config import from_hf, read_model

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 36,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def bytes_per_token(config: dict[str, Any], kv_dtype: str | None = None) -> int:
    model = from_hf(config, kv_dtype=kv_dtype)
    planes = 2 if model.kind == "mha" else 1
    size = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float32": 4}[model.dtype]
    return model.layers * planes * model.kv_heads * model.head_dim * size


def test_grouped_queries() -> None:
    assert bytes_per_token(QWEN3_8B) == 36 * 2 * 8 * 128 * 2 == 147_456
    model = from_hf(QWEN3_8B)
    assert model.parameters == pytest.approx(6.95e9, rel=0.01)
    assert model.attention_width == 36 * 32 * 128


def test_a_head_of_keys_for_every_query_head() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
    assert bytes_per_token({**config, "intermediate_size": 11008, "torch_dtype": "float16"}) == 524_288


def test_a_latent_for_all_heads() -> None:
    model = from_hf(DEEPSEEK_V3)
    assert (model.kind, model.kv_heads, model.head_dim) == ("mla", 1, 576)
    assert bytes_per_token(DEEPSEEK_V3) == 61 * 576 * 2
    assert model.parameters == pytest.approx(37e9, rel=0.05)
    assert model.attention_width == 61 * 128 * 160


def test_a_sliding_window_keeps_all_layers_and_says_so() -> None:
    model = from_hf(GPT_OSS)
    assert (model.windowed, model.window) == (2, 128)
    assert bytes_per_token(GPT_OSS) == 4 * 2 * 8 * 64 * 2
    assert model.attention_width == 2 * 64 * 64  # the full layers'
    assert model.note() is not None and "2 of 4 layers look back 128 tokens" in str(model.note())


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({"model_type": "mistral"}, 36),
        ({"model_type": "gemma2"}, 18),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 6}, 30),
        ({"model_type": "qwen2", "max_window_layers": 28, "use_sliding_window": True}, 8),
        ({"model_type": "qwen2", "max_window_layers": 28, "use_sliding_window": False}, 0),
    ],
)
def test_which_layers_have_a_window(fields: dict[str, Any], windowed: int) -> None:
    base = {key: value for key, value in QWEN3_8B.items() if key not in ("use_sliding_window", "max_window_layers")}
    assert from_hf({**base, "sliding_window": 4096, **fields}).windowed == windowed


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    ],
)
def test_a_cache_that_was_quantised_with_its_model(section: dict[str, Any]) -> None:
    assert bytes_per_token({**QWEN3_8B, "quantization_config": section}) == 147_456 // 2


def test_another_type_of_kv_on_request() -> None:
    assert bytes_per_token(QWEN3_8B, "fp8") == 147_456 // 2
    assert from_hf(QWEN3_8B, kv_dtype="fp8").dtype == "float8_e4m3fn"
    with pytest.raises(ConfigError, match="KV of type 'int3' is not known"):
        from_hf(QWEN3_8B, kv_dtype="int3")


def test_a_model_of_text_within_another() -> None:
    assert bytes_per_token({"model_type": "mistral3", "text_config": QWEN3_8B}) == 147_456


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "config.json: model_type 'mamba' is not known"),
        ({"model_type": "qwen33"}, "did you mean 'qwen3'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_attention_heads": -1}, "num_attention_heads is -1"),
    ],
)
def test_what_is_not_understood_is_refused_with_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hf({**QWEN3_8B, **change})


def test_a_folder_a_file_or_a_known_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    assert read_model(str(folder)).name == read_model(str(folder / "config.json")).name == "my-model"
    assert read_model("Qwen/Qwen3-8B").kv_heads == 8
    with pytest.raises(ConfigError, match="did you mean 'Qwen/Qwen3-8B'"):
        read_model("Qwen/Qwen3-8")
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="is an object, this is a list"):
        read_model(str(folder))
