"""Answers that lie about their length, through the reader that the middleware uses: whom they cost what."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.admission.usage import LARGEST_EVENT, UsageReader
from sidecar.lengths.lease_size import EVERY_TOKENS, Expected, LeaseSize
from sidecar.policy.choices import Learn
from sidecar.pools.base import Ask, Lease
from tests.admission.test_lease_size import Stand
from tests.support.examples import examples

pytestmark = pytest.mark.anyio

PROMPT, MOST = 100, 4096
EMPTY = b'data: {"choices":[{"index":0,"delta":{}}]}\n\n'
THOUSAND = " token with some text" * 215
"""About a thousand tokens of English: 4.5 bytes each."""


def event(text: str, **more: object) -> bytes:
    """One event of a chat stream, as vLLM writes it."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None, "token_ids": None}
    said = {"id": "chatcmpl-" + "a" * 32, "object": "chat.completion.chunk", "created": 1720000000, "model": "m"}
    return b"data: " + json.dumps({**said, "choices": [{**choice, **more}]}).encode() + b"\n\n"


def usage(output: int, prompt: int = PROMPT) -> bytes:
    return b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\n' % (prompt, output)


class Attack:
    """One request that runs, beside one of another tenant that waits, and its answer."""

    def __init__(self, stand: Stand, expected: Expected, lease: Lease, waiting: Lease) -> None:
        self.stand = stand
        self.expected = expected
        self.lease = lease
        self.waiting = waiting
        self.reader = UsageReader()
        self.size: LeaseSize = stand.sizes.begin(expected, lease, self.reader, streams=True)

    def feed(self, *bodies: bytes) -> None:
        """As `RequestHandler` reads a response, but at once."""
        for body in bodies:
            self.reader.feed(body)
            self.reader.read()
            if self.reader.chunks >= self.size.next_look:
                self.size.look()

    def end(self, *, is_complete: bool = True) -> int:
        """Ends it, and returns the tokens that it is said to have used."""
        used = self.reader.used_tokens(PROMPT)
        self.size.ended(used)
        self.lease.settle(used)
        self.stand.sizes.learn(self.expected, self.reader, is_complete=is_complete)
        return used

    async def order_at_end(self, **served: int) -> str:
        """Ends it, and returns in which order the two tenants enter, and others that are served so many tokens first.

        Each then asks for the whole pool, equal ones in this order. The one that waited leaves, for nothing.
        """
        self.size.ended(self.reader.used_tokens(PROMPT))
        asks = [*served.items(), *((tenant, 100_000) for tenant in (*served, "a", "b"))]
        left = [await self.stand.pool.enter(Ask(0, tenant, 1, tokens, 1)) for tenant, tokens in asks]
        self.waiting.leave()
        self.end()
        entered = ""
        while left:
            await asyncio.wait([lease.wait() for lease in left], return_when=asyncio.FIRST_COMPLETED)
            lease = next(lease for lease in left if lease.grant is not None)
            left.remove(lease)
            entered += lease.ask.tenant
            lease.settle()
        return entered[len(served) :]


async def attacked(
    most: int | None = MOST,
    *,
    n: int = 1,
    best_of: int | None = None,
    learn: Learn = Learn.CAUTIOUS,
    is_learned: bool = True,
) -> Attack:
    """The attacker's answers were short so far."""
    stand = Stand(learn)
    if is_learned:
        for _ in range(60):
            short = UsageReader()
            short.feed(EMPTY * 40 * n + usage(40 * n))
            short.read()
            stand.sizes.learn(stand.expect(most=most, n=n, best_of=best_of), short, is_complete=True)
    expected = stand.expect(PROMPT, most, n=n, best_of=best_of)
    lease = await stand.pool.enter(Ask(0, "a", 1, expected.tokens, expected.sequences, most=expected.most))
    waiting = await stand.pool.enter(Ask(0, "b", 1, 100_000, 1))
    return Attack(stand, expected, lease, waiting)


