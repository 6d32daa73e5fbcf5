"""Chats served three times: without cache, through tiers far too small for them, and again after a restart from disk.

One request at a time, so that a time to first token is the request's own. Every token has to be the same all three
times; in exact mode every logit, too, bit for bit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hicache.errors import ConfigError
from hicache.serving.blocks import Mode
from hicache.serving.chat import Message, render_chat
from hicache.serving.engine import Engine, Surroundings
from hicache.serving.loaded import LoadedModel
from hicache.serving.metrics import RequestMetrics
from hicache.serving.outputs import GenerationHandle, GenerationRequest
from hicache.serving.setup import build_engine, plain_engine, serving_config
from hicache.serving.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called after a turn with the name of the pass, the turns served so far and the turns of all passes."""

TIERS = ("device", "host", "storage")
RECOMPUTE = "recompute"

_RECENT, _RETURNS = 3, 0.4


@dataclass(frozen=True)
class Script:
    """What users say: `questions[i][j]` in turn j of conversation i. All conversations open with `system`."""

    system: str
    questions: tuple[tuple[str, ...], ...]

    def order(self, seed: int) -> list[int]:
        """Whose turn it is: often one of the last few who spoke, else anybody; nobody twice in a row until the end."""
        draw, left = random.Random(seed), [len(questions) for questions in self.questions]
        order: list[int] = []
        while any(left):
            others = [number for number, turns in enumerate(left) if turns and order[-1:] != [number]]
            recent = [number for number in others if number in order[-_RECENT:]]
            chosen = recent if recent and draw.random() < _RETURNS else others
            order.append(draw.choice(chosen or order[-1:]))
            left[order[-1]] -= 1
        return order


@dataclass(frozen=True)
class DemoOptions:
    """Sizes in tokens. An answer has up to `answer_tokens`; with `ignore_eos` exactly so many."""

    script: Script
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    answer_tokens: int = 16
    ignore_eos: bool = False
    page_size: int = 16
    mode: Mode = "exact"
    seed: int = 0
    device: str = "auto"


@dataclass(frozen=True)
class Turn:
    """A question with its answer. `logits` is a digest of all rows of logits that its tokens were chosen from."""

    conversation: int
    question: str
    answer: str
    tokens: tuple[int, ...]
    logits: str
    metrics: RequestMetrics

    @property
    def source(self) -> str:
        """The slowest place that the prompt came from: the model if it computed most of it, else a tier."""
        cached = self.metrics.cached_tokens
        if 2 * sum(cached.values()) < self.metrics.prompt_tokens:
            return RECOMPUTE
        return max((tier for tier in TIERS if cached[tier]), key=TIERS.index)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        assert self.metrics.ttft is not None
        return self.metrics.ttft


@dataclass(frozen=True)
class Pass:
    """All turns, served once."""

    name: str
    turns: Sequence[Turn]
    seconds: float
    open_seconds: float
    evidence: dict[str, Any]

    def sums(self) -> dict[str, int]:
        """Tokens of all turns: prompt, by tier those reused, computed, output."""
        metrics = [turn.metrics for turn in self.turns]
        reused = {tier: sum(one.cached_tokens[tier] for one in metrics) for tier in TIERS}
        prompt = sum(one.prompt_tokens for one in metrics)
        output = sum(one.output_tokens for one in metrics)
        return {"prompt": prompt, **reused, "computed": sum(one.computed_tokens for one in metrics), "output": output}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        turns = [{**asdict(turn), "source": turn.source} for turn in self.turns]
        return {
            "seconds": round(self.seconds, 3),
            "open_seconds": round(self.open_seconds, 3),
            "tokens": self.sums(),
            "evidence": self.evidence,
            "turns": turns,
        }


@dataclass(frozen=True)
class Timing:
    """Median times to the first token, in seconds, of turns of one source; beside, those of the same turns without
    cache. `prompt` is the median length of their prompts in tokens."""

    source: str
    turns: int
    prompt: int
    ttft: float
    plain: float

    @property
    def ratio(self) -> float:
        """How many times faster than without cache."""
        return self.plain / self.ttft


