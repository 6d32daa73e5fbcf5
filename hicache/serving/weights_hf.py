"""Models in a Hugging Face folder: config.json, safetensors files (one or sharded), tokenizer.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hicache.config.weights import files_digest
from hicache.errors import ConfigError
from hicache.serving.chat import ChatFormat
from hicache.serving.geometry import ModelGeometry, from_hf_config, id_tuple
from hicache.serving.loaded import LoadedModel
from hicache.serving.optional import need
from hicache.serving.tensors import Tensors, check_shape, expected_shapes, name_in_file, owned
from hicache.serving.tokenizer_hf import HFTokenizer, load_hf_tokenizer

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_TOP_NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_INDEX = "model.safetensors.index.json"


def hf_name(name: str) -> str:
    """Hugging Face's name of one of our tensors."""
    return name_in_file(name, _TOP_NAMES, "model.layers.", _LAYER_NAMES)


def load_hf(folder: Path, dtype: str | None = None) -> LoadedModel:
    """Read a model. Raises ConfigError for missing files and tensors, wrong shapes and unknown architectures."""
    config = _read_json(folder / "config.json")
    geometry = _with_generation_ends(folder, from_hf_config(config, str(folder / "config.json"), dtype))
    files = _weight_files(folder)
    tokenizer_path = folder / "tokenizer.json"
    found = tokenizer_path.is_file()
    return LoadedModel(
        name=folder.resolve().name,
        geometry=geometry,
        tensors=_read_tensors(folder, files, geometry),
        weights_digest=files_digest(sorted(set(files.values()))),
        tokenizer=_tokenizer(tokenizer_path, geometry) if found else None,
        tokenizer_digest=files_digest([tokenizer_path]) if found else None,
        chat=_chat_format(folder),
    )


def _with_generation_ends(folder: Path, geometry: ModelGeometry) -> ModelGeometry:
    """Instruct models name the end of a turn in generation_config.json only."""
    path = folder / "generation_config.json"
    more = id_tuple(_read_json(path).get("eos_token_id")) if path.is_file() else ()
    return replace(geometry, eos_ids=tuple(dict.fromkeys(geometry.eos_ids + more)))


def _weight_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    if (folder / _INDEX).is_file():
        shards = _read_json(folder / _INDEX).get("weight_map", {})
        return {name: folder / file for name, file in shards.items()}
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ConfigError(f"{folder}: has neither model.safetensors nor {_INDEX}")
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)


def _read_tensors(folder: Path, files: dict[str, Path], geometry: ModelGeometry) -> Tensors:
    shapes = expected_shapes(geometry)
    ours = {hf_name(name): name for name in shapes}
    _check_names(folder, files, ours, geometry)
    tensors: Tensors = {}
    for path in sorted({files[name] for name in ours}):
        with _open(path) as file:
            for theirs in (name for name in ours if files[name] == path):
                tensor = _get(file, path, theirs)
                check_shape(tensor.shape, shapes[ours[theirs]], f"{path}: tensor {theirs}")
                tensors[ours[theirs]] = owned(tensor, geometry.dtype)
    return tensors


def _check_names(folder: Path, files: dict[str, Path], ours: dict[str, str], geometry: ModelGeometry) -> None:
    for name in ours:
        if name not in files:
            raise ConfigError(f"{folder}: tensor {name} is missing")
    for name in files:
        spare = name.endswith("rotary_emb.inv_freq") or (geometry.tied and name == _TOP_NAMES["head"])
        if name not in ours and not spare:
            raise ConfigError(f"{folder}: tensor {name} has no place in this model")


def _open(path: Path) -> Any:
    safetensors = need("safetensors", "a Hugging Face folder")
    try:
        return safetensors.safe_open(str(path), framework="pt")
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{path}: {error}") from error


def _get(file: Any, path: Path, name: str) -> Any:
    try:
        return file.get_tensor(name)
    except need("safetensors", "a Hugging Face folder").SafetensorError as error:
        raise ConfigError(f"{path}: tensor {name}: {error}") from error


def _tokenizer(path: Path, geometry: ModelGeometry) -> HFTokenizer:
    tokenizer = load_hf_tokenizer(path)
    if tokenizer.vocab_size > geometry.vocab:
        raise ConfigError(f"{path}: has {tokenizer.vocab_size} tokens, the model only {geometry.vocab}")
    return tokenizer


_SPECIAL_TOKENS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def _chat_format(folder: Path) -> ChatFormat:
    path, separate = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = _read_json(path) if path.is_file() else {}
    template = separate.read_text("utf-8") if separate.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    tokens = {name: _content(config.get(name)) for name in _SPECIAL_TOKENS}
    return ChatFormat(template, {name: token for name, token in tokens.items() if token})


def _content(token: str | dict[str, Any] | None) -> str:
    """The name of a token, which is written alone or with its properties."""
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds no JSON object")
    return value
