"""Sizes of leases: at entry, while an answer streams, and what is learned at its end. The pool is a real one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.apis import Api
from sidecar.lengths.estimator import LengthEstimator
from sidecar.lengths.lease_size import (
    _MOST_PLACES,
    EVERY_TOKENS,
    Expected,
    LeaseSize,
    LeaseSizes,
    LeaseSizesDocument,
)
from sidecar.lengths.trust import WHOLE
from sidecar.payload.decode import decode
from sidecar.policy.choices import Learn
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools import Pool
from sidecar.pools.base import Ask, Lease
from tests.pools.harness import policy_of

pytestmark = pytest.mark.anyio

LIMIT = 50_000


@dataclass
class Stream:
    """An answer as the middleware reads it."""

    chunks: int = 0
    output_tokens: int | None = None
    large_tokens: int = 0
    later_chunks: int = 0
    later_tokens: int | None = None


class Stand:
    """One process: a pool, its sizes, and a client that streams."""

    def __init__(self, learn: Learn = Learn.CAUTIOUS, tokens: int = 100_000) -> None:
        self.now_us = 0
        self.pool = Pool(
            policy_of(pool_rules(tokens=tokens, requests=None, tiers=(Shares("normal"),))), clock=lambda: self.now_us
        )
        self.sizes = LeaseSizes(learn, self.pool.now_us, LengthEstimator())

    def expect(
        self,
        prompt: int = 100,
        most: int | None = 4096,
        *,
        tenant: str = "a",
        n: int = 1,
        best_of: int | None = None,
    ) -> Expected:
        fields: dict[str, object] = {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": n}
        if best_of is not None:
            fields["best_of"] = best_of
        if most is not None:
            fields["max_tokens"] = most
        payload = decode(Api.CHAT, json.dumps(fields).encode())
        assumed = 512 if most is None else most
        expected = self.sizes.expect(
            tenant, "/v1/chat", payload, prompt, (prompt + assumed) * payload.choices, assumed, most, LIMIT
        )
        assert expected is not None
        return expected

    async def admitted(self, expected: Expected) -> Lease:
        lease = await self.pool.enter(Ask(0, expected.place.tenant, 1, expected.tokens, expected.sequences))
        assert lease.grant is not None
        return lease

    def learn(self, *lengths: int, tenant: str = "a", most: int | None = 4096) -> None:
        for length in lengths:
            answer = Stream(chunks=length, output_tokens=length)
            self.sizes.learn(self.expect(tenant=tenant, most=most), answer, is_complete=True)

    def held(self) -> int:
        return self.pool.state()["tiers"][0]["held"]["tokens"]  # type: ignore[index]

    async def stream(self, size: LeaseSize, answer: Stream, tokens: int) -> list[int]:
        """Streams so many tokens, and returns what the pool held for it after each."""
        found = []
        for _ in range(tokens):
            answer.chunks += 1
            if answer.chunks >= size.next_look:
                size.look()
            found.append(self.held())
        return found


async def test_without_samples_it_is_the_old_rule_from_begin_to_end() -> None:
    stand = Stand()
    expected, answer = stand.expect(), Stream()
    assert (expected.tokens, expected.most, expected.estimate) == (4196, 4196, None)
    lease = await stand.admitted(expected)
    size = stand.sizes.begin(expected, lease, answer, streams=True)
    assert set(await stand.stream(size, answer, 4000)) == {4196}
    assert size.growths == 0


async def test_fifty_answers_size_the_next_request() -> None:
    stand = Stand()
    stand.learn(*[40] * 50)
    expected = stand.expect()
    assert expected.tokens == 100 + 48
    assert expected.most == 4196
    said = expected.expectation(decode(Api.CHAT, b'{"messages": [{"role": "user", "content": "x"}]}'))
    assert (said.source, said.samples, said.output_tokens, said.most_tokens) == ("own", 50, 48, 4196)
    assert (said.prompt_tokens, said.bucket) == (100, "max 4k")


async def test_a_stream_that_is_longer_than_all_before_grows_by_doubling_and_never_beyond_its_maximum() -> None:
    stand = Stand()
    stand.learn(*[40] * 100, most=1000)
    expected, answer = stand.expect(most=1000), Stream()
    lease = await stand.admitted(expected)
    size = stand.sizes.begin(expected, lease, answer, streams=True)
    held = await stand.stream(size, answer, 1000)
    assert held[0] == 148
    for generated, tokens in enumerate(held, 1):
        assert tokens <= 1100
        if generated > EVERY_TOKENS:
            assert tokens >= 100 + generated - EVERY_TOKENS
    assert held[-1] == 1100
    assert 3 <= size.growths <= 16


async def test_growth_may_exceed_the_pool_and_no_one_is_admitted_meanwhile() -> None:
    stand = Stand(tokens=1000)
    stand.learn(*[40] * 100, most=4096)
    one, answer = stand.expect(), Stream()
    size = stand.sizes.begin(one, await stand.admitted(one), answer, streams=True)
    await stand.stream(size, answer, 2000)
    assert stand.held() > 1000
    other = stand.expect(tenant="b", most=16)
    lease = await stand.pool.enter(Ask(0, "b", 1, other.tokens, 1))
    assert lease.grant is None
    await lease.leave()


async def test_an_answer_that_does_not_stream_keeps_its_size() -> None:
    stand = Stand()
    stand.learn(*[40] * 100)
    expected, answer = stand.expect(), Stream()
    size = stand.sizes.begin(expected, await stand.admitted(expected), answer, streams=False)
    answer.chunks = 10**6
    assert answer.chunks < size.next_look
    assert stand.held() == 148


async def test_several_sequences_hold_and_learn_each_for_itself() -> None:
    stand = Stand()
    for _ in range(60):
        stand.sizes.learn(stand.expect(n=4), Stream(chunks=160, output_tokens=160), is_complete=True)
    expected = stand.expect(n=4)
    assert expected.tokens == 4 * 100 + 4 * 48


async def test_a_disconnect_teaches_no_short_answer() -> None:
    stand = Stand()
    for _ in range(500):
        stand.sizes.learn(stand.expect(), Stream(chunks=5), is_complete=False)
    assert stand.expect().tokens == 4196


async def test_an_answer_cut_by_its_maximum_teaches_no_short_answer() -> None:
    stand = Stand()
    for _ in range(500):
        stand.sizes.learn(stand.expect(most=64), Stream(chunks=64, output_tokens=64), is_complete=True)
    assert stand.expect(most=64).tokens == 164


async def test_without_a_maximum_a_long_estimate_never_makes_a_request_too_large() -> None:
    stand = Stand()
    stand.learn(*[LIMIT * 2] * 60, most=None)
    expected = stand.expect(most=None)
    assert expected.tokens == LIMIT
    assert expected.most == 612


async def test_overlap_lowers_what_many_leases_are_counted_for_and_one_alone_is_counted_whole() -> None:
    stand = Stand(Learn.FULL)
    stand.learn(*[(index * 37) % 800 + 1 for index in range(400)])
    alone = stand.expect()
    first = stand.sizes.begin(alone, await stand.admitted(alone), Stream(), streams=True)
    assert alone.ratio == WHOLE
    running = [first]
    for index in range(40):
        expected, answer = stand.expect(), Stream()
        size = stand.sizes.begin(expected, await stand.admitted(expected), answer, streams=True)
        await stand.stream(size, answer, index * 15)
        running.append(size)
    engine = next(stand.sizes.engines())
    assert engine.ratio < WHOLE * 0.9
    assert stand.expect().tokens < alone.tokens
    assert engine.held_tokens == stand.held()
    for size in running:
        size.ended()
        size.ended()
    assert (engine.running, engine.held_tokens, engine.ratio) == (0, 0, WHOLE)


async def test_preemptions_of_the_engine_raise_the_size_of_the_next_requests() -> None:
    stand = Stand(Learn.FULL)
    stand.learn(*range(1, 400))
    expected = stand.expect()
    size = stand.sizes.begin(expected, await stand.admitted(expected), Stream(), streams=True)
    for total in (0, 5, 10, 15):
        stand.now_us += 1_000_000
        stand.sizes.preempted(None, total, stand.now_us)
    assert stand.expect().tokens > expected.tokens
    assert stand.expect().quantile > expected.quantile
    size.ended()


@pytest.mark.parametrize("learn", [Learn.CAUTIOUS, Learn.FULL])
def test_a_changed_policy_counts_for_the_next_request_and_nothing_learned_is_lost(learn: Learn) -> None:
    stand = Stand(learn)
    stand.learn(*[40] * 60)
    before = stand.expect().tokens
    stand.sizes.change_learn(Learn.OFF)
    assert not stand.sizes.learns
    stand.sizes.change_learn(learn)
    assert stand.expect().tokens == before


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=0, max_size=120),
    streamed=st.lists(st.integers(0, 2500), min_size=1, max_size=12),
    learn=st.sampled_from([Learn.CAUTIOUS, Learn.FULL]),
    most=st.one_of(st.none(), st.integers(1, 4096)),
)
def test_the_pool_always_has_the_sizes_of_the_running_leases_and_nothing_after_them(
    lengths: list[int], streamed: list[int], learn: Learn, most: int | None
) -> None:
    asyncio.run(_runs_and_ends(lengths, streamed, learn, most))


async def _runs_and_ends(lengths: list[int], streamed: list[int], learn: Learn, most: int | None) -> None:
    stand = Stand(learn, tokens=10_000_000)
    stand.learn(*lengths, most=most)
    running = []
    for tokens in streamed:
        expected, answer = stand.expect(most=most), Stream()
        assert 1 <= expected.tokens <= max(expected.most, LIMIT)
        lease = await stand.admitted(expected)
        size = stand.sizes.begin(expected, lease, answer, streams=True)
        await stand.stream(size, answer, tokens)
        running.append((size, lease))
        assert stand.held() == sum(size.held for size, _ in running)
    for size, lease in running:
        size.ended()
        lease.settle(1)
    assert stand.held() == 0
    assert all((engine.running, engine.held_tokens) == (0, 0) for engine in stand.sizes.engines())


async def test_the_document_says_what_is_in_force_held_used_and_learned() -> None:
    stand = Stand()
    assert stand.sizes.document() == LeaseSizesDocument("cautious")
    stand.learn(*[40] * 50)
    expected, answer = stand.expect(), Stream()
    lease = await stand.admitted(expected)
    size = stand.sizes.begin(expected, lease, answer, streams=True)
    await stand.stream(size, answer, 3 * EVERY_TOKENS)
    stand.sizes.preempted(None, 7, 1)
    document = stand.sizes.document()
    (engine,) = document.engines
    assert (engine.engine, engine.running, engine.held_tokens) == (None, 1, stand.held())
    assert engine.used_tokens == 100 + 3 * EVERY_TOKENS
    assert engine.expected_tokens >= engine.used_tokens
    assert (engine.growths, engine.preemptions) == (size.growths, 7)
    assert size.growths > 0
    (learned,) = document.learned
    assert (learned.tenant, learned.samples, learned.estimate, learned.quantile) == ("a", 50, 48, engine.quantile)
    stand.sizes.change_learn(Learn.OFF)
    assert stand.sizes.document() == LeaseSizesDocument("off")
    assert stand.sizes.documents() == []
    size.ended()


async def test_places_are_bounded_whatever_maximum_clients_send_and_one_that_was_dropped_is_known_still() -> None:
    stand = Stand()
    stand.learn(*[40] * 60, most=1000)
    first = stand.expect(most=1000)
    for most in range(1001, 1001 + 2 * _MOST_PLACES):
        stand.expect(most=most)
        assert len(stand.sizes._places) <= _MOST_PLACES
    later = stand.expect(most=1000)
    assert later.place.is_known
    assert (later.tokens, later.estimate) == (first.tokens, first.estimate)
    stand.sizes.learn(first, Stream(chunks=40, output_tokens=40), is_complete=True)
    assert first.place.learned is later.place.learned


async def test_a_document_is_bounded_whatever_engines_and_tenants_there_are() -> None:
    stand = Stand()
    for number in range(300):
        stand.sizes.preempted(f"engine-{number}", 0, 1)
    for number in range(60):
        stand.learn(40, tenant=f"tenant-{number}")
    document = stand.sizes.document()
    assert len(document.engines) == 64
    assert len(document.learned) == 20