@dataclass(frozen=True)
class DemoResult:
    """The three passes. `failures` has a line for everything that was not as it must be."""

    plain: Pass
    warm: Pass
    restart: Pass

    def timings(self, served: Pass) -> list[Timing]:
        """One for each source of this pass."""
        timings = []
        for source in (RECOMPUTE, *TIERS):
            pairs = [pair for pair in zip(served.turns, self.plain.turns) if pair[0].source == source]
            if pairs:
                prompt = round(median(turn.metrics.prompt_tokens for turn, _ in pairs))
                times = (median(pair[which].ttft for pair in pairs) for which in (0, 1))
                timings.append(Timing(source, len(pairs), prompt, *times))
        return timings

    @property
    def different(self) -> list[str]:
        """Turns whose output is not that of the pass without cache."""
        exact = self.plain.evidence["mode"] == "exact"
        return [
            f"{served.name}: the answer to turn {number} of {len(served.turns)} differs"
            for served in (self.warm, self.restart)
            for number, (turn, plain) in enumerate(zip(served.turns, self.plain.turns), 1)
            if turn.tokens != plain.tokens or (exact and turn.logits != plain.logits)
        ]

    @property
    def failures(self) -> list[str]:
        """Answers that differ, and tiers that served nothing."""
        warm, restart = self.warm.sums(), self.restart.sums()
        idle = [f"{self.warm.name}: {tier} served no hits" for tier in TIERS if not warm[tier]]
        if not restart["storage"]:
            idle.append(f"{self.restart.name}: storage served no hits")
        return [*self.different, *idle]

    def to_json(self) -> dict[str, Any]:
        """Plain values; times in seconds."""
        passes = {"no_cache": self.plain, "cold_to_warm": self.warm, "restart": self.restart}
        return {
            "passes": {name: served.to_json() for name, served in passes.items()},
            "ttft": {
                name: [{**asdict(timing), "ratio": round(timing.ratio, 2)} for timing in self.timings(served)]
                for name, served in passes.items()
            },
            "equal": not self.different,
            "failures": self.failures,
        }


def run_demo(
    loaded: LoadedModel, options: DemoOptions, folder: Path, progress: Progress = lambda name, done, total: None
) -> DemoResult:
    """Serve the script three times; the store is made in `folder`.

    Raises IntegrityError if a page is lost after a turn, ConfigError for a model without tokenizer.
    """
    return _Demo(loaded, options, folder, progress).run()