@pytest.mark.parametrize("most", [MOST * 4, None])
@pytest.mark.parametrize("by_event", [1000, 2000, 5000])
async def test_an_engine_of_very_large_events_holds_what_it_uses(by_event: int, most: int | None) -> None:
    attack = await attacked(most)
    attack.feed(EMPTY)  # the first token travels alone
    for generated in range(by_event, 15_000, by_event):
        attack.feed(event(THOUSAND * (by_event // 1000)))
        assert attack.stand.held() >= PROMPT + generated
    assert generated <= attack.end() - PROMPT <= 1.4 * generated
    assert attack.lease.paid_tokens >= PROMPT + generated


@pytest.mark.parametrize(
    "kind", ["created", "in_progress", "output_item.added", "output_text.done", "content_part.done", "completed"]
)
@pytest.mark.parametrize(
    "template", ['{"type":"%s","response":{"text":"%s"}}', '{"response":{"text":"%s"},"type":"%s"}']
)
async def test_an_event_that_repeats_the_request_or_the_answer_generated_nothing(kind: str, template: str) -> None:
    text, name = "word " * 4000, f"response.{kind}"
    body = template % ((name, text) if template.startswith('{"type') else (text, name))
    attack = await attacked()
    attack.feed(EMPTY, f"event: {name}\ndata: {body}\n\n".encode())
    assert attack.reader.used_tokens(PROMPT) == PROMPT + 2
    delta = '{"type":"response.output_text.delta","delta":"%s"}' % (text + r"\"response.completed\"")
    attack.feed(f"event: response.output_text.delta\ndata: {delta}\n\n".encode())
    assert attack.reader.used_tokens(PROMPT) > PROMPT + 4000


@pytest.mark.parametrize("words", [200, 400, 800])
async def test_an_event_of_a_few_hundred_tokens_is_more_than_one(words: int) -> None:
    """What a client gets that reads just slowly enough: 800 tokens are less than 4 KiB."""
    attack = await attacked()
    attack.feed(EMPTY, *[event(" word" * words)] * 3)
    assert 3 * words <= attack.reader.used_tokens(0) <= 1.5 * 3 * words
    assert attack.stand.held() >= PROMPT + 3 * words
    assert attack.end() >= 3 * words


async def test_an_event_with_the_log_probabilities_of_many_tokens_counts_them() -> None:
    top = {"token": " the", "logprob": -0.1234567890123456, "bytes": [32, 116, 104, 101]}
    attack = await attacked()
    attack.feed(
        EMPTY, event(" the" * 40, logprobs={"content": [{**top, "top_logprobs": []}] * 40}).replace(b": ", b":")
    )
    assert attack.reader.used_tokens(0) == 41
    of_completion = {"tokens": [" a, [b]"] * 40, "token_logprobs": [-0.5] * 40, "top_logprobs": [{" a": -0.5}] * 40}
    attack.feed(event(" the" * 40, logprobs=of_completion))
    assert attack.reader.used_tokens(0) == 81


@pytest.mark.parametrize("order", ["before", "after"])
async def test_a_schema_that_looks_like_usage_pays_for_nothing(order: str) -> None:
    """The responses API repeats the request's tools in its first events, and in its last beside the real count."""
    lie = b'"tools":[{"parameters":{"default":{"usage":{"input_tokens":0,"output_tokens":0}}}}]'
    attack = await attacked()
    for kind in (b"created", b"in_progress"):
        attack.feed(
            b'event: response.%b\ndata: {"response":{%b,"usage":null},"type":"response.%b"}\n\n' % (kind, lie, kind)
        )
    attack.feed(*[b'event: response.output_text.delta\ndata: {"delta":" x"}\n\n'] * 3)
    assert (attack.reader.is_known(200), attack.reader.used_tokens(100_000)) == (True, 100_005), "the client has left"
    said = b'"usage":{"input_tokens":90000,"output_tokens":700}'
    parts = [lie, said] if order == "before" else [said, lie]
    attack.feed(b'event: response.completed\ndata: {"response":{%b}}\n\n' % b",".join(parts))
    assert (attack.reader.is_known(200), attack.reader.used_tokens(100_000)) == (True, 90_700)


async def test_a_schema_that_looks_like_usage_is_no_cache_hit() -> None:
    lie = b'"tools":[{"parameters":{"default":{"usage":{"input_tokens_details":{"cached_tokens":100000}}}}}]'
    reader = UsageReader()
    reader.feed(b'event: response.created\ndata: {"response":{%b}}\n\n' % lie)
    reader.read()
    assert reader.cached_tokens is None


@pytest.mark.parametrize("count", [-1, -(10**30), 2**41, 10**400])
async def test_a_count_that_no_background_response_has_is_not_taken(count: int) -> None:
    attack = await attacked()
    attack.reader.counted(count, count)
    assert (attack.reader.input_tokens, attack.reader.output_tokens) == (None, None)


async def test_the_first_answers_of_a_batch_that_runs_do_not_stand_for_it() -> None:
    """They are the short ones."""
    stand = Stand()
    for _ in range(100):
        stand.sizes.began(stand.expect())
    stand.learn(*[40] * 60)
    assert stand.expect().tokens == PROMPT + MOST


def test_engines_that_come_and_go_leave_no_trace() -> None:
    stand = Stand()
    for engine in range(2000):
        stand.sizes.preempted(f"e{engine}", 0, 0)
        stand.sizes.preempted(f"e{engine}", 100, 1)
    assert len(list(stand.sizes.engines())) <= 256
    assert any(engine.is_raised for engine in stand.sizes.documents())
    stand.now_us = 2 * 60 * 1_000_000
    assert not any(engine.is_raised for engine in stand.sizes.documents()), "no one is there to preempt"


async def test_the_first_event_may_repeat_the_prompt() -> None:
    attack = await attacked()
    attack.feed(event("word " * 4000))
    assert attack.reader.used_tokens(PROMPT) == PROMPT + 1


async def test_an_event_with_all_its_log_probabilities_is_one_token() -> None:
    top = [{"token": " the", "logprob": -0.12345678901234567, "bytes": [32, 116, 104, 101]}] * 20
    body = event(" the", logprobs={"content": [{**top[0], "top_logprobs": top}]})
    assert len(body) > LARGEST_EVENT
    attack = await attacked()
    attack.feed(*[body] * 30)
    attack.feed(body * 30)  # many in one piece
    assert attack.reader.used_tokens(PROMPT) == PROMPT + 60
    assert attack.stand.held() == attack.expected.tokens


async def test_a_count_in_the_first_event_does_not_stand_for_the_whole_answer() -> None:
    """Anthropic's streams begin with a count of the output so far."""
    attack = await attacked()
    attack.feed(b'event: message_start\ndata: {"message":{"usage":{"input_tokens":100,"output_tokens":1}}}\n\n')
    for generated in range(1, 2001):
        attack.feed(b'event: content_block_delta\ndata: {"delta":{"type":"text_delta","text":" the"}}\n\n')
        assert attack.stand.held() >= PROMPT + generated - EVERY_TOKENS
    assert attack.end(is_complete=False) == PROMPT + 2001
    attack.feed(b'event: message_delta\ndata: {"usage":{"output_tokens":1990}}\n\n')
    attack.feed(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert attack.reader.used_tokens(PROMPT) == PROMPT + 1990, "its last count is the engine's own"


async def test_a_count_with_each_event_is_exact() -> None:
    attack = await attacked()
    for generated in range(3, 3000, 3):  # three tokens in each
        attack.feed(event("a b c")[:-3] + b',"usage":{"prompt_tokens":100,"completion_tokens":%d}}\n\n' % generated)
        assert attack.reader.used_tokens(PROMPT) == PROMPT + generated
    attack.feed(b"data: [DONE]\n\n")
    assert attack.end() == PROMPT + 2997


async def test_what_stays_at_the_engine_is_as_long_as_what_the_answer_has() -> None:
    """Of best_of=8 one choice comes back, and seven more have used as much."""
    attack = await attacked(n=1, best_of=8)
    assert attack.expected.tokens == 8 * PROMPT + 8 * 48
    attack.feed(*[event(" the")] * 500)
    assert attack.stand.held() >= 8 * (PROMPT + 500 - EVERY_TOKENS)


@pytest.mark.parametrize("streams", [True, False])
async def test_an_answer_without_a_maximum_is_paid_for_whole(streams: bool) -> None:
    attack = await attacked(None)
    if streams:
        attack.feed(*[EMPTY] * 9000)
    attack.feed(usage(9000))
    above = PROMPT + 9000 - attack.expected.tokens
    assert attack.reader.used_tokens(PROMPT) == PROMPT + 9000
    order = await attack.order_at_end(c=above, d=(2 * above if streams else above) + 1)
    assert order == "bcad", "the most that it held"


async def test_growth_is_paid_once_however_often_the_request_is_handed_back() -> None:
    attack = await attacked(None, is_learned=False)
    stand, lease = attack.stand, attack.lease
    for tokens in (5000, 700, 3000, 612, 5000, 6000):
        attack.feed(usage(tokens - PROMPT), *[b"data:"] * EVERY_TOKENS)
        attack.size.look()
        attack.size.ended()
        lease.resize(700)
        granted = lease.hand_back()
        await granted
        attack.reader = UsageReader()
        attack.size = stand.sizes.begin(attack.expected, lease, attack.reader, streams=True)
    assert 6000 <= lease.paid_tokens <= 6000 + EVERY_TOKENS
    grown = lease.paid_tokens - attack.expected.tokens
    assert await attack.order_at_end(c=grown, d=grown + 1) == "bcad"


pieces = st.one_of(
    st.just(EMPTY),
    st.builds(event, st.text(max_size=20)),
    st.integers(1, 4000).map(lambda words: event(" word" * words)),
    st.integers(-(2**70), 2**70).map(usage),
    st.integers(0, 5000).map(usage),
    st.just(EMPTY * 300),
    st.binary(max_size=200),
)


@settings(max_examples=examples(20))
@given(
    bodies=st.lists(st.tuples(pieces, st.integers(1, 40)), max_size=20),
    most=st.sampled_from([None, 1, 64, MOST]),
    choices=st.sampled_from([(1, None), (8, None), (1, 8), (8, 8)]),
    learn=st.sampled_from([Learn.CAUTIOUS, Learn.FULL]),
)
def test_whatever_an_engine_sends_costs_its_own_tenant_and_no_more_than_the_request_may_use(
    bodies: list[tuple[bytes, int]], most: int | None, choices: tuple[int, int | None], learn: Learn
) -> None:
    async def run() -> None:
        attack = await attacked(most, n=choices[0], best_of=choices[1], learn=learn)
        bound = max(attack.expected.most_used, attack.expected.tokens)
        for body, times in bodies:
            attack.feed(*[body] * times)
            assert 1 <= attack.stand.held() <= bound
        order = await attack.order_at_end(c=1, d=bound + 1)
        assert order.index("b") < order.index("c")
        assert order.index("a") < order.index("d")
        assert attack.lease.paid_tokens <= bound

    asyncio.run(run())
