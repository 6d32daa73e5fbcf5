"""A Llama of 3 million random weights, and adapters for it."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

LAYERS, HIDDEN = 4, 256


def make_model(folder: Path) -> Path:
    """`initializer_range` spreads the logits, so that a greedy choice is never close."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).save_pretrained(folder, safe_serialization=True)
    return folder


def make_windowed(folder: Path, family: str) -> Path:
    """A model with sliding windows: "mistral" in all layers, "gemma3" in all but each fourth."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 1024,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "sliding_window": 128,
        "initializer_range": 0.08,
    }
    if family == "mistral":
        model = MistralForCausalLM(MistralConfig(**sizes))
    else:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, head_dim=64, sliding_window_pattern=4))
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA of rank 8 on the queries and values of all layers."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, width in (("q_proj", HIDDEN), ("v_proj", HIDDEN // 2)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, HIDDEN, generator=generator) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
