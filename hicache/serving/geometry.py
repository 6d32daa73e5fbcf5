"""Shape of a Llama-family decoder: what its configuration says, and the page layout that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hicache.errors import ConfigError
from hicache.layout import KVLayout

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
"""Types that weights, activations and the KV cache can have."""

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Values of `architectures` in a Hugging Face config.json that are understood. SmolLM and SmolLM2 are Llama."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies differ from theta^(-2i/d).

    `linear`: all are divided by `factor`. `llama3`: long wavelengths are divided by `factor`, short ones kept,
    those between blended (Llama 3.1). `table`: frequency i is divided by `table[i]` (GGUF rope_freqs).
    """

    kind: Literal["none", "linear", "llama3", "table"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    table: tuple[float, ...] = ()

    def __str__(self) -> str:
        """One word for a store's identity; equal words mean equal frequencies."""
        if self.kind == "llama3":
            return f"llama3:{self.factor}:{self.low_freq_factor}:{self.high_freq_factor}:{self.original_context}"
        if self.kind == "table":
            return "table:" + ":".join(map(str, self.table))
        return f"{self.kind}:{self.factor}" if self.kind == "linear" else self.kind


@dataclass(frozen=True)
class ModelGeometry:
    """A decoder of `layers` blocks: attention of `heads` query and `kv_heads` key heads, then a SwiGLU of width `ffn`.

    `dtype` is the type of weights, activations and KV. `context` is the longest sequence in tokens. `bos_id` is
    None if the model names none; whether prompts start with it, its tokenizer knows. Raises ConfigError for sizes
    that do not fit together.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocab: int
    context: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    norm_eps: float = 1e-5
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = True
    dtype: str = "float32"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "kv_heads", "head_dim", "hidden", "ffn", "vocab", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model: {name} is {getattr(self, name)}, it must be at least 1")
        if self.heads % self.kv_heads:
            raise ConfigError(f"model: {self.heads} heads cannot share {self.kv_heads} kv_heads evenly")
        if self.head_dim % 2:
            raise ConfigError(f"model: head_dim is {self.head_dim}, rotary embeddings need an even one")
        if self.dtype not in COMPUTE_DTYPES:
            raise ConfigError(f"model: dtype {self.dtype!r} is not supported, use one of {', '.join(COMPUTE_DTYPES)}")

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def layout(self, page_size: int) -> KVLayout:
        """Pages of `page_size` tokens of this model's KV."""
        return KVLayout(self.layers, self.kv_heads, self.head_dim, page_size, self.dtype)


def from_hf_config(config: Mapping[str, Any], place: str = "config.json", dtype: str | None = None) -> ModelGeometry:
    """The geometry that a Hugging Face config.json describes; `dtype` replaces the one written there.

    Raises ConfigError, starting with `place`, for a missing key and for every feature that is not implemented.
    """
    architecture = _architecture(config, place)
    _refuse_variants(config, place)
    heads, hidden = _size(config, "num_attention_heads", place), _size(config, "hidden_size", place)
    llama, qwen2, qwen3 = "Llama" in architecture, "Qwen2" in architecture, "Qwen3" in architecture
    bias = bool(config.get("attention_bias", False)) and (llama or qwen3)
    rope = _rope(config)
    return ModelGeometry(
        layers=_size(config, "num_hidden_layers", place),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        hidden=hidden,
        ffn=_size(config, "intermediate_size", place),
        vocab=_size(config, "vocab_size", place),
        context=config.get("max_position_embeddings") or 2048,
        rope_theta=float(rope.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope, place),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        qk_norm=qwen3,
        qkv_bias=qwen2 or bias,
        out_bias=bias,
        mlp_bias=llama and bool(config.get("mlp_bias", False)),
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=dtype or config.get("dtype") or config.get("torch_dtype") or "float32",
        bos_id=config.get("bos_token_id"),
        eos_ids=id_tuple(config.get("eos_token_id")),
    )


def id_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    """Token ids where a configuration has one, several or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _architecture(config: Mapping[str, Any], place: str) -> str:
    names = config.get("architectures") or ["none"]
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ConfigError(f"{place}: architecture {', '.join(names)} is unknown, use one of {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _refuse_variants(config: Mapping[str, Any], place: str) -> None:
    windowed = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    if windowed:
        raise ConfigError(f"{place}: sliding_window is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{place}: hidden_act {config['hidden_act']!r} is not supported, only silu")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{place}: partial_rotary_factor {config['partial_rotary_factor']} is not supported, only 1")
    if config.get("quantization_config"):
        raise ConfigError(f"{place}: quantization_config is not supported, use unquantised weights or a GGUF file")


def _size(config: Mapping[str, Any], key: str, place: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise ConfigError(f"{place}: {key} is missing" if value is None else f"{place}: {key} is {value!r}, not a size")
    return value


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary settings as one mapping; older files have `rope_theta` and `rope_scaling` instead of `rope_parameters`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta"), **scaling}


def _rope_scaling(rope: Mapping[str, Any], place: str) -> RopeScaling:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    try:
        if kind == "default":
            return RopeScaling()
        if kind == "linear":
            return RopeScaling("linear", float(rope["factor"]))
        if kind == "llama3":
            factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
            return RopeScaling("llama3", factor, low, high, int(rope["original_max_position_embeddings"]))
    except KeyError as error:
        raise ConfigError(f"{place}: rope scaling {kind!r} lacks {error.args[0]}") from error
    raise ConfigError(f"{place}: rope scaling {kind!r} is not supported, only default, linear and llama3")
