"""The prefix cache of one process: what it shares, what it keeps apart, what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from chats import PAGE, Counted, tiers
from test_chats import SIZES

from hicache.errors import BadInput, ConfigError
from hicache.hashing import RequestNamespace
from hicache.integrations.transformers import PrefixCache
from hicache.integrations.transformers.identity import digest_of
from hicache.integrations.transformers.support import ALLOWED

GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
PROMPT = torch.randint(3, 300, (1, 100), generator=torch.Generator().manual_seed(1))


def tiny(family: str = "Llama", seed: int = 0, **settings: Any) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = getattr(transformers, family + "Config")(**{**SIZES, **settings})
    return getattr(transformers, family + "ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.fixture
def cache(model: Any) -> Iterator[PrefixCache]:
    with PrefixCache.open(model, tiers(None)) as made:
        yield made
        assert made.wait()
        made.hicache.check_integrity()


def prefilled(cache: PrefixCache, prompt: torch.Tensor = PROMPT, **settings: Any) -> int:
    with Counted(cache.model) as counted:
        cache.generate(prompt, **{**GREEDY, **settings})
    return counted.tokens - 7


# ---- sharing --------------------------------------------------------------------------------------


def test_the_second_time_only_what_is_no_whole_page_is_computed(cache: PrefixCache) -> None:
    assert prefilled(cache) == 100
    assert prefilled(cache) == 100 - 96
    assert cache.stats().hit_tokens["device"] == 96


def test_a_prompt_of_whole_pages_leaves_one_token_to_compute(cache: PrefixCache) -> None:
    assert prefilled(cache, PROMPT[:, :96]) == 96
    assert prefilled(cache, PROMPT[:, :96]) == PAGE  # a page is used whole, or not at all


def test_another_beginning_shares_nothing_and_a_common_one_does(cache: PrefixCache) -> None:
    prefilled(cache)
    other = PROMPT.clone()
    other[0, 50] = 299 if other[0, 50] != 299 else 298
    assert prefilled(cache, other) == 100 - 48
    other[0, 0] = 299 if other[0, 0] != 299 else 298
    assert prefilled(cache, other) == 100


def test_answers_are_cached_too(cache: PrefixCache) -> None:
    sequence = cache.generate(PROMPT, **{**GREEDY, "max_new_tokens": 30})
    longer = torch.cat([sequence, PROMPT[:, :10]], 1)
    assert prefilled(cache, longer) == longer.shape[1] - (sequence.shape[1] - 1) // PAGE * PAGE


def test_namespaces_share_nothing(cache: PrefixCache) -> None:
    for namespace in (None, RequestNamespace(salt="a"), RequestNamespace(salt="b"), RequestNamespace(adapter="a")):
        assert prefilled(cache, namespace=namespace) == 100
        assert prefilled(cache, namespace=namespace) == 4


def test_lists_and_outputs_of_all_kinds(cache: PrefixCache) -> None:
    truth = cache.model.generate(PROMPT, **GREEDY)
    prompts = [PROMPT, PROMPT[0], PROMPT[0].tolist()]
    assert all(torch.equal(cache.generate(prompt, **GREEDY), truth) for prompt in prompts)
    output = cache.generate(PROMPT, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(output.sequences, truth)


def test_a_loop_of_ones_own(cache: PrefixCache) -> None:
    truth = cache.model.generate(PROMPT, **GREEDY)
    for known in (0, 96):
        with cache.prefix(PROMPT) as past:
            assert past.tokens == known
            sequence, rest = PROMPT, PROMPT[:, past.tokens :]
            for _ in range(8):
                logits = cache.model(rest, **{cache._argument: past.cache}).logits
                rest = logits[:, -1:].argmax(-1)
                sequence = torch.cat([sequence, rest], 1)
            assert past.store(sequence) == 96
        assert torch.equal(sequence, truth)


def test_sampling_is_as_without_a_cache(cache: PrefixCache) -> None:
    settings = {**GREEDY, "do_sample": True, "top_k": 20}
    prefilled(cache)
    torch.manual_seed(5)
    truth = cache.model.generate(PROMPT, **settings)
    torch.manual_seed(5)
    assert torch.equal(cache.generate(PROMPT, **settings), truth)


def test_small_tiers_keep_what_fits(model: Any) -> None:
    truth = model.generate(PROMPT, **GREEDY)
    with PrefixCache.open(model, tiers(None, size="64 tokens")) as cache:
        for _ in range(2):
            assert torch.equal(cache.generate(PROMPT, **GREEDY), truth)
        assert prefilled(cache) == 100 - 64
        other = torch.flip(PROMPT, (1,))
        assert prefilled(cache, other) == 100
        assert prefilled(cache, other) == 100 - 64
        assert prefilled(cache) == 100 - 64  # from the host
        cache.wait()
        cache.hicache.check_integrity()


# ---- failures -------------------------------------------------------------------------------------


def test_an_error_within_leaves_nothing_behind(cache: PrefixCache) -> None:
    prefilled(cache)
    with pytest.raises(KeyError), cache.prefix(PROMPT):
        raise KeyError
    assert cache.hicache.protected_size() == 0
    assert prefilled(cache) == 4


class FailingCopier:
    """Copies to the device fail, `left` times."""

    def __init__(self, inner: Any, left: int) -> None:
        self.inner, self.left = inner, left

    def copy(self, device_pages: Any, host_pages: Any) -> Any:
        copy = self.inner.copy(device_pages, host_pages)
        if self.left:
            self.left -= 1
            return SimpleNamespace(gather=copy.gather, scatter=_fail)
        return copy


def _fail(*args: Any) -> None:
    raise RuntimeError("the copy fails")


@pytest.mark.parametrize("failures, known", [(1, 64), (2, 64), (9, 0)])
def test_a_copy_that_fails_is_tried_again_then_computed(model: Any, failures: int, known: int) -> None:
    truth = model.generate(PROMPT, **GREEDY)
    with PrefixCache.open(model, tiers(None, size="64 tokens")) as cache:
        prefilled(cache)
        prefilled(cache, torch.flip(PROMPT, (1,)))
        assert cache.wait()  # the first is on the host only now
        host = cache.hicache.tiers.host
        assert host is not None
        failing = host.copies.wrap_copier(lambda copier: FailingCopier(copier, failures))
        with Counted(model) as counted:
            assert torch.equal(cache.generate(PROMPT, **GREEDY), truth)
        assert counted.tokens - 7 == 100 - known
        assert cache.stats().failures["copy"] == min(failures, 3)
        failing.left = 0
        assert torch.equal(cache.generate(PROMPT, **GREEDY), truth)
        assert cache.wait()
        cache.hicache.check_integrity()


def test_other_weights_or_settings_find_nothing_on_disk(tmp_path: Path) -> None:
    def run(model: Any) -> int:
        with PrefixCache.open(model, tiers(tmp_path)) as cache:
            return prefilled(cache)

    assert run(tiny()) == 100
    assert run(tiny()) == 4
    assert run(tiny(seed=1)) == 100
    changed = tiny()
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    assert digest_of(changed) != digest_of(tiny())
    assert run(changed) == 100
    assert run(tiny(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})) == 100
    assert run(tiny(rms_norm_eps=1e-3)) == 100
    assert run(tiny()) == 4


def test_a_sequence_that_is_not_of_this_prompt(cache: PrefixCache) -> None:
    with cache.prefix(PROMPT) as past, pytest.raises(ConfigError, match="does not begin with the prompt"):
        past.store(torch.flip(PROMPT, (1,)))


def test_kv_of_another_dtype(cache: PrefixCache) -> None:
    with cache.prefix(PROMPT) as past:
        for layer in range(3):
            states = torch.zeros(1, 2, 100, 16, dtype=torch.bfloat16)
            past.cache.update(states, states, layer)
        with pytest.raises(ConfigError, match=r"holds \(1, 2, 100, 16\) torch.bfloat16 in layer 0.*without autocast"):
            past.store(PROMPT)
    assert prefilled(cache) == 100


# ---- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"past_key_values": object()}, r"past_key_values=...\): the prefix cache passes that itself"),
        ({"inputs_embeds": torch.zeros(1, 3, 64)}, "inputs_embeds"),
        ({"attention_mask": torch.tensor([[0] + [1] * 99])}, "padding is not supported"),
        ({"num_beams": 2}, r"num_beams=2\): one sequence at a time"),
        ({"num_return_sequences": 3, "do_sample": True}, "num_return_sequences=3"),
        ({"cache_implementation": "static"}, "cache_implementation='static'.*not known to leave K and V"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"use_cache": False}, "nothing to restore"),
        ({"generation_config": transformers.GenerationConfig(num_beams=4)}, "num_beams=4"),
        ({"generation_config": transformers.GenerationConfig(guidance_scale=2.0)}, "guidance_scale=2.0"),
        ({"position_ids": torch.arange(100)[None]}, r"position_ids=...\) is not supported"),
        ({"cache_position": torch.arange(100)}, "cache_position"),
        ({"token_type_ids": torch.zeros(1, 100)}, "token_type_ids"),
        ({"attention_mask": torch.ones(1, 99)}, "padding is not supported"),
        ({"attention_mask": torch.ones(1, 1, 100, 100)}, "padding is not supported"),
        ({"attention_mask": 2 * torch.ones(1, 100)}, "padding is not supported"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"assistant_model": object()}, "assistant_model=..."),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
        ({"prefill_chunk_size": 32}, "prefill_chunk_size=32"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"custom_generate": "someone/loop"}, "custom_generate='someone/loop'"),
        ({"of_a_later_version": 1}, "of_a_later_version=1"),
    ],
)
def test_calls_that_cannot_be_served(cache: PrefixCache, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        cache.generate(PROMPT, **settings)
    assert "\n" not in str(caught.value)


def test_a_mask_without_padding_is_fine(cache: PrefixCache) -> None:
    assert prefilled(cache, attention_mask=torch.ones(1, 100, dtype=torch.int64)) == 100


@pytest.mark.parametrize(
    "prompt, message",
    [
        (PROMPT.repeat(2, 1), "2 sequences given: one at a time"),
        (PROMPT[:, :0], "no tokens given"),
        ([], "no tokens given"),
        (PROMPT.float(), "of type float32, integers are needed"),
        (PROMPT + 2**32, r"tokens\[0\] is 4294967"),
        (PROMPT[None], r"they have shape \(1, 1, 100\), one sequence"),
        ({"attention_mask": torch.ones(1, 100)}, "there are no input_ids in it"),
    ],
)
def test_prompts_that_cannot_be_served(cache: PrefixCache, prompt: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        cache.generate(prompt)


def test_what_a_tokenizer_returns_is_a_prompt(cache: PrefixCache) -> None:
    truth = cache.model.generate(PROMPT, **GREEDY)
    for _ in range(2):
        encoded = transformers.BatchEncoding({"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)})
        assert torch.equal(cache.generate(encoded, **GREEDY), truth)
        assert torch.equal(cache.generate(**encoded, **GREEDY), truth)
    with pytest.raises(ConfigError, match="padding"):
        cache.generate({"input_ids": PROMPT, "attention_mask": torch.zeros_like(PROMPT)})


def test_every_allowed_setting_leaves_the_kv_of_the_prompt_as_it_is(model: Any) -> None:
    """Each alone, then a plain call: it finds all pages, and they have the bytes that a plain call computes."""
    values: dict[str, Any] = {
        **dict.fromkeys(("do_sample", "remove_invalid_values", "renormalize_logits", "early_stopping"), True),
        **dict.fromkeys(("output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"), True),
        **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "top_p", "typical_p", "temperature"), 0.5),
        **dict.fromkeys(("top_k", "no_repeat_ngram_size", "max_time", "length_penalty"), 3),
        "repetition_penalty": 1.5,
        "bad_words_ids": [[5]],
        "suppress_tokens": [5, 6],
        "begin_suppress_tokens": [5, 6],
        "sequence_bias": [[[5], 2.0]],
        "exponential_decay_length_penalty": (3, 1.5),
        "forced_eos_token_id": 2,
    }
    assert values.keys() <= ALLOWED
    for name, value in values.items():
        with PrefixCache.open(model, tiers(None)) as cache, PrefixCache.open(model, tiers(None)) as plain:
            cache.generate(PROMPT, **{**GREEDY, name: value})
            plain.generate(PROMPT, **GREEDY)
            with cache.prefix(PROMPT) as found, plain.prefix(PROMPT) as wanted:
                assert found.tokens == wanted.tokens == 96, name
                for layer, other in zip(found.cache.layers, wanted.cache.layers, strict=True):
                    assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values), name


@pytest.mark.parametrize(
    "change, what",
    [
        (lambda model: _write(model), "weights"),
        (lambda model: model.double(), "weights"),
        (lambda model: model.load_state_dict(tiny(seed=3).state_dict()), "weights"),
        (lambda model: model.set_attn_implementation("eager"), "attention implementation"),
        (lambda model: model.train(), "training mode"),
    ],
)
def test_a_model_that_changes_under_its_cache_is_refused(change: Callable[[Any], None], what: str) -> None:
    model = tiny()
    with PrefixCache.open(model, tiers(None)) as cache:
        prefilled(cache)
        change(model)
        with pytest.raises(ConfigError, match=f"the model's {what} changed while its prefix cache was open"):
            cache.generate(PROMPT, **GREEDY)


def _write(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1


def test_autocast_and_training_are_refused(model: Any) -> None:
    with PrefixCache.open(model, tiers(None)) as cache, torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ConfigError, match="autocast changed"):
            cache.generate(PROMPT, **GREEDY)
        with pytest.raises(ConfigError, match="autocast is on"):
            PrefixCache.open(model, tiers(None))
    with pytest.raises(ConfigError, match=r"training mode.*call model.eval\(\)"):
        PrefixCache.open(tiny().train(), tiers(None))


@pytest.mark.parametrize(
    "family, settings, message",
    [
        ("Mistral", {"sliding_window": 64}, "keep something else than all K and V"),
        ("Gemma3", {"sliding_window": 64, "head_dim": 16}, "keep something else than all K and V"),
        ("DeepseekV3", {"num_hidden_layers": 2, "first_k_dense_replace": 2}, r"\(MLA\)"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            r"rotary positions \(dynamic\) change",
        ),
    ],
)
def test_models_that_cannot_be_cached(family: str, settings: dict[str, Any], message: str) -> None:
    names = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
    config, kind = names.get(family, (family + "Config", family + "ForCausalLM"))
    with torch.device("meta"):
        model = getattr(transformers, kind)(getattr(transformers, config)(**{**SIZES, **settings}))
    with pytest.raises(ConfigError, match=message):
        PrefixCache.open(model, tiers(None))


def test_an_encoder_decoder_and_weights_that_are_not_there() -> None:
    with torch.device("meta"):
        t5 = transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2)
        )
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with pytest.raises(ConfigError, match="encoder-decoder"):
        PrefixCache.open(t5, tiers(None))
    with pytest.raises(ConfigError, match="weights are on meta"):
        PrefixCache.open(llama, tiers(None))


def test_configurations(model: Any, tmp_path: Path) -> None:
    file = tmp_path / "tiers.yaml"
    file.write_text("page_size: 16\ntiers:\n  - {tier: device, device: cpu, size: 1024 tokens}\n")
    with PrefixCache.open(model, file) as cache:
        assert prefilled(cache) == 100
        assert prefilled(cache) == 4
    file.write_text("page_size: 16\ntiers:\n  - {tier: device, device: cpu, sise: 1024 tokens}\n")
    with pytest.raises(ConfigError, match=r"tiers.yaml:3: tiers\[0\].sise: unknown key, did you mean 'size'"):
        PrefixCache.open(model, file)
    with pytest.raises(ConfigError, match="a size needs a unit"):
        PrefixCache.open(model, tiers(None, size=1024))


def test_closing_twice_is_nothing(model: Any) -> None:
    cache = PrefixCache.open(model, tiers(None))
    cache.close()
    cache.close()
