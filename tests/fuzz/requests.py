"""Requests as hypothesis makes them: right but for something, wrong in a way that parsers differ on, or plain bytes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.support.middleware import KEYS

METHODS = ["POST", "POST", "POST", "POST", "GET", "HEAD", "PUT", "OPTIONS", "DELETE", "CONNECT", "PRI", "post", ""]
TARGETS = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
    "/v1/batch/completions", "/v1/models", "//v1/chat/completions", "/v1/chat/completions/", "/v1/%63hat/completions",
    "/v1/./messages?x=%0d%0a", "http://other/v1/chat/completions", "*", "?", "/\x00", "/é", "other:80", "",
]  # fmt: skip
NUMBERS = ["0", "1", "-1", "1e400", "9" * 40, "0.5", "2147483648", "NaN", "true", '"1"', "[]", "null", "-0", "1_0"]
NAMES = [
    "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "model",
    "stream", "stream_options", "tools", "system", "instructions", "priority", "pr\\u0069ority", "nvext", "user", "x",
]  # fmt: skip
HEADERS = [
    "authorization", "x-api-key", "x-priority", "x-admission-max-wait", "x-request-id", "traceparent", "tracestate",
    "baggage", "content-length", "transfer-encoding", "connection", "upgrade", "expect", "te", "trailer", "host",
    "x-vllm-priority", "x-override-priority", "x-dynamo-request-priority", "content-type", "content-encoding",
    "x-forwarded-for", "x_vllm_priority", "x-admission-deadline", "cookie", "keep-alive", "range", "", " x", "x y",
    "x:",
]  # fmt: skip
VALUES = [
    "20ms", "9999-12-31T23:59:59Z",
    "", " ", "1", "0", "-1", "0x10", "19", "1e9", "close", "keep-alive", "chunked", "identity", "gzip, chunked", "gzip",
    "100-continue", "high", "batch", "gold", "0.5", "2", "nan", "10ms", "-1s", "1h", "soon", "upgrade", "h2c",
    "Bearer " + KEYS["acme"], "Bearer " + KEYS["nightly"], "Bearer unknown", "Basic eDp5", KEYS["acme"], "websocket",
    "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "00-x", "a=b,c=d", "é", "\x00", "\x7f", "\t", "a" * 300, '"', "a\r\n b",
]  # fmt: skip

_TEXT = st.text(max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT | st.sampled_from(["high", "image_url", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "content", "agent_hints", "priority", "text"]), inner, max_size=3)
    ),
    max_leaves=8,
).map(json.dumps)
_MEMBERS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NUMBERS) | JSON), max_size=6)
_RIGHT = st.sampled_from(
    [
        '{"messages":["hi"],"max_tokens":5}',
        '{"prompt":"hi","max_tokens":5}',
        '{"input":"hi"}',
        '{"messages":[{"role":"user","content":"hi"}],"stream":true,"priority":"high"}',
    ]
)


def _object(members: list[tuple[str, str]]) -> str:
    return "{" + ",".join(f'"{name}":{value}' for name, value in members) + "}"


BODIES = st.one_of(_RIGHT, _MEMBERS.map(_object), JSON).map(lambda text: text.encode("utf-8", "surrogatepass"))


@st.composite
def mutated(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """The same with pieces cut out, doubled, moved or replaced."""
    made = draw(whole)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(made)))
        end = draw(st.integers(start, min(len(made), start + 40)))
        piece = draw(
            st.one_of(
                st.binary(max_size=4),
                st.just(made[start:end] * 2),
                st.sampled_from(
                    [b"", b"\r\n", b"\n", b"\r", b"\x00", b" ", b"\t", b":", b"\r\n\r\n", b"0\r\n\r\n", b"\xff"]
                ),
            )
        )
        made = made[:start] + piece + made[end:]
    return made


def _chunked(body: bytes, sizes: list[int], odd: str) -> bytes:
    framed = b""
    for size in sizes:
        part, body = body[:size], body[size:]
        if part:
            framed += b"%x%s\r\n%s\r\n" % (len(part), odd.encode(), part)
    if body:
        framed += b"%x\r\n%s\r\n" % (len(body), body)
    return framed + b"0\r\n\r\n"


@st.composite
def _requests(draw: st.DrawFn) -> bytes:
    body = draw(BODIES | mutated(BODIES))
    pairs: list[tuple[str, str]] = draw(
        st.lists(st.tuples(st.sampled_from(HEADERS), st.sampled_from(VALUES) | st.text(max_size=8)), max_size=4)
    )
    framing = draw(st.sampled_from(["length", "length", "length", "chunks", "none", "wrong"]))
    if framing == "length":
        pairs.append(("content-length", str(len(body))))
    elif framing == "chunks":
        pairs.append(("transfer-encoding", "chunked"))
        odd = draw(st.sampled_from(["", "", ";a=1", ' ;a="x"', " ", "\n"]))
        body = _chunked(body, draw(st.lists(st.integers(0, 30), max_size=4)), odd)
    elif framing == "wrong":
        pairs.append(("content-length", str(len(body) + draw(st.integers(-3, 3)))))
    draw(st.randoms(use_true_random=False)).shuffle(pairs)
    line = f"{draw(st.sampled_from(METHODS))} {draw(st.sampled_from(TARGETS))} HTTP/{draw(st.sampled_from(VERSIONS))}"
    head = "\r\n".join([line, *draw(st.sampled_from([["host: sidecar"], ["host: sidecar"], []])), *_written(pairs)])
    return head.encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body


VERSIONS = ["1.1", "1.1", "1.1", "1.0", "2.0", "0.9", "x"]


def _written(pairs: list[tuple[str, str]]) -> list[str]:
    return [f"{name}: {value}" for name, value in pairs]


REQUESTS: st.SearchStrategy[bytes] = _requests()
WIRE: st.SearchStrategy[bytes] = st.one_of(
    REQUESTS,
    mutated(REQUESTS),
    st.tuples(REQUESTS, REQUESTS).map(b"".join),
    st.binary(max_size=60),
)


def scopes() -> st.SearchStrategy[dict[str, Any]]:
    """What a lenient server might hand to the sidecar: headers that no parser of ours would let through."""
    value = st.sampled_from(VALUES).map(lambda text: text.encode("utf-8")) | st.binary(max_size=8)
    names = st.sampled_from([name for name in HEADERS if name.strip()]).map(str.encode)
    return st.fixed_dictionaries(
        {
            "path": st.sampled_from(TARGETS[:6]),
            "headers": st.lists(st.tuples(names, value), max_size=5),
            "query_string": st.binary(max_size=6),
        }
    )
