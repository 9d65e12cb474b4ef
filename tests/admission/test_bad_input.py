"""Bad input ends in a clear error in the client's own shape, and nothing is held afterwards."""

# ruff: noqa: UP031  # JSON is full of the braces that `format` takes for its own
from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.middleware import CHAT, COMPLETIONS, SMALL, Answer, App, Caller, Guarded, chat, guarding, key, policy
from tests.support.wire import connected, exchange, post

pytestmark = pytest.mark.anyio

RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
LIST = '"messages":["hi"]'


def nested(depth: int, around: str = "%s") -> str:
    return around % ("[" * depth + "]" * depth)


BAD_BODIES: list[tuple[str, str, str | bytes, tuple[str, ...]]] = [
    ("broken", CHAT, '{"messages":[', ("not valid JSON",)),
    ("garbage", CHAT, "hello", ("not valid JSON",)),
    ("two values", CHAT, "{%s} {}" % LIST, ("not valid JSON", "trailing")),
    ("empty", CHAT, "", ("not valid JSON",)),
    ("list", CHAT, "[]", ("must be a JSON object",)),
    ("string", CHAT, '"hi"', ("must be a JSON object",)),
    ("number", CHAT, "1", ("must be a JSON object",)),
    ("null", CHAT, "null", ("must be a JSON object",)),
    ("byte order mark", CHAT, b"\xef\xbb\xbf{}", ("not valid JSON",)),
    ("UTF-16", CHAT, "{}".encode("utf-16"), ("UTF-8",)),
    ("NaN", CHAT, '{"temperature":NaN,%s}' % LIST, ("not valid JSON",)),
    ("bad UTF-8 in a value", CHAT, b'{"x":"\xff","messages":["hi"]}', ("not UTF-8", "byte 6")),
    ("bad UTF-8 in a key", CHAT, b'{"\xff":1,"priority":"high","messages":["hi"]}', ("not UTF-8",)),
    ("bad UTF-8 beside a picture", CHAT, b'{"messages":[{"type":"image_url","content":"\xff"}]}', ("not UTF-8",)),
    ("lone surrogate", CHAT, '{"messages":[{"content":"\\ud800"}]}', ("not valid JSON",)),
    ("lone surrogate in a key", CHAT, '{"\\ud800":1,"priority":"high",%s}' % LIST, ("not valid JSON",)),
    ("too deep", CHAT, '{"x":%s,%s}' % (nested(100_000 // 4), LIST), ("nested too deeply",)),
    ("no messages", CHAT, "{}", ("messages: missing", "list")),
    ("null messages", CHAT, '{"messages":null}', ("messages: missing",)),
    ("messages a string", CHAT, '{"messages":"hi"}', ("messages: expected a list",)),
    ("messages an object", CHAT, '{"messages":{}}', ("messages: expected a list",)),
    ("max_tokens a string", CHAT, '{"max_tokens":"10",%s}' % LIST, ("max_tokens: expected a whole number",)),
    ("max_tokens a fraction", CHAT, '{"max_tokens":1.5,%s}' % LIST, ("max_tokens: expected a whole number",)),
    ("max_tokens true", CHAT, '{"max_tokens":true,%s}' % LIST, ("max_tokens: expected a whole number",)),
    ("max_tokens negative", CHAT, '{"max_tokens":-1,%s}' % LIST, ("max_tokens: -1 is too small", "1 or more")),
    ("max_completion_tokens", CHAT, '{"max_completion_tokens":-1,%s}' % LIST, ("max_completion_tokens: -1",)),
    ("max_tokens huge", CHAT, '{"max_tokens":%s,%s}' % ("9" * 4200, LIST), ("too large", "2147483647")),
    ("max_tokens beyond int", CHAT, '{"max_tokens":%s,%s}' % ("9" * 5000, LIST), ("max_tokens", "out of range")),
    ("max_tokens times n", CHAT, '{"max_tokens":%s,"n":%s,%s}' % ("9" * 4200, "9" * 4200, LIST), ("too large",)),
    ("n zero", CHAT, '{"n":0,%s}' % LIST, ("n: 0 is too small", "1 or more")),
    ("n negative", CHAT, '{"n":-3,%s}' % LIST, ("n: -3 is too small",)),
    ("n a string", CHAT, '{"n":"2",%s}' % LIST, ("n: expected a whole number",)),
    ("n huge", CHAT, '{"n":%d,%s}' % (2**40, LIST), ("n", "too large")),
    ("model a number", CHAT, '{"model":1,%s}' % LIST, ("model: expected", "string")),
    ("stream a string", CHAT, '{"stream":"yes",%s}' % LIST, ("stream: expected",)),
    ("no prompt", COMPLETIONS, "{}", ("prompt: missing", "token ids")),
    ("prompt a number", COMPLETIONS, '{"prompt":1}', ("prompt: ",)),
    ("prompt an object", COMPLETIONS, '{"prompt":{}}', ("prompt: ",)),
    ("prompt an empty list", COMPLETIONS, '{"prompt":[]}', ("prompt: an empty list", "at least one")),
    ("prompt mixed", COMPLETIONS, '{"prompt":["a",1]}', ("prompt: a list that mixes", "one kind")),
    ("prompt of fractions", COMPLETIONS, '{"prompt":[1.5]}', ("prompt: ",)),
    ("prompt of nulls", COMPLETIONS, '{"prompt":[null]}', ("prompt: ",)),
    ("prompt too deep", COMPLETIONS, '{"prompt":[[[1]]]}', ("prompt: ",)),
    ("best_of", COMPLETIONS, '{"prompt":"a","best_of":-1}', ("best_of: -1 is too small",) ),
    ("no input", RESPONSES, "{}", ("input: missing", "string or a list")),
    ("input a number", RESPONSES, '{"input":1}', ("input: ", "wrong type")),
    ("max_output_tokens", RESPONSES, '{"input":"a","max_output_tokens":-1}', ("max_output_tokens: -1",)),
    ("no messages", MESSAGES, '{"max_tokens":1}', ("messages: missing",)),
    ("no embedding input", EMBEDDINGS, "{}", ("input: missing",)),
    ("embedding input a number", EMBEDDINGS, '{"input":1}', ("input: ",)),
]  # fmt: skip


async def test_a_bad_body_is_a_400_that_says_what_is_wrong() -> None:
    app = App()
    guarded = Guarded(app, policy(engine="sglang"))
    wrong = []
    for name, path, body, words in BAD_BODIES:
        caller = Caller(guarded.sidecar, body.encode() if isinstance(body, str) else body, path=path)
        await caller.run()
        said = caller.json
        shape = (caller.status, said["error"]["code"], said.get("type") == "error")
        missing = [word for word in words if word not in said["error"]["message"]]
        if shape != (400, "invalid_body", path == MESSAGES) or missing:
            wrong.append((name, path, shape, missing, said["error"]["message"]))
    assert wrong == []
    assert app.seen == []
    assert guarded.recorder.ends == ["invalid_body"] * len(BAD_BODIES)
    await guarded.nothing_left()


@pytest.mark.parametrize("around", ['{"priority":%s,"messages":["hi"]}', '{"messages":[{"c":"\\u0041","x":%s}]}', "%s"])
async def test_no_depth_of_nesting_gets_past_one_reader_and_breaks_another(around: str) -> None:
    guarded = Guarded(App(), policy(engine="sglang"))
    for depth in [1, 10, *range(900, 1010), 5000]:
        caller = Caller(guarded.sidecar, nested(depth, around).encode())
        await caller.run()
        assert caller.status in (200, 400)
    await guarded.nothing_left()


@pytest.mark.parametrize("name", ["x-priority", "x-admission-max-wait"])
async def test_two_different_values_of_one_header_are_a_400(name: str) -> None:
    values = {"x-priority": ("high", "batch"), "x-admission-max-wait": ("5s", "1s")}[name]
    app = App()
    async with guarding(app) as guarded:
        refused = await guarded.ask(None, key("acme"), *(f"{name}: {value}" for value in values))
        assert refused.is_error(400, "invalid_header", name, "different values", "once")
        assert app.seen == []
        assert (await guarded.ask(None, key("acme"), *([f"{name}: {values[0]}"] * 2))).status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(max_tokens=-1), "max_tokens"),
        (chat(n="two"), "n"),
        (chat(messages=[]), "messages"),
        (chat(priority="gold"), "priority"),
        (chat(previous_response_id="r"), "previous_response_id"),
        ([], None),
    ],
)
async def test_an_openai_client_reads_which_member_is_wrong(body: Any, param: str | None) -> None:
    async with guarding(App()) as guarded:
        refused = await guarded.ask(body)
    assert (refused.status, refused.json["error"]["param"]) == (400, param), refused


