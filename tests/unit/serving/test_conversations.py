"""The users of the stress run are the same for the same seed, go on with their answers, and stay within their room."""

from __future__ import annotations

import itertools
import random

from hicache.serving.conversations import ConversationOptions, Population
from hicache.serving.outputs import GenerationRequest

OPTIONS = ConversationOptions(
    seed=4, conversations=12, turns=5, context=200, system_tokens=20, tool_tokens=40, user_tokens=16, answer_tokens=10
)


def talk(order: int, rounds: int = 200) -> tuple[Population, dict[int, list[GenerationRequest]]]:
    """Requests of each conversation; `order` decides who is asked to go on."""
    people, chosen, said = Population(OPTIONS), random.Random(order), dict[int, list[GenerationRequest]]()
    for number in range(rounds):
        conversation = chosen.choice(people.idle)
        request = people.next_request(conversation, str(number))
        said.setdefault(conversation.number, []).append(request)
        people.answered(conversation, [number % 7] * request.max_tokens)
    return people, said


def test_the_same_seed_says_the_same_whoever_is_first() -> None:
    first, second = talk(1)[1], talk(2)[1]
    for number in first.keys() & second.keys():
        assert first[number][0].prompt == second[number][0].prompt
        assert first[number][0].sampling == second[number][0].sampling


def test_a_prompt_begins_with_what_was_said() -> None:
    for requests in talk(1)[1].values():
        assert len(requests) <= OPTIONS.turns
        for before, after in itertools.pairwise(requests):
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert after.namespace == before.namespace
        assert all(len(request.prompt) + request.max_tokens <= OPTIONS.context for request in requests)


def test_as_many_are_under_way_at_any_time() -> None:
    people, said = talk(3)
    assert len(people.idle) == OPTIONS.conversations < people.started
    openings = {tuple(requests[0].prompt[: OPTIONS.system_tokens]) for requests in said.values()}
    assert len(openings) == OPTIONS.system_prompts
    assert len({requests[0].namespace for requests in said.values()}) == 2 * OPTIONS.tenants


def test_a_turn_that_was_aborted_is_forgotten() -> None:
    people = Population(OPTIONS)
    conversation = people.idle[0]
    before = list(conversation.history)
    people.next_request(conversation, "r")
    assert conversation not in people.idle
    people.dropped(conversation)
    assert conversation.history == before and conversation in people.idle
