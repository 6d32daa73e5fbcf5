from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from hicache.errors import ConfigError
from hicache.sim.generator import ChatWorkload, generate
from hicache.sim.workload import TraceRequest

SMALL = ChatWorkload(
    seed=3, conversations=30, system_tokens=64, tool_tokens=96, user_tokens=20, output_tokens=12, context_tokens=1500
)


def fingerprint(requests: list[TraceRequest]) -> str:
    digest = hashlib.sha256()
    for request in requests:
        assert request.output is not None
        digest.update(f"{request.rid} {request.arrival_ms!r} {request.session}".encode())
        digest.update(request.namespace + request.tokens().tobytes() + request.output.tobytes())
    return digest.hexdigest()


def conversations(requests: list[TraceRequest]) -> dict[str | None, list[TraceRequest]]:
    found = defaultdict(list)
    for request in requests:
        found[request.session].append(request)
    return found


def test_another_process_generates_the_same() -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[1].split(':'); import runpy;"
        "t = runpy.run_path(sys.argv[2]); print(t['fingerprint'](t['generate'](t['SMALL'])))"
    )
    command = [sys.executable, "-c", script, ":".join(filter(None, sys.path)), __file__]
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == fingerprint(generate(SMALL))


def test_another_seed_generates_something_else() -> None:
    assert fingerprint(generate(SMALL)) != fingerprint(generate(replace(SMALL, seed=4)))


def test_a_turn_starts_with_everything_said_before() -> None:
    many = 0
    for turns in conversations(generate(SMALL)).values():
        for before, after in itertools.pairwise(turns):
            assert before.output is not None
            said = np.concatenate([before.tokens(), before.output])
            assert after.prompt_len > len(said)
            assert np.array_equal(after.tokens()[: len(said)], said)
            assert after.arrival_ms >= before.arrival_ms
            many += 1
    assert many > 50


def test_requests_arrive_in_order_and_interleaved() -> None:
    requests = generate(SMALL)
    arrivals = [request.arrival_ms for request in requests]
    assert arrivals == sorted(arrivals)
    sessions = [request.session for request in requests]
    changes = sum(a != b for a, b in itertools.pairwise(sessions))
    assert changes > len(set(sessions))
    assert len({request.rid for request in requests}) == len(requests)


def test_openings_are_shared_and_lengths_are_as_declared() -> None:
    requests = generate(SMALL)
    openings = {request.tokens()[:64].tobytes() for request in requests}
    assert 1 < len(openings) <= SMALL.system_prompts
    for request in requests:
        assert request.output is not None
        assert request.output_len == len(request.output) >= 1
        assert request.prompt_len + request.output_len <= SMALL.context_tokens
        assert request.tokens().min() >= 0
        assert request.tokens().max() < SMALL.vocabulary


def test_agents_share_their_tool_prompts() -> None:
    agents = generate(replace(SMALL, agents=1.0))
    tools = {request.tokens()[64:160].tobytes() for request in agents}
    assert 1 < len(tools) <= SMALL.tool_prompts


def test_agents_take_more_turns_and_think_faster() -> None:
    plain = replace(SMALL, conversations=200, context_tokens=10**6, agents=0.0)
    chats, agents = generate(plain), generate(replace(plain, agents=1.0))
    assert len(agents) > 2 * len(chats)

    def mean_gap(requests: list[TraceRequest]) -> float:
        turns = conversations(requests).values()
        gaps = [b.arrival_ms - a.arrival_ms for chat in turns for a, b in itertools.pairwise(chat)]
        return sum(gaps) / len(gaps)

    assert mean_gap(agents) < mean_gap(chats) / 2


def test_the_context_can_be_filled_to_the_last_token() -> None:
    exact = replace(SMALL, sigma=0.0, turns=50.0, agents=0.0, context_tokens=64 + 5 * (20 + 12))
    longest = max(request.prompt_len + request.output_len for request in generate(exact))
    assert longest == exact.context_tokens


def test_tenants_have_namespaces_of_their_own() -> None:
    assert {request.namespace for request in generate(SMALL)} == {b""}
    tenants = conversations(generate(replace(SMALL, tenants=3)))
    assert len({turns[0].namespace for turns in tenants.values()}) == 3
    assert all(len({turn.namespace for turn in turns}) == 1 for turns in tenants.values())


@pytest.mark.parametrize(
    "change", [{"conversations": 0}, {"agents": 1.5}, {"agents": -0.1}, {"context_tokens": 160}, {"turns": 0.5}]
)
def test_impossible_parameters_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(SMALL, **change)  # type: ignore[arg-type]
