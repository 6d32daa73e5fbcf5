"""The demo: what it serves, what it compares, and that it notices what is wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from serving_engines import tiny_model

from hicache.errors import ConfigError
from hicache.serving import demo
from hicache.serving.chat import ChatFormat
from hicache.serving.demo import ENGLISH, DemoOptions, Script, made_up_script, options_for, run_demo
from hicache.serving.executor import TransformerModel
from hicache.serving.generation import Slice
from hicache.serving.loaded import LoadedModel
from hicache.serving.outputs import GenerationHandle
from hicache.serving.tokenizer import ByteTokenizer

CHATS = tuple(tuple(f"Chat {chat}, question {turn}, and some more words." for turn in range(3)) for chat in range(6))
SMALL = DemoOptions(
    Script("All chats begin with this.", CHATS), 192, 224, 4096, answer_tokens=4, ignore_eos=True, page_size=16
)


def test_outputs_are_equal_and_every_tier_serves(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    threads = torch.get_num_threads()
    result = run_demo(tiny_model(), SMALL, tmp_path, lambda *step: steps.append(step))
    assert result.failures == [] and result.different == []
    assert [step[1:] for step in steps] == [(done, 54) for done in range(1, 55)]
    assert torch.get_num_threads() == threads
    plain, warm, restart = (served.sums() for served in (result.plain, result.warm, result.restart))
    assert plain["prompt"] == warm["prompt"] == restart["prompt"]
    assert plain["device"] == plain["host"] == plain["storage"] == 0
    assert all(warm[tier] for tier in demo.TIERS) and restart["storage"]
    assert restart["computed"] < warm["computed"] < plain["computed"]
    for sums in (plain, warm, restart):
        reused = sum(sums[tier] for tier in demo.TIERS)
        assert sums["computed"] + reused == sums["prompt"] + sums["output"] - 18


def test_turns_are_timed_beside_the_same_turns_without_cache(tmp_path: Path) -> None:
    result = run_demo(tiny_model(), SMALL, tmp_path)
    for served in (result.plain, result.warm, result.restart):
        timings = result.timings(served)
        assert Counter(turn.source for turn in served.turns) == {one.source: one.turns for one in timings}
        assert all(one.ttft > 0 and one.plain > 0 for one in timings)
    assert [(one.source, one.ratio) for one in result.timings(result.plain)] == [("recompute", 1.0)]
    shown = result.to_json()
    assert shown["equal"] and shown["passes"].keys() == shown["ttft"].keys()


def test_another_answer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = TransformerModel.forward, 0

    def wrong(self: TransformerModel, batch: list[Slice], *rest: object) -> torch.Tensor:
        logits = forward(self, batch, *rest)  # type: ignore[arg-type]
        nonlocal calls
        calls += batch[0].generation.admission is not None and batch[0].generation.admission.prefix_len > 0
        return logits.roll(1, -1) if calls == 1 else logits

    monkeypatch.setattr(TransformerModel, "forward", wrong)
    result = run_demo(tiny_model(), SMALL, tmp_path)
    assert result.different and result.failures[: len(result.different)] == result.different
    assert result.different[0].startswith("cold to warm: the answer to turn ")
    assert not result.to_json()["equal"]


def test_logits_count_in_exact_mode_only(tmp_path: Path) -> None:
    result = run_demo(tiny_model(), SMALL, tmp_path)
    turns = [replace(result.warm.turns[0], logits="other"), *result.warm.turns[1:]]
    changed = replace(result, warm=replace(result.warm, turns=turns))
    assert changed.different == ["cold to warm: the answer to turn 1 of 18 differs"]
    fast = replace(changed, plain=replace(result.plain, evidence={"mode": "fast"}))
    assert fast.different == []


def test_tiers_that_serve_nothing_are_failures(tmp_path: Path) -> None:
    result = run_demo(tiny_model(), replace(SMALL, device_tokens=4096, host_tokens=4096), tmp_path)
    assert result.failures == ["cold to warm: host served no hits", "cold to warm: storage served no hits"]


def test_everybody_gets_all_turns_in_an_order_of_the_seed() -> None:
    script = made_up_script(5, 4)
    order = script.order(3)
    assert Counter(order) == dict.fromkeys(range(5), 4)
    assert order == script.order(3) != script.order(4)
    assert made_up_script(5, 4) == script != made_up_script(5, 4, seed=1)


def test_a_chat_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        run_demo(replace(tiny_model(), tokenizer=None), SMALL, tmp_path)


def test_other_models_talk_english() -> None:
    assert options_for("random:seed=1") is demo.EMBEDDED
    assert options_for("smollm2") is options_for("model.gguf") is ENGLISH


# ---- dialogues ----------------------------------------------------------------------------------


def dialogue(loaded: LoadedModel) -> demo._Dialogue:
    return demo._Dialogue(loaded, ByteTokenizer(), "Be kind.")


def test_the_tokens_of_an_answer_are_kept() -> None:
    talk = dialogue(tiny_model())
    first = talk.ask("Who?")
    assert bytes(first) == b"Be kind.\nWho?\n"
    talk.answered(GenerationHandle("a", [200, 201], "\ufffd\ufffd", finish_reason="length"))
    second = talk.ask("Why?")
    assert second == [*first, 200, 201, *b"\nWhy?\n"]
    talk.answered(GenerationHandle("b", [65, ByteTokenizer.EOS], "A", finish_reason="stop"))
    assert talk.ask("How?") == [*second, *b"A\nHow?\n"]


def test_a_template_that_rewrites_answers_gets_its_way() -> None:
    pytest.importorskip("jinja2")
    template = "{% for message in messages %}[{{ message.content | trim }}]{% endfor %}"
    talk = dialogue(replace(tiny_model(), chat=ChatFormat(template)))
    talk.ask("Who?")
    talk.answered(GenerationHandle("a", list(b" you "), " you ", finish_reason="length"))
    assert bytes(talk.ask("Why?")) == b"[Be kind.][Who?][you][Why?]"
