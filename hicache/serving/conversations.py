"""Users for the stress run: long chats and agents that go on with the answers they got."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hicache.hashing import RequestNamespace
from hicache.serving.outputs import GenerationRequest
from hicache.serving.sampling import SamplingParams


@dataclass(frozen=True)
class ConversationOptions:
    """Who talks about what; lengths in tokens.

    `conversations` are under way at any time; one that has had `turns` turns, or has no room left in `context`
    tokens, is followed by a new one. All open with one of `system_prompts` shared prompts. A share `agents` of them
    are agents: one of `tool_prompts` shared tool prompts follows. They belong to `tenants` tenants, and half of the
    agents use an adapter: neither shares with others. User messages and answers have up to `user_tokens` and
    `answer_tokens`. A share `sampled` of the requests is sampled rather than greedy.
    """

    seed: int = 0
    conversations: int = 200
    turns: int = 20
    context: int = 1536
    system_prompts: int = 4
    system_tokens: int = 96
    agents: float = 0.3
    tool_prompts: int = 2
    tool_tokens: int = 256
    user_tokens: int = 48
    answer_tokens: int = 32
    sampled: float = 0.5
    tenants: int = 2
    vocab: int = 256


@dataclass(eq=False)
class Conversation:
    """One chat: all that was said."""

    number: int
    namespace: RequestNamespace
    history: list[int]
    random: random.Random
    turns: int = 0
    asked: list[int] = field(default_factory=list)


class Population:
    """All conversations; the same seed gives the same ones, whatever the order in which they are asked to go on."""

    def __init__(self, options: ConversationOptions) -> None:
        self._options = options
        self.started = 0
        self.idle = [self._begin() for _ in range(options.conversations)]

    def next_request(self, chosen: Conversation, rid: str) -> GenerationRequest:
        """The next turn of a conversation that is idle: it is not, until `answered` or `dropped`."""
        self.idle.remove(chosen)
        options, draw = self._options, chosen.random
        message = _tokens(draw, draw.randint(1, options.user_tokens), options.vocab)
        chosen.asked = chosen.history + message
        sampling = SamplingParams(0.8, 20, 0.95, draw.randrange(1 << 32)) if draw.random() < options.sampled else None
        return GenerationRequest(
            chosen.asked,
            draw.randint(1, options.answer_tokens),
            sampling or SamplingParams(),
            rid,
            chosen.namespace,
            priority=int(draw.random() < 0.1),
        )

    def answered(self, conversation: Conversation, answer: list[int]) -> None:
        """A turn has ended; the conversation goes on, or another one begins in its place."""
        options = self._options
        conversation.history = conversation.asked + answer
        conversation.turns += 1
        room = options.context - len(conversation.history)
        over = conversation.turns >= options.turns or room < options.user_tokens + options.answer_tokens
        self.idle.append(self._begin() if over else conversation)

    def dropped(self, conversation: Conversation) -> None:
        """A turn was aborted: what was asked is forgotten."""
        self.idle.append(conversation)

    def _begin(self) -> Conversation:
        options, number = self._options, self.started
        self.started += 1
        draw = random.Random(f"{options.seed}/{number}")
        history = self._shared("system", draw.randrange(options.system_prompts), options.system_tokens)
        tenant = draw.randrange(options.tenants)
        namespace = RequestNamespace(salt=f"tenant-{tenant}")
        if draw.random() < options.agents:
            history += self._shared("tools", draw.randrange(options.tool_prompts), options.tool_tokens)
            if draw.random() < 0.5:
                namespace = RequestNamespace(salt=f"tenant-{tenant}", adapter="lora")
        return Conversation(number, namespace, history, draw)

    def _shared(self, kind: str, number: int, tokens: int) -> list[int]:
        return _tokens(random.Random(f"{self._options.seed}/{kind}/{number}"), tokens, self._options.vocab)


def _tokens(draw: random.Random, count: int, vocab: int) -> list[int]:
    return [draw.randrange(vocab) for _ in range(count)]