# Too much, too slow, too often


async def test_a_declared_body_over_the_limit_is_a_413_before_it_is_read() -> None:
    async with guarding(App()) as guarded, connected(guarded.port) as (reader, writer):
        writer.write(b"POST %s HTTP/1.1\r\nhost: sidecar\r\ncontent-length: 65537\r\n\r\n" % CHAT.encode())
        refused = await Answer.read(reader)
        assert refused.is_error(413, "body_too_large", "65536", "less")
        assert refused.headers["connection"] == "close"


async def test_a_client_that_sends_all_of_it_reads_the_413() -> None:
    async with guarding(App()) as guarded:
        refused = await guarded.ask(b"x" * 5_000_000)
        assert refused.is_error(413, "body_too_large")


async def test_a_body_of_unknown_length_is_cut_off_at_the_limit() -> None:
    piece = b"%x\r\n%s\r\n" % (10_000, b" " * 10_000)
    async with guarding(App()) as guarded, connected(guarded.port) as (reader, writer):
        writer.write(b"POST %s HTTP/1.1\r\nhost: sidecar\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode())
        for _ in range(7):
            writer.write(piece)
            await writer.drain()
        refused = await Answer.read(reader)
        assert refused.is_error(413, "body_too_large", "65536")
        writer.write(b"0\r\n\r\n")
        assert await asyncio.wait_for(reader.read(), 60) == b""  # closed, as it said


async def test_a_body_without_end_is_not_read_for_ever() -> None:
    async with (
        guarding(App(), policy(body_timeout="50ms")) as guarded,
        connected(guarded.port) as (reader, writer),
    ):
        writer.write(b"POST %s HTTP/1.1\r\nhost: sidecar\r\ncontent-length: 99999999\r\n\r\n" % CHAT.encode())
        assert (await Answer.read(reader)).is_error(413, "body_too_large")
        assert await asyncio.wait_for(reader.read(), 60) == b""


async def test_ten_megabytes_of_garbage_are_a_400() -> None:
    async with guarding(App(), policy(max_body="16MiB")) as guarded:
        refused = await guarded.ask(bytes(range(256)) * 40_000)
        assert refused.is_error(400, "invalid_body", "UTF-8")
        refused = await guarded.ask(b'{"messages":[' + b'"x",' * 2_500_000)
        assert refused.is_error(400, "invalid_body", "not valid JSON")


async def test_a_body_just_at_the_limit_passes() -> None:
    async with guarding(App()) as guarded:
        assert (await guarded.ask(SMALL + b" " * (65536 - len(SMALL)))).status == 200
        assert (await guarded.ask(SMALL + b" " * (65537 - len(SMALL)))).status == 413


async def test_a_body_that_trickles_in_is_a_408() -> None:
    async with guarding(App(), policy(body_timeout="150ms")) as guarded, connected(guarded.port) as (reader, writer):

        async def trickle() -> None:
            writer.write(post(CHAT, SMALL)[: -len(SMALL)])
            for byte in SMALL:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        # The answer is one piece. Behind it the server closes, and what still trickles in may reset the connection.
        refused = Answer.parsed(await asyncio.wait_for(reader.read(2**16), 60))
        trickling.cancel()
        assert refused.is_error(408, "body_timeout", "0.15 s", "faster")
        assert refused.headers["connection"] == "close"
        await guarded.nothing_left()
    assert guarded.recorder.ends == ["body_timeout"]


@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize(
    "framing",
    [
        b"content-length: 10\r\ncontent-length: 11",
        b"content-length: 10\r\ntransfer-encoding: chunked",
        b"content-length: ten",
        b"content-length: -1",
        b"content-length: " + b"9" * 5000,
    ],
)
async def test_a_length_that_contradicts_itself_is_a_400(http: str, framing: bytes) -> None:
    app = App()
    async with guarding(app, http=http) as guarded:
        head = b"POST %s HTTP/1.1\r\nhost: sidecar\r\nconnection: close\r\n%s\r\n\r\n" % (CHAT.encode(), framing)
        answer = await asyncio.wait_for(exchange(guarded.port, head + SMALL), 60)
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413"))
    assert app.seen == []


NO_LENGTH = [b"ten", b"-1", b"+9", b"1 ", b"1_0", b"0x1", b"9" * 19, b"9" * 5000, b"\xb2", b""]


@pytest.mark.parametrize("values", [[b"10", b"11"], *([value] for value in NO_LENGTH)])
async def test_a_server_that_lets_such_a_length_through_gets_its_400_from_us(values: list[bytes]) -> None:
    guarded = Guarded(App(), policy())
    caller = Caller(guarded.sidecar, SMALL, headers=[(b"content-length", value) for value in values])
    await caller.run()
    assert (caller.status, caller.json["error"]["code"]) == (400, "invalid_header")
    assert "content-length" in caller.json["error"]["message"]
    await guarded.nothing_left()


# Who, and which tier


@pytest.mark.parametrize(
    "header",
    ["authorization: Bearer sk-wrong", "authorization: bearer  x y", "x-api-key: sk-wrong", "x-api-key: \xe9\xff"],
)
async def test_an_unknown_key_is_a_401_before_the_body_is_read(header: str) -> None:
    async with guarding(App()) as guarded:
        refused = await guarded.ask(b"not JSON", header)
        assert refused.is_error(401, "invalid_api_key", "operator")
        assert refused.headers["www-authenticate"] == "Bearer"
        assert "sk-wrong" not in refused.message


async def test_no_key_is_a_401_where_the_policy_denies_it() -> None:
    denying = replace(policy(), anonymous=None)
    async with guarding(App(), denying) as guarded:
        assert (await guarded.ask()).is_error(401, "invalid_api_key", "no API key", "Authorization: Bearer")
        assert (await guarded.ask(None, key("acme"))).status == 200
        assert (await guarded.ask(None, "x-api-key: sk-acme")).status == 200


@pytest.mark.parametrize(
    "priority", ['"gold"', '"HIGH"', '""', "1.5", "-0.1", "1e400", "true", "[]", "{}", '"\\u0000"', "9" * 4000]
)
async def test_a_tier_that_is_none_is_a_400_that_lists_the_tiers(priority: str) -> None:
    async with guarding(App()) as guarded:
        refused = await guarded.ask(b'{"messages":["hi"],"priority":%s}' % priority.encode())
        words = "priority", "critical, high, normal, batch", "from 0 to 1", "1 is the most important"
        assert refused.is_error(400, "unknown_tier", *words)
        assert len(refused.message) < 250


@pytest.mark.parametrize("value", ["gold", "2", "nan", "inf", "h\xf6ch", "\xff\xfe", "x" * 5000, "high, batch"])
async def test_a_tier_header_that_is_none_is_a_400_too(value: str) -> None:
    async with guarding(App()) as guarded:
        refused = await guarded.ask(None, f"x-priority: {value}")
        assert refused.is_error(400, "unknown_tier", "x-priority", "critical, high, normal, batch")


async def test_a_tier_above_the_ceiling_is_clamped_and_said_so() -> None:
    async with guarding(App()) as guarded:
        for headers in ((key("nightly"), "x-priority: critical"), (key("nightly"), "x-priority: 1.0")):
            answer = await guarded.ask(None, *headers)
            assert (answer.status, answer.headers["x-admission-tier"]) == (200, "batch")
            assert answer.headers["x-admission-clamped-from"] == "critical"


TWICE = [
    b'"priority":"high","priority":"batch"',
    b'"priority":"batch","priority":null',
    b'"priority":"high","pr\\u0069ority":"high"',
    b'"nvext":{"agent_hints":{"priority":9}},"nvext":null',
    b'"nvext":{"agent_hints":{"priority":9,"priority":1}}',
]


@pytest.mark.parametrize("engine", ["none", "tensorrt-llm", "vllm", "dynamo"])
async def test_a_priority_that_is_given_twice_is_a_400(engine: str) -> None:
    app = App()
    async with guarding(app, policy(engine=engine)) as guarded:
        for members in TWICE:
            refused = await guarded.ask(b'{%s,"messages":["hi"]}' % members)
            assert refused.is_error(400, "invalid_body", "twice", "once"), members
    assert app.seen == []


# What can never fit


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (chat(max_tokens=100_000), ("tokens", "normal allows 100000", "shorten the prompt or ask for less")),
        (chat(n=5), ("5 sequences", "allows 4", "fewer")),
        (chat(max_tokens=30_000, n=4), ("tokens", "allows 100000")),
        (chat(max_tokens=2**31 - 1), ("2147483", "allows 100000")),
    ],
)
async def test_what_can_never_fit_is_a_400_at_once_also_where_the_pool_is_full(body: Any, words: Any) -> None:
    app = App(is_held=True)
    async with guarding(app, policy()) as guarded:
        running = [asyncio.create_task(guarded.ask()) for _ in range(4)]
        await guarded.until(leases=4)
        assert (await guarded.ask(body)).is_error(400, "request_too_large", *words)
        assert guarded.waiting == 0
        app.release(4)
        await asyncio.gather(*running)


