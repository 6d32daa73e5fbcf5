"""Which models and which calls of `generate()` can go on from restored KV. All others are refused with one line."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hicache.errors import ConfigError
from hicache.types import token_array

_MOVING_ROPE = ("dynamic", "longrope")
"""Rotary positions that change for the whole sequence when it becomes longer."""

_TAKEN_OVER = ("past_key_values", "cache", "inputs_embeds", "input_ids", "inputs")

_CHOICE = frozenset({
    "bad_words_ids", "begin_suppress_tokens", "do_sample", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "logits_processor", "min_p",
    "no_repeat_ngram_size", "prefix_allowed_tokens_fn", "remove_invalid_values", "renormalize_logits",
    "repetition_penalty", "sequence_bias", "suppress_tokens", "temperature", "top_h", "top_k", "top_p", "typical_p",
    "watermarking_config",
})  # fmt: skip
"""Settings that choose the next token from the logits."""

_END = frozenset({
    "bos_token_id", "eos_token_id", "max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens",
    "pad_token_id", "stop_strings", "stopping_criteria", "tokenizer",
})  # fmt: skip
"""Settings that say when an answer ends."""

_OUTPUT = frozenset({
    "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate", "streamer", "synced_gpus",
})  # fmt: skip
"""Settings that say what is told of it."""

_CHECKED = frozenset({"attention_mask", "generation_config", "num_beams", "num_return_sequences", "use_cache"})
_WITH_MANY_SEQUENCES = frozenset({
    "constraints", "diversity_penalty", "early_stopping", "force_words_ids", "length_penalty", "num_beam_groups",
})  # fmt: skip
"""Settings that mean something with several beams only."""

ALLOWED = _CHOICE | _END | _OUTPUT | _CHECKED | _WITH_MANY_SEQUENCES
"""Keyword arguments of `generate()` that leave K and V of a token what they are. All others are refused: they could
change them, bring another cache, or do what a later version of transformers will make of them."""


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
    if model.training:
        return "it is in training mode, where dropout changes KV: call model.eval()"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on: KV must be of the model's dtype"
    return None


def _rope_type(config: object) -> str | None:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return (rope.get("rope_type") or rope.get("type")) if isinstance(rope, Mapping) else None


def check_call(model: PreTrainedModel, settings: Mapping[str, object], tokens: int) -> None:
    """Raises ConfigError for keyword arguments of `generate()`, or a generation config, that cannot be served with
    a prompt of `tokens` tokens."""
    given = {name: value for name, value in settings.items() if value is not None}
    for name in _TAKEN_OVER:
        if name in given:
            raise ConfigError(f"generate({name}=...): the prefix cache passes that itself, leave it out")
    mask = given.get("attention_mask")
    if mask is not None and not _is_all_ones(mask, tokens):
        raise ConfigError("generate(attention_mask=...): padding is not supported, pass the tokens without it")
    effective = {**_in_effect(model, given), **given}
    for name in ("num_beams", "num_return_sequences"):
        if (count := effective.get(name, 1)) != 1:
            raise ConfigError(f"generate({name}={count}): one sequence at a time is supported")
    if effective.get("use_cache") is False:
        raise ConfigError("generate(use_cache=False): there is nothing to restore then")
    for name in sorted(name for name, value in effective.items() if name not in ALLOWED and value is not False):
        raise ConfigError(
            f"generate({name}={_short(effective[name])}) is not supported: it is not known to leave K and V as they "
            "are. Leave it out, or call the model without the prefix cache"
        )


def _is_all_ones(mask: object, tokens: int) -> bool:
    tensor = torch.as_tensor(mask)
    return tensor.shape in ((tokens,), (1, tokens)) and bool((tensor == 1).all())


def _in_effect(model: PreTrainedModel, given: Mapping[str, object]) -> dict[str, object]:
    """What the call's generation config sets, else the model's, where it is not the default."""
    config = given.get("generation_config", model.generation_config)
    known = vars(GenerationConfig()).keys() - {"transformers_version", "_from_model_config"}
    changed = config.to_diff_dict() if isinstance(config, GenerationConfig) else {}
    return {name: value for name, value in changed.items() if name in known and value is not None}


def _short(value: object) -> str:
    return repr(value) if isinstance(value, bool | int | float | str) else "..."


def model_state(model: PreTrainedModel) -> tuple[object, ...]:
    """What changes when K and V of the model may: tensors that were replaced or written to, adapters that were
    switched, another attention, training mode, autocast. Compared, not kept on disk."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    adapters = [
        (getattr(module, "active_adapters", None), getattr(module, "disable_adapters", None))
        for module in model.modules()
        if hasattr(module, "lora_A")
    ]
    return (
        tuple((tensor.data_ptr(), tensor._version, tensor.dtype) for tensor in tensors),
        repr(adapters),
        model.config._attn_implementation,
        model.training,
        torch.is_autocast_enabled(model.device.type),
    )


def check_state(model: PreTrainedModel, opened: tuple[object, ...]) -> None:
    """Raises ConfigError if the model is not as it was when the cache was opened, with `model_state` of then."""
    now = model_state(model)
    whats = ("weights", "adapters", "attention implementation", "training mode", "autocast")
    for what, was, is_now in zip(whats, opened, now, strict=True):
        if was != is_now:
            raise ConfigError(f"the model's {what} changed while its prefix cache was open: open the cache again")


def token_ids(input_ids: torch.Tensor | Sequence[int]) -> list[int]:
    """The tokens of one sequence: a list, or a tensor (tokens,) or (1, tokens). Raises ConfigError for another
    shape, TokenError for what is no token id."""
    sequence: Any = input_ids.detach().cpu() if isinstance(input_ids, torch.Tensor) else input_ids
    if len(np.shape(sequence[:1])) == 2:  # a batch
        if len(sequence) != 1:
            raise ConfigError(f"{len(sequence)} sequences given: one at a time is supported")
        sequence = sequence[0]
    tokens: list[int] = token_array(sequence).tolist()
    if not tokens:
        raise ConfigError("no tokens given: a prompt of at least one is needed")
    return tokens


def cache_argument(model: PreTrainedModel) -> str:
    """Under which name this version of transformers takes a cache."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
