"""Seeded generator of long multi-turn chats and agent runs whose answers are known."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hicache.errors import ConfigError
from hicache.hashing import RequestNamespace
from hicache.sim.workload import TokenArray, TokenPrompt, TraceRequest

_SYSTEM, _TOOLS, _CONVERSATION = range(3)
"""What a random stream is for; part of its seed, so that no two things draw from the same stream."""


@dataclass(frozen=True)
class ChatWorkload:
    """Parameters of a workload. Lengths in tokens, times in ms; lengths are lognormal around their median.

    Every conversation opens with one of `system_prompts` shared prompts, the popular ones more often
    (Zipf). A share `agents` of the conversations are agents: a shared tool prompt follows, they take
    `agent_turn_factor` times as many turns and think `agent_turn_factor` times faster. The prompt of a turn
    is everything said before plus the new message. `tenants` > 1 spreads conversations over namespaces
    that share nothing.
    """

    seed: int = 0
    conversations: int = 200
    turns: float = 8.0
    system_prompts: int = 4
    system_tokens: int = 1024
    agents: float = 0.1
    agent_turn_factor: float = 3.0
    tool_prompts: int = 2
    tool_tokens: int = 4096
    user_tokens: int = 256
    output_tokens: int = 192
    sigma: float = 0.8
    context_tokens: int = 32_768
    start_gap_ms: float = 1_000.0
    think_ms: float = 15_000.0
    tenants: int = 1
    vocabulary: int = 50_000

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in ("seed", "agents", "sigma") else 1
            if getattr(self, field.name) < least:
                raise ConfigError(f"{field.name} is {getattr(self, field.name)}, it must be at least {least}")
        if self.agents > 1:
            raise ConfigError(f"agents is {self.agents}, it is a share and must be at most 1")
        opening = self.system_tokens + self.tool_tokens
        if self.context_tokens <= opening:
            raise ConfigError(f"context_tokens is {self.context_tokens}, it must exceed the {opening} shared tokens")


def generate(workload: ChatWorkload) -> list[TraceRequest]:
    """All requests in order of arrival. The same parameters give the same requests in every process."""
    shared = _SharedPrompts(workload)
    start = 0.0
    requests: list[TraceRequest] = []
    for index in range(workload.conversations):
        conversation = _Conversation(workload, shared, index)
        requests += conversation.requests(start)
        start += conversation.rng.exponential(workload.start_gap_ms)
    return sorted(requests, key=lambda request: (request.arrival_ms, request.rid))


def _stream(workload: ChatWorkload, purpose: int, index: int) -> np.random.Generator:
    return np.random.default_rng([workload.seed, purpose, index])


def _zipf_choice(rng: np.random.Generator, count: int) -> int:
    weights = 1.0 / np.arange(1, count + 1)
    return int(rng.choice(count, p=weights / weights.sum()))


class _SharedPrompts:
    def __init__(self, workload: ChatWorkload) -> None:
        self.system = [
            _tokens(_stream(workload, _SYSTEM, i), workload.system_tokens, workload)
            for i in range(workload.system_prompts)
        ]
        self.tools = [
            _tokens(_stream(workload, _TOOLS, i), workload.tool_tokens, workload) for i in range(workload.tool_prompts)
        ]


def _tokens(rng: np.random.Generator, count: int, workload: ChatWorkload) -> TokenArray:
    return rng.integers(0, workload.vocabulary, count, dtype=np.int32)


class _Conversation:
    """One chat: its whole history is one array, and every prompt and answer a view on it."""

    def __init__(self, workload: ChatWorkload, shared: _SharedPrompts, index: int) -> None:
        self.rng = _stream(workload, _CONVERSATION, index)
        self._workload = workload
        self._index = index
        self._opening = [shared.system[_zipf_choice(self.rng, len(shared.system))]]
        self._pace = 1.0
        if self.rng.random() < workload.agents:
            self._pace = workload.agent_turn_factor
            self._opening.append(shared.tools[_zipf_choice(self.rng, len(shared.tools))])
        self._namespace = self._tenant()

    def _tenant(self) -> bytes:
        if self._workload.tenants == 1:
            return b""
        return RequestNamespace(salt=f"tenant-{self.rng.integers(self._workload.tenants)}").encode()

    def requests(self, start_ms: float) -> list[TraceRequest]:
        turns = self._turns()
        history = np.concatenate([*self._opening, _tokens(self.rng, int(turns.sum()), self._workload)])
        requests, arrival = [], start_ms
        end = history.size - int(turns.sum())
        for turn, (user, output) in enumerate(turns.tolist()):
            prompt, end = end + user, end + user + output
            requests.append(self._request(turn, arrival, history[:prompt], history[prompt:end]))
            arrival += self.rng.exponential(self._workload.think_ms / self._pace)
        return requests

    def _request(self, turn: int, arrival: float, prompt: TokenArray, output: TokenArray) -> TraceRequest:
        rid = f"{self._index:05d}.{turn:04d}"
        session = str(self._index)
        return TraceRequest(rid, arrival, session, TokenPrompt(prompt), len(output), output, self._namespace)

    def _turns(self) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Lengths (turns, 2) of message and answer, as many turns as fit the context."""
        count = int(self.rng.geometric(min(1.0, 1.0 / (self._workload.turns * self._pace))))
        medians = (self._workload.user_tokens, self._workload.output_tokens)
        factors = self.rng.lognormal(0.0, self._workload.sigma, (count, 2))
        lengths = np.maximum(1, np.rint(medians * factors)).astype(np.int64)
        room = self._workload.context_tokens - sum(len(part) for part in self._opening)
        fitting = int(np.searchsorted(lengths.sum(1).cumsum(), room, side="right"))
        return lengths[:fitting]