async def test_a_count_without_bound_does_not_fill_a_pool_without_bound() -> None:
    unbounded = replace(policy(), rules=_requests_only())
    app = App(is_held=True)
    async with guarding(app, unbounded) as guarded:
        first = asyncio.create_task(guarded.ask(chat(max_tokens=2**31 - 1)))
        await guarded.until(leases=1)
        second = asyncio.create_task(guarded.ask(chat(max_tokens=2**31 - 1, n=3)))
        await guarded.until(leases=2)
        app.release(2)
        await asyncio.gather(first, second)


def _requests_only() -> Any:
    from sidecar.policy.rules import Shares, pool_rules

    names = ("critical", "high", "normal", "batch")
    return pool_rules(tokens=None, requests=4, tiers=tuple(Shares(name) for name in names))


# The shapes that clients understand


async def test_the_openai_client_raises_its_own_exceptions(openai: ModuleType) -> None:
    app = App(is_held=True)
    bounds = {"requests": "1", "max_wait": "10ms"}
    async with guarding(app, policy(**bounds)) as guarded:
        url = f"http://127.0.0.1:{guarded.port}/v1"
        async with openai.AsyncOpenAI(api_key="sk-acme", base_url=url, max_retries=0) as client:

            async def failing(kind: Any, code: str, **members: Any) -> Any:
                with pytest.raises(kind) as caught:
                    await client.chat.completions.create(**chat(), **members)
                assert caught.value.code == code
                return caught.value

            await failing(openai.BadRequestError, "unknown_tier", extra_body={"priority": "gold"})
            await failing(openai.BadRequestError, "request_too_large", n=3)
            wrong = {"authorization": "Bearer sk-wrong"}
            await failing(openai.AuthenticationError, "invalid_api_key", extra_headers=wrong)
            await failing(openai.APIStatusError, "body_too_large", extra_body={"x": "y" * 100_000})
            first = asyncio.create_task(guarded.ask())
            await guarded.until(leases=1)
            busy = await failing(openai.InternalServerError, "queue_timeout")
            assert int(busy.response.headers["retry-after"]) >= 1
            app.release()
            await first


