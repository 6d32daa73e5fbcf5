"""What the KV of a model depends on: the `model` section of a configuration, taken from the model itself."""

from __future__ import annotations

import json
from pathlib import PurePath

import torch
from transformers import PretrainedConfig, PreTrainedModel
from xxhash import xxh3_128

_NOT_OF_THE_MODEL = {"transformers_version", "_name_or_path", "architectures", "use_cache", "return_dict", "dtype"}
"""Fields of a config.json that KV does not depend on, or that are told otherwise."""


def model_section(model: PreTrainedModel, weights_digest: str | None = None) -> dict[str, object]:
    """The `model` section for a model that `support.check_model` has passed. Reads all weights, unless their digest
    is given."""
    config = model.config
    heads = config.num_attention_heads
    return {
        "name": PurePath(config._name_or_path).name or type(model).__name__,
        "layers": config.num_hidden_layers,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "kind": "mha",
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights_digest": weights_digest or digest_of(model),
        "rope_scaling": settings_digest(config),
        "attention_backend": f"transformers {config._attn_implementation}",
    }


def digest_of(model: PreTrainedModel) -> str:
    """Of all parameters and buffers, by name, adapters too: about a second for 10 GB."""
    total = xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def settings_digest(config: PretrainedConfig) -> str:
    """Of what the weights do not tell: rotary positions, scalings, norms."""
    settings = {key: value for key, value in config.to_dict().items() if key not in _NOT_OF_THE_MODEL}
    return xxh3_128(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
