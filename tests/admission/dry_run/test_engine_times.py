"""What a shadow takes in the engine that enforcing would leave: from its request's times, or from those of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.admission.dry_run.engine_times import EngineTimes, Room, SentRequest

TOKEN_US = 10_000


def asked(prompt: int = 100, most: int | None = 200, level: int = 0, *, stream: bool = True) -> Any:
    payload = SimpleNamespace(max_output_tokens=most, stream=stream)
    classification = SimpleNamespace(level=level, tenant=SimpleNamespace(name="acme"))
    return SimpleNamespace(payload=payload, classification=classification, prompt_tokens=prompt, requests=1, tokens=300)


class Engine:
    """An engine that the dry run sees. Its time for a token is 10 ms for each sequence that generates."""

    def __init__(self, room: int | None = None) -> None:
        self.times = EngineTimes(lambda: Room(None, room))
        self.now_us = 0

    def serve(self, at_once: int, output: int = 20, **more: Any) -> list[SentRequest]:
        """So many requests that begin and end together."""
        sent = [self.times.sent(asked(**more), self.now_us) for _ in range(at_once)]
        self.now_us += 50_000
        for request in sent:
            self.times.first_byte(request, self.now_us, is_served=True)
        self.now_us += TOKEN_US * at_once * (output - 1)
        for request in sent:
            self.times.ended(request, self.now_us, output, is_complete=True)
        return sent

    def begins(self, **more: Any) -> SentRequest:
        """A request without an end, whose shadow generates alone."""
        request = self.times.sent(asked(**more), self.now_us)
        self.times.generates(request, self.now_us)
        return request


def test_a_request_among_many_is_shorter_among_few() -> None:
    engine = Engine()
    for _ in range(20):
        for at_once in (1, 4, 16):
            requests = engine.serve(at_once)
    engine.times.generates(requests[0], engine.now_us)
    assert engine.times.generating_us(requests[0]) == pytest.approx(19 * TOKEN_US)
    near = engine.serve(1)[0]
    engine.times.generated(requests[0], engine.now_us)
    engine.times.generates(near, engine.now_us)
    assert engine.times.generating_us(near) == 19 * TOKEN_US, "no correction within the noise"


def test_of_a_crowd_alone_it_is_not_known_what_few_take() -> None:
    engine = Engine()
    for _ in range(20):
        requests = engine.serve(60)
    engine.times.generates(requests[0], engine.now_us)
    engine.times.held(requests[0], is_guessed=False, is_left=False)
    assert engine.times.counted()[0].unlearned == 1


def test_lengths_are_drawn_as_they_were_seen_and_without_any_of_the_tier_those_of_another() -> None:
    engine = Engine()
    assert engine.times.generating_us(engine.begins(most=100)) is None
    for output in (20, 40, 60) * 20:
        engine.serve(1, output)
    drawn = [engine.times.generating_us(engine.begins(most=1000, level=1)) or 0 for _ in range(600)]
    alone = {tokens: (tokens - 1) * TOKEN_US for tokens in (100, 200, 300)}
    assert set(drawn) == set(alone.values())
    assert sum(drawn) / 600 == pytest.approx(alone[200], rel=0.1)
    assert engine.times.generating_us(engine.begins(most=None)) is None, "without a maximum they are other requests"


def test_a_crowded_first_byte_teaches_nothing_and_the_fastest_stands_for_it_until_enough_is_known() -> None:
    engine = Engine(room=2)
    crowded = engine.serve(10)[-1]
    assert engine.times.speed.first.samples == 2
    assert engine.times.unloaded_until_us(crowded) == pytest.approx(crowded.sent_us + 50_000 + 20_000)
    for _ in range(10):
        engine.serve(1)
    assert engine.times.speed.first.line is not None


@pytest.mark.parametrize("prompts_are_known", [True, False])
def test_responses_that_are_not_streamed_show_their_time_by_output(*, prompts_are_known: bool) -> None:
    engine = Engine()
    if prompts_are_known:
        for prompt in (100, 1000, 4000) * 8:
            engine.serve(1, prompt=prompt)
    for output in (5, 20, 100, 300) * 10:
        engine.serve(1, output, stream=False)
    request = engine.begins(stream=False)
    request.output_tokens = 60
    until_us = engine.times.unloaded_until_us(request)
    assert until_us is not None
    assert until_us - request.sent_us == pytest.approx(1.5 * (50_000 + 59 * TOKEN_US) + 20_000, rel=0.1)
