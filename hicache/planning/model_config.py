"""What a model's KV takes and its prefill costs, from its name or its Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache.config.known_models import KNOWN_COMPUTE, KNOWN_MODELS
from hicache.config.units import closest
from hicache.errors import ConfigError
from hicache.layout import DTYPE_BYTES, LayoutKind

_TYPES = """
cohere cohere2 deepseek_v2 deepseek_v3 ernie4_5 gemma gemma2 gemma3 gemma3_text glm glm4 glm4_moe gpt_oss granite
granitemoe helium internlm2 internlm3 kimi_k2 llama minicpm ministral mistral mistral3 mixtral olmo olmo2 olmo3 olmoe
phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm
"""
MODEL_TYPES = frozenset(_TYPES.split())
"""Values of `model_type` whose layers are all attention over the KV of their own tokens."""

_SUB_CONFIG = "text_config"
_ALTERNATING = {"gemma2": 2}  # every n-th layer is full where the file does not say it layer by layer


@dataclass(frozen=True)
class PlanModel:
    """Whole model, all ranks: `parameters` are those that a token uses, without embeddings. Of the `layers`,
    `windowed` look back `window` tokens only."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    kind: LayoutKind
    dtype: str
    parameters: float
    attention_width: int
    windowed: int = 0
    window: int = 0

    def note(self) -> str | None:
        """What a reader has to know of sliding windows; None without them."""
        if not self.windowed:
            return None
        return (
            f"{self.windowed} of {self.layers} layers look back {self.window:,} tokens only; hicache keeps whole pages "
            "of all layers, and so does this plan"
        )


def read_model(source: str, kv_dtype: str | None = None) -> PlanModel:
    """The model that `source` names: one that hicache knows, a config.json, or a folder with one.

    `kv_dtype` replaces the type of KV that is written there. Raises ConfigError for what cannot be read or is not
    understood.
    """
    if source in KNOWN_MODELS:
        known = KNOWN_MODELS[source]
        parameters, width = KNOWN_COMPUTE[source]
        dtype = _kv_type(kv_dtype or str(known["dtype"]), source)
        geometry = {**known, "dtype": dtype, "parameters": parameters, "attention_width": width}
        return PlanModel(source, **geometry)  # type: ignore[arg-type] # a row of the table has these fields
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        near = closest(source, KNOWN_MODELS)
        hint = f"did you mean {near[0]!r}?" if near else "give a config.json, or one of " + ", ".join(KNOWN_MODELS)
        raise ConfigError(f"model {source!r} is neither a file nor known, {hint}")
    return from_hf(_read(path), str(path), kv_dtype)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a config.json is an object, this is a {type(data).__name__}")
    return data


def from_hf(config: Mapping[str, Any], place: str = "config.json", kv_dtype: str | None = None) -> PlanModel:
    """What a Hugging Face config.json comes to. Raises ConfigError, starting with `place`."""
    text = {**config, **config[_SUB_CONFIG]} if isinstance(config.get(_SUB_CONFIG), dict) else dict(config)
    kind = text.get("model_type")
    if kind not in MODEL_TYPES:
        near = closest(str(kind), MODEL_TYPES)
        hint = f"did you mean {near[0]!r}?" if near else "name the geometry in a tiers.yaml and use hicache replay"
        raise ConfigError(f"{place}: model_type {kind!r} is not known to have a KV cache of plain attention, {hint}")
    reader = _Reader(text, place)
    layers, heads = reader.size("num_hidden_layers", "n_layer"), reader.size("num_attention_heads", "n_head")
    mla = text.get("kv_lora_rank") is not None
    windowed, window = _windows(text, layers)
    width = heads * _score_and_value_dim(reader, heads, mla)
    return PlanModel(
        name=Path(place).resolve().parent.name or str(kind),
        layers=layers,
        kv_heads=1 if mla else int(text.get("num_key_value_heads") or heads),
        head_dim=reader.size("kv_lora_rank") + reader.size("qk_rope_head_dim") if mla else _head_dim(reader, heads),
        kind="mla" if mla else "mha",
        dtype=_kv_dtype(config, text, kv_dtype, place),
        parameters=_parameters(reader, layers, heads, mla) + 2 * windowed * width * window,
        attention_width=(layers - windowed) * width,
        windowed=windowed,
        window=window,
    )