@pytest.mark.parametrize(
    ("body", "headers", "status", "kind", "code"),
    [
        (b"{", (), 400, "invalid_request_error", "invalid_body"),
        (b'{"messages":["hi"],"priority":"gold"}', (), 400, "invalid_request_error", "unknown_tier"),
        (b'{"messages":["hi"]}', ("x-api-key: sk-wrong",), 401, "authentication_error", "invalid_api_key"),
        (b" " * 70_000, (), 413, "request_too_large", "body_too_large"),
        (b'{"messages":["hi"],"max_tokens":200000}', (), 400, "invalid_request_error", "request_too_large"),
    ],
)
async def test_messages_get_anthropics_shape(
    body: bytes, headers: tuple[str, ...], status: int, kind: str, code: str
) -> None:
    async with guarding(App()) as guarded:
        refused = await guarded.ask(body, *headers, path=MESSAGES)
    assert refused.status == status
    assert refused.json["type"] == "error"
    assert (refused.json["error"]["type"], refused.json["error"]["code"]) == (kind, code)
    assert refused.json["error"]["message"]


# Anything at all

_PATHS = st.sampled_from([CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS, "/v1/batch/completions"])
_ENGINES = st.sampled_from(["none", "vllm", "sglang", "tensorrt-llm", "dynamo"])
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["high", "image_url", "text", "\ud800", 2**70, -(2**70), 10**4000]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "content", "agent_hints", "priority", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)
_NAMES = st.sampled_from(
    [
        "messages",
        "prompt",
        "input",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "n",
        "best_of",
        "model",
        "stream",
        "tools",
        "system",
        "instructions",
        "priority",
        "nvext",
        "x",
    ]
)
_OBJECTS = st.dictionaries(_NAMES, _JSON, max_size=6).map(lambda value: json.dumps(value).encode())


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """JSON with a piece cut out, doubled, or replaced by bytes."""
    body = draw(_OBJECTS)
    start = draw(st.integers(0, len(body)))
    end = draw(st.integers(start, min(len(body), start + 12)))
    return body[:start] + draw(st.one_of(st.binary(max_size=4), st.just(body[start:end] * 2))) + body[end:]


_HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "content-length",
                "x-priority",
                "x-admission-max-wait",
                "x-vllm-priority",
                "x-dynamo-request-priority",
                "x-override-priority",
                "transfer-encoding",
            ]
        ).map(str.encode),
        st.binary(max_size=6) | st.sampled_from([b"1", b"0.5", b"high", b"10ms"]),
    ),
    max_size=3,
)


@given(st.one_of(st.binary(max_size=64), _OBJECTS, mutated()), _PATHS, _ENGINES, _HEADERS)
@example(b'{"messages":["hi"],"nvext":{"agent_hints":{"priority":1}},"nvext":null}', CHAT, "dynamo", [])
def test_whatever_comes_is_served_or_refused_and_nothing_is_left(
    body: bytes, path: str, engine: str, headers: list[tuple[bytes, bytes]]
) -> None:
    guarded = Guarded(App(), _policies(engine))
    caller = Caller(guarded.sidecar, body, path=path, headers=headers)

    async def run() -> None:
        await caller.run()
        await guarded.nothing_left()

    asyncio.run(run())
    assert caller.status in (200, 400, 413)
    if caller.status != 200:
        assert caller.json["error"]["message"]


_MADE: dict[str, Any] = {}


def _policies(engine: str) -> Any:
    if engine not in _MADE:
        _MADE[engine] = policy(engine=engine)
    return _MADE[engine]
