"""Which models and which calls of `generate()` can go on from restored KV. All others are refused with one line."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hicache.errors import ConfigError

_MOVING_ROPE = ("dynamic", "longrope")
"""Rotary positions that change for the whole sequence when it becomes longer."""

_TAKEN_OVER = ("past_key_values", "cache", "inputs_embeds", "input_ids", "inputs")
_MANY_SEQUENCES = ("num_beams", "num_return_sequences")
_OTHER_CACHES = (
    "assistant_model",
    "cache_implementation",
    "custom_generate",
    "negative_prompt_ids",
    "penalty_alpha",
    "prompt_lookup_num_tokens",
)
"""Settings that make `generate()` use the cache in another way, or another cache."""


def check_model(model: PreTrainedModel) -> None:
    """Raises ConfigError for a model whose KV is not one K and one V of each token in each layer, or not only of
    its tokens."""
    problem = _problem(model)
    if problem is not None:
        raise ConfigError(f"{type(model).__name__} cannot be cached: {problem}")


def _problem(model: PreTrainedModel) -> str | None:
    config = model.config
    devices = {parameter.device for parameter in model.parameters()}
    if config.is_encoder_decoder:
        return "it is an encoder-decoder, its KV depends on another input"
    if config.get_text_config(decoder=True) is not config:
        return "it takes images or sound, its KV depends on more than its tokens"
    if getattr(config, "kv_lora_rank", None):
        return "its K and V differ in shape (MLA)"
    if _rope_type(config) in _MOVING_ROPE:
        return f"its rotary positions ({_rope_type(config)}) change with the length of the sequence"
    layers = DynamicCache(config=config).layers
    others = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
    if others or len(layers) not in (0, config.num_hidden_layers):
        return f"some layers keep something else than all K and V ({', '.join(sorted(others)) or 'shared KV'})"
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        return f"its weights are on {', '.join(sorted(map(str, devices)))}, they must be on one device"
    return None


def _rope_type(config: object) -> str | None:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return (rope.get("rope_type") or rope.get("type")) if isinstance(rope, Mapping) else None


def check_call(model: PreTrainedModel, settings: Mapping[str, object]) -> None:
    """Raises ConfigError for keyword arguments of `generate()`, or a generation config, that cannot be served."""
    for name in _TAKEN_OVER:
        if settings.get(name) is not None:
            raise ConfigError(f"generate({name}=...): the prefix cache passes that itself, leave it out")
    mask = settings.get("attention_mask")
    if mask is not None and not bool(torch.as_tensor(mask).all()):
        raise ConfigError("generate(attention_mask=...): padding is not supported, pass the tokens without it")
    for name in _MANY_SEQUENCES:
        if (count := _setting(model, settings, name)) not in (None, 1):
            raise ConfigError(f"generate({name}={count}): one sequence at a time is supported")
    for name in _OTHER_CACHES:
        if (value := _setting(model, settings, name)) is not None:
            raise ConfigError(f"generate({name}={value!r}) is not supported: it needs a cache of its own")
    if _setting(model, settings, "use_cache") is False:
        raise ConfigError("generate(use_cache=False): there is nothing to restore then")


def _setting(model: PreTrainedModel, settings: Mapping[str, object], name: str) -> object:
    """What is in effect: the keyword, else that of the call's generation config, else the model's."""
    if name in settings:
        return settings[name]
    given = settings.get("generation_config")
    return getattr(given if given is not None else model.generation_config, name, None)


def token_ids(input_ids: torch.Tensor | Sequence[int]) -> list[int]:
    """The tokens of one sequence: a list, or a tensor (tokens,) or (1, tokens). Raises ConfigError otherwise."""
    tensor = torch.as_tensor(input_ids)
    if tensor.dim() == 2 and len(tensor) != 1:
        raise ConfigError(f"{len(tensor)} sequences given: one at a time is supported")
    if tensor.dim() not in (1, 2) or not tensor.numel() or tensor.is_floating_point():
        raise ConfigError(
            f"input_ids of shape {tuple(tensor.shape)}, {tensor.dtype}: tokens of one sequence are needed"
        )
    return [int(token) for token in tensor.reshape(-1)]


def cache_argument(model: PreTrainedModel) -> str:
    """Under which name this version of transformers takes a cache."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