class _Reader:
    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        self.config = config
        self.place = place

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there, a whole number above 0."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if type(value) is not int or value < 1:
                raise ConfigError(f"{self.place}: {name} is {value!r}, it must be a whole number above 0")
            return value
        if default is None:
            raise ConfigError(f"{self.place}: {names[0]} is missing")
        return default


def _head_dim(reader: _Reader, heads: int) -> int:
    if reader.config.get("head_dim") is not None:
        return reader.size("head_dim")
    return reader.size("hidden_size") // heads


def _score_and_value_dim(reader: _Reader, heads: int, mla: bool) -> int:
    """Elements of a head that attention multiplies for a pair of tokens, the mean of scores and values."""
    if not mla:
        return _head_dim(reader, heads)
    scores = reader.size("qk_nope_head_dim") + reader.size("qk_rope_head_dim")
    return (scores + reader.size("v_head_dim")) // 2


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """Layers with a sliding window, and its tokens."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return 0, 0
    types = config.get("layer_types")
    if isinstance(types, list):
        return types.count("sliding_attention"), int(window)
    if "max_window_layers" in config:  # Qwen2: the layers from there on
        return max(layers - int(config["max_window_layers"]), 0), int(window)
    every = config.get("sliding_window_pattern") or _ALTERNATING.get(str(config.get("model_type")))
    return layers - layers // int(every) if every else layers, int(window)


def _kv_dtype(config: Mapping[str, Any], text: Mapping[str, Any], wanted: str | None, place: str) -> str:
    dtype = wanted or _quantised_kv(config) or text.get("dtype") or text.get("torch_dtype") or "bfloat16"
    return _kv_type(str(dtype), place)


def _kv_type(name: str, place: str) -> str:
    dtype = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(name, name)
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"{place}: KV of type {dtype!r} is not known, use fp8 or one of {', '.join(DTYPE_BYTES)}")
    return dtype


def _quantised_kv(config: Mapping[str, Any]) -> str | None:
    """The type of KV of a checkpoint that was quantised with its cache: compressed-tensors and ModelOpt say so."""
    section = config.get("quantization_config") or {}
    scheme = section.get("kv_cache_scheme") or {}
    algorithm = str(section.get("kv_cache_quant_algo") or "").lower()
    fp8 = algorithm == "fp8" or (scheme.get("type") == "float" and scheme.get("num_bits") == 8)
    return "fp8" if fp8 else None


def _parameters(reader: _Reader, layers: int, heads: int, mla: bool) -> float:
    """Parameters that a token passes: projections of attention, and of the experts it is sent to."""
    hidden = reader.size("hidden_size")
    attention = _mla_projections(reader, hidden, heads) if mla else _projections(reader, hidden, heads)
    dense = 3 * hidden * reader.size("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    experts = reader.config.get("num_experts_per_tok") or reader.config.get("num_experts_per_token")
    if not experts:
        return layers * (attention + dense)
    width = reader.size("moe_intermediate_size", "intermediate_size")
    shared = int(reader.config.get("n_shared_experts") or 0) * width
    shared += int(reader.config.get("shared_expert_intermediate_size") or 0)
    sparse = 3 * hidden * (int(experts) * width + shared)
    first = min(int(reader.config.get("first_k_dense_replace") or 0), layers)
    return layers * attention + first * dense + (layers - first) * sparse


def _projections(reader: _Reader, hidden: int, heads: int) -> int:
    kv_heads = int(reader.config.get("num_key_value_heads") or heads)
    return 2 * hidden * (heads + kv_heads) * _head_dim(reader, heads)


def _mla_projections(reader: _Reader, hidden: int, heads: int) -> int:
    rope, nope, value = (reader.size(f"{name}_head_dim") for name in ("qk_rope", "qk_nope", "v"))
    latent, queries = reader.size("kv_lora_rank"), heads * (nope + rope)
    rank = reader.config.get("q_lora_rank")
    query = rank * (hidden + queries) if rank else hidden * queries
    return int(query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden)