class _Demo:
    def __init__(self, loaded: LoadedModel, options: DemoOptions, folder: Path, progress: Progress) -> None:
        if loaded.tokenizer is None:
            raise ConfigError(f"{loaded.name}: has no tokenizer, which a chat needs")
        self._loaded, self._tokenizer = loaded, loaded.tokenizer
        self._options = options
        self._folder = folder
        self._progress = progress
        self._order = options.script.order(options.seed)
        self._digest = sha256()
        self._done = 0

    def run(self) -> DemoResult:
        threads = torch.get_num_threads()
        torch.set_num_threads(max(threads // 2, 1))  # the other cores copy, read and write
        try:
            return DemoResult(
                self._pass("no cache", self._plain),
                self._pass("cold to warm", self._tiered),
                self._pass("after a restart", self._tiered),
            )
        finally:
            torch.set_num_threads(threads)

    def _plain(self) -> Engine:
        options = self._options
        around = self._around()
        engine = plain_engine(
            self._loaded, options.device_tokens, mode=options.mode, surroundings=around, device=options.device
        )
        engine.generate([GenerationRequest([1] * 64, 2, ignore_eos=True)])  # torch's first calls are slow
        return engine

    def _tiered(self) -> Engine:
        options = self._options
        prefetch = {"policy": "wait_complete", "deadline": "10s"}
        tiers: list[dict[str, object]] = [
            {"tier": "device", "device": options.device, "size": f"{options.device_tokens} tokens"},
            {"tier": "host", "size": f"{options.host_tokens} tokens"},
            {
                "tier": "storage",
                "path": str(self._folder / "store"),
                "size": f"{options.disk_tokens} tokens",
                "prefetch": prefetch,
            },
        ]
        config = serving_config(self._loaded, tiers, options.page_size, options.mode, poison=True)
        return build_engine(self._loaded, config, mode=options.mode, surroundings=self._around())

    def _around(self) -> Surroundings:
        return Surroundings(seed=self._options.seed, on_logits=self._saw)

    def _saw(self, rid: str, position: int, logits: torch.Tensor) -> None:
        self._digest.update(logits.contiguous().numpy().data)

    def _pass(self, name: str, make: Callable[[], Engine]) -> Pass:
        opening = time.perf_counter()
        engine = make()
        start = time.perf_counter()
        try:
            turns = self._talk(engine, name)
            seconds = time.perf_counter() - start
            evidence = {**engine.report()["evidence"], "mode": self._options.mode}
        finally:
            engine.close()
        return Pass(name, turns, seconds, start - opening, evidence)

    def _talk(self, engine: Engine, name: str) -> list[Turn]:
        script, total = self._options.script, 3 * len(self._order)
        dialogues = [_Dialogue(self._loaded, self._tokenizer, script.system) for _ in script.questions]
        turns = []
        for number in self._order:
            turns.append(self._turn(engine, dialogues[number], number))
            self._done += 1
            self._progress(name, self._done, total)
        return turns

    def _turn(self, engine: Engine, dialogue: _Dialogue, conversation: int) -> Turn:
        options = self._options
        question = options.script.questions[conversation][dialogue.turns]
        prompt = dialogue.ask(question)
        self._digest = sha256()
        request = GenerationRequest(prompt, options.answer_tokens, ignore_eos=options.ignore_eos)
        (handle,) = engine.generate([request])
        dialogue.answered(handle)
        engine.settle()  # copies land while the user thinks, so that every run evicts the same pages
        assert handle.metrics is not None
        tokens, digest = tuple(handle.token_ids), self._digest.hexdigest()
        return Turn(conversation, question, handle.text, tokens, digest, handle.metrics)


class _Dialogue:
    """One conversation as text and as tokens. Of an answer the tokens are kept, not its text encoded anew: other
    tokens would be another prefix."""

    def __init__(self, loaded: LoadedModel, tokenizer: Tokenizer, system: str) -> None:
        self._chat, self._tokenizer = loaded.chat, tokenizer
        self._messages = [Message("system", system)]
        self._text = ""
        self._tokens: list[int] = []
        self.turns = 0

    def ask(self, question: str) -> list[int]:
        """The prompt of the next turn."""
        self._messages.append(Message("user", question))
        text = render_chat(self._messages, self._tokenizer, self._chat)
        if text.startswith(self._text):
            self._tokens = self._tokens + self._tokenizer.encode(text[len(self._text) :], special=False)
        else:  # the template writes an answer in another way than the model does
            self._tokens = self._tokenizer.encode(text, special=False)
        self._text = text
        return self._tokens

    def answered(self, handle: GenerationHandle) -> None:
        """Take in the answer, without the token that ended it: the template writes it."""
        ended = handle.finish_reason == "stop"
        self._tokens = self._tokens + (handle.token_ids[:-1] if ended else handle.token_ids)
        self._messages.append(Message("assistant", handle.text))
        self._text += handle.text
        self.turns += 1


# ---- what is talked about -----------------------------------------------------------------------


def made_up_script(conversations: int = 12, turns: int = 6, seed: int = 0) -> Script:
    """For a made-up model: letters in lengths that are usual for tokens. The first question brings a document."""
    draw = random.Random(seed)
    openings = [_letters(draw, 384) for _ in range(conversations)]
    rest = [[_letters(draw, 64) for _ in range(turns - 1)] for _ in range(conversations)]
    questions = tuple((opening, *more) for opening, more in zip(openings, rest))
    return Script(_letters(draw, 256), questions)


def _letters(draw: random.Random, count: int) -> str:
    return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(count))


ENGLISH_SCRIPT = Script(
    "You are a friendly guide who talks to visitors of a small science museum. Answer each question in one short "
    "sentence, in plain words that a child of ten understands. Do not use lists. If you are not sure, say so "
    "and name a book or a place where the visitor can look it up. The museum has four rooms: one about the sea, one "
    "about the sky, one about animals of the forest, and one about machines. It opens at nine in the morning, and it "
    "closes at five in the afternoon. There is a café on the ground floor, and a garden with benches behind the house.",
    (
        (
            "Hello! Why is the sky blue?",
            "And why is it red in the evening?",
            "Does the Moon have a sky, too?",
            "Which room of the museum should I visit to learn more?",
        ),
        (
            "Good morning. What is the largest animal in the sea?",
            "What does it eat?",
            "How long can it stay under water?",
            "Is it in danger today?",
        ),
        (
            "Hi, how does a steam engine work?",
            "Who built the first good one?",
            "What do we use instead of it now?",
            "When does the museum close?",
        ),
        (
            "Hello, do foxes live in families?",
            "What do they eat in winter?",
            "Can I see one in the museum?",
            "Thank you! Is there a place to drink something?",
        ),
    ),
)

EMBEDDED = DemoOptions(
    made_up_script(),
    device_tokens=1792,
    host_tokens=2816,
    disk_tokens=24_576,
    answer_tokens=12,
    ignore_eos=True,
    seed=1,
)
"""For `random`."""

ENGLISH = DemoOptions(ENGLISH_SCRIPT, device_tokens=384, host_tokens=432, disk_tokens=4096, answer_tokens=40, seed=5)
"""For a model that understands English."""


def options_for(spec: str) -> DemoOptions:
    """The demo of the model that `spec` names."""
    return EMBEDDED if spec.partition(":")[0] == "random" else ENGLISH
