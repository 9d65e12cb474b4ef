"""One request stays one request: hostile bytes through a real `sidecar serve`, and what a real server behind it saw.

Each case goes to a server that records what comes, and in CI's second step to two more, uvicorn with h11 and with
httptools. On the same connection a last request follows, and on another one a stranger's: neither may be touched by
what came before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.security.behind import RAW, REAL, Behind, Seen, standing
from tests.support.each import each

GUARDED, UNGUARDED = b"/v1/chat/completions", b"/v1/files"
BODY = b'{"messages":["hi"]}'
LENGTH = b"content-length: 19"
CHUNKS = b"13\r\n" + BODY + b"\r\n0\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: sidecar\r\n\r\n"
STRANGER = b"POST /stranger HTTP/1.1\r\nhost: sidecar\r\ncontent-length: 3\r\nconnection: close\r\n\r\nabc"


@pytest.fixture(scope="module", params=[RAW, *(pytest.param(kind, marks=pytest.mark.long) for kind in REAL)])
def behind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    folder = tmp_path_factory.mktemp("policy")
    with standing(request.param, folder, "unguarded: allow\n", SIDECAR_LOG_LEVEL="error") as found:
        yield found


class Case(NamedTuple):
    """Headers and what follows them. `head` ends without its line end; `rest` is what stands behind the blank line."""

    name: str
    head: bytes
    rest: bytes = BODY


REFUSED = [
    Case("CL.TE", b"content-length: 24\r\ntransfer-encoding: chunked", b"0\r\n\r\n" + SMUGGLED),
    Case("TE.CL", b"transfer-encoding: chunked\r\ncontent-length: 4", CHUNKS + SMUGGLED),
    Case("TE.TE identity", b"transfer-encoding: chunked\r\ntransfer-encoding: identity", CHUNKS + SMUGGLED),
    Case("TE.TE other first", b"transfer-encoding: x\r\ntransfer-encoding: chunked", CHUNKS + SMUGGLED),
    Case("TE unknown", b"transfer-encoding: xchunked", CHUNKS + SMUGGLED),
    Case("TE not last", b"transfer-encoding: chunked, identity", CHUNKS + SMUGGLED),
    Case("TE gzip first", b"transfer-encoding: gzip, chunked", CHUNKS + SMUGGLED),
    Case("TE identity", b"transfer-encoding: identity", CHUNKS + SMUGGLED),
    Case("TE quoted", b'transfer-encoding: "chunked"', CHUNKS + SMUGGLED),
    Case("TE with a parameter", b"transfer-encoding: chunked;q=1", CHUNKS + SMUGGLED),
    Case("TE vertical tab", b"transfer-encoding: \x0bchunked", CHUNKS + SMUGGLED),
    Case("TE nul", b"transfer-encoding: chunked\x00", CHUNKS + SMUGGLED),
    Case("TE empty", b"transfer-encoding: ", CHUNKS + SMUGGLED),
    Case("TE space before the colon", b"transfer-encoding : chunked", CHUNKS + SMUGGLED),
    Case("CL twice, different", LENGTH + b"\r\ncontent-length: 3"),
    Case("CL twice, alike", LENGTH + b"\r\n" + LENGTH),
    Case("CL a list", b"content-length: 19, 19"),
    Case("CL plus", b"content-length: +19"),
    Case("CL minus", b"content-length: -19"),
    Case("CL hexadecimal", b"content-length: 0x13"),
    Case("CL space inside", b"content-length: 1 9"),
    Case("CL underscore inside", b"content-length: 1_9"),
    Case("CL beyond 64 bits", b"content-length: 18446744073709551635"),
    Case("CL space before the colon", b"content-length : 19"),
    Case("a bare CR", b"x-a: 1\rtransfer-encoding: chunked\r\n" + LENGTH),
    Case("a name with NUL", b"x\x00a: 1\r\n" + LENGTH),
    Case("a value with NUL", b"x-a: 1\x002\r\n" + LENGTH),
    Case("no colon", b"x-a\r\n" + LENGTH),
    Case("no name", b": 1\r\n" + LENGTH),
    Case("two hosts", b"host: other\r\n" + LENGTH),
    Case("chunk size 0x", b"transfer-encoding: chunked", b"0x13\r\n" + BODY + b"\r\n0\r\n\r\n" + SMUGGLED),
    Case("chunk size plus", b"transfer-encoding: chunked", b"+13\r\n" + BODY + b"\r\n0\r\n\r\n" + SMUGGLED),
    Case("chunk size minus", b"transfer-encoding: chunked", b"-1\r\n" + BODY + b"\r\n0\r\n\r\n" + SMUGGLED),
    Case("chunk size underscore", b"transfer-encoding: chunked", b"1_3\r\n" + BODY + b"\r\n0\r\n\r\n" + SMUGGLED),
    Case("chunk size none", b"transfer-encoding: chunked", b"\r\n" + BODY + b"\r\n0\r\n\r\n" + SMUGGLED),
    Case("chunk size beyond 64 bits", b"transfer-encoding: chunked", b"1" + b"0" * 15 + CHUNKS + SMUGGLED),
    Case("chunk longer than its size", b"transfer-encoding: chunked", b"10\r\n" + BODY + b"\r\n0\r\n\r\n" + SMUGGLED),
    Case("chunk shorter than its size", b"transfer-encoding: chunked", b"14\r\n" + BODY + b"\r\n0\r\n\r\n" + SMUGGLED),
]  # fmt: skip

# Those that some parsers' versions refuse. What passes has to be the one request that we understood.
REFUSED_OR_PASSED = [
    Case("a folded header", b"x-a: 1\r\n folded\r\n" + LENGTH),
    Case("a folded length", b"content-length:\r\n 19"),
    Case("a folded TE", b"transfer-encoding:\r\n chunked", CHUNKS),
    Case("a bare LF", b"x-a: 1\n" + LENGTH),
    Case("a value with a vertical tab", b"x-a: 1\x0b2\r\n" + LENGTH),
    Case("an extension", b"transfer-encoding: chunked", b"13;a=1;b\r\n" + CHUNKS[4:]),
    Case("a length among the trailers", b"transfer-encoding: chunked", CHUNKS[:-2] + b"content-length: 5\r\n\r\n"),
    Case("an extension with a line end", b"transfer-encoding: chunked", b'13;a="\r\n' + CHUNKS[4:]),
    Case("a space behind a chunk's size", b"transfer-encoding: chunked", b"13 \r\n" + CHUNKS[4:]),
    Case("a bare LF behind a chunk's size", b"transfer-encoding: chunked", b"13\n" + CHUNKS[4:]),
]
PASSED = [
    Case("TE in capitals", b"Transfer-Encoding: CHUNKED", CHUNKS),
    Case("TE behind a tab", b"transfer-encoding:\tchunked", CHUNKS),
    Case("zeros before a length", b"content-length: 0019"),
    Case("zeros before a chunk's size", b"transfer-encoding: chunked", b"0" * 20 + CHUNKS),
    Case("a name with an underscore", b"content_length: 3\r\ntransfer_encoding: chunked\r\n" + LENGTH),
    Case("Expect", b"expect: 100-continue\r\n" + LENGTH),
    Case("an offer of h2c", b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n" + LENGTH),
    Case("an offer of WebSockets", b"connection: upgrade\r\nupgrade: websocket\r\n" + LENGTH),
    Case("Connection names what frames", b"connection: content-length, transfer-encoding, host\r\n" + LENGTH),
    Case("trailers", b"transfer-encoding: chunked", CHUNKS[:-2] + b"x-late: 1\r\nx-vllm-priority: 1\r\nte: x\r\n\r\n"),
]  # fmt: skip


def names(cases: list[Case]) -> dict[str, Any]:
    return {"ids": [case.name for case in cases]}


def request(path: bytes, case: Case) -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: sidecar\r\n%s\r\n\r\n%s" % (path, case.head, case.rest)


def untouched(behind: Behind) -> None:
    """A stranger's request, on whichever connection to the server is free, gets its own answer and no one else's."""
    count = len(behind.seen)
    answer = behind.send(STRANGER, b"")
    assert answer.endswith(b"\r\n\r\n<POST /stranger 3>"), answer
    assert answer.count(b"HTTP/1.1") == 1
    (seen,) = behind.seen[count:]
    assert (seen.method, seen.target, seen.body) == (b"POST", b"/stranger", b"abc")


@each("path", [GUARDED, UNGUARDED], ids=["guarded", "unguarded"])
@each("case", REFUSED, **names(REFUSED))
def test_what_two_servers_could_read_differently_reaches_none(behind: Behind, case: Case, path: bytes) -> None:
    count = len(behind.seen)
    answer = behind.send(request(path, case))
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert answer.count(b"HTTP/1.1 ") - answer.count(b"an HTTP/1.1 request") == 1
    assert b'"type":"invalid_request_error"' in answer
    # On an unguarded path the body is streamed: its beginning may be there, but it must never look whole.
    assert behind.seen[count:] == []
    untouched(behind)


@each("path", [GUARDED, UNGUARDED], ids=["guarded", "unguarded"])
@each("case", [*PASSED, *REFUSED_OR_PASSED], **names([*PASSED, *REFUSED_OR_PASSED]))
def test_what_passes_is_one_request_and_the_one_we_understood(behind: Behind, case: Case, path: bytes) -> None:
    count = len(behind.seen)
    answer = behind.send(request(path, case))
    seen = behind.seen[count:]
    if case in REFUSED_OR_PASSED and answer.startswith(b"HTTP/1.1 400 "):
        assert seen == []
    else:
        first, last = seen
        assert (first.method, first.target, first.body) == (b"POST", path, BODY)
        is_framed_once(first)
        assert (last.method, last.target, last.body) == (b"GET", b"/last", b"")
        answers = [part for part in answer.split(b"HTTP/1.1 ") if part and not part.startswith(b"100")]
        assert [part.rpartition(b"\r\n\r\n")[2] for part in answers] == [behind.echo(each) for each in seen]
    untouched(behind)


def is_framed_once(seen: Seen) -> None:
    """Its length is said in one way, and nothing of one hop or of a trailer has come along."""
    lengths, codings = seen.all(b"content-length"), seen.all(b"transfer-encoding")
    assert (lengths, codings) in (([b"19"], []), ([], [b"chunked"]))
    gone = (b"connection", b"upgrade", b"http2-settings", b"expect", b"te", b"trailer", b"x-late")
    assert [name for name, _ in seen.headers if name in gone] == []
    assert len(seen.all(b"host")) == 1
    assert seen.all(b"x-vllm-priority") == ([b"20"] if seen.target == GUARDED else [])


@each("second", [b"", b"GET /smuggled HTTP/1.1\r\nhost: sidecar\r\n\r\n"])
def test_pipelined_requests_are_answered_in_order_each_its_own(behind: Behind, second: bytes) -> None:
    count = len(behind.seen)
    first = b"POST %s HTTP/1.1\r\nhost: sidecar\r\n%s\r\n\r\n%s" % (GUARDED, LENGTH, BODY)
    answer = behind.send(first * 3 + second)
    seen = behind.seen[count:]
    assert [each.target for each in seen] == [GUARDED] * 3 + ([b"/smuggled"] if second else []) + [b"/last"]
    answers = answer.split(b"HTTP/1.1 200 OK")[1:]
    assert [part.rpartition(b"\r\n\r\n")[2] for part in answers] == [behind.echo(each) for each in seen]


@each(
    ("line", "target"),
    [
        (b"POST http://elsewhere/v1/chat/completions HTTP/1.1", GUARDED),
        (b"POST http://user:secret@elsewhere:1/v1/chat/completions?a=1 HTTP/1.1", GUARDED + b"?a=1"),
        (b"POST //elsewhere/v1/files HTTP/1.1", b"//elsewhere/v1/files"),
        (b"POST /v1/files%0d%0aX-A:%201 HTTP/1.1", b"/v1/files%0d%0aX-A:%201"),
        (b"POST /v1/files?a=%0d%0a%00 HTTP/1.1", b"/v1/files?a=%0d%0a%00"),
    ],
)
def test_a_target_names_a_path_and_nothing_else(behind: Behind, line: bytes, target: bytes) -> None:
    count = len(behind.seen)
    behind.send(b"%s\r\nhost: sidecar\r\n%s\r\n\r\n%s" % (line, LENGTH, BODY))
    first, _ = behind.seen[count:]
    assert (first.target, first.body) == (target, BODY)
    assert len(first.all(b"host")) == 1
    assert b"elsewhere" not in first.all(b"host")[0]
    assert b"secret" not in b"".join(value for _, value in first.headers)


@each(
    "line",
    [
        b"CONNECT engine:8000 HTTP/1.1",
        b"CONNECT /v1/files HTTP/1.1",
        b"PRI * HTTP/2.0",
        b"POST /v1/files x HTTP/1.1",
        b"POST /v1/files\x01 HTTP/1.1",
        b"POST /v1/files\x00 HTTP/1.1",
        b"post /v1/files HTTP/1.1",
        b"POST v1/files HTTP/1.1",
        b"POST  HTTP/1.1",
    ],
)
def test_a_line_that_is_no_request_is_a_400(behind: Behind, line: bytes) -> None:
    count = len(behind.seen)
    assert behind.send(b"%s\r\nhost: sidecar\r\n%s\r\n\r\n%s" % (line, LENGTH, BODY)).startswith(b"HTTP/1.1 400 ")
    assert behind.seen[count:] == []
    untouched(behind)


@each(
    "path",
    [
        b"/v1/%63hat/completions",
        b"//v1/chat/completions",
        b"/v1//chat/completions",
        b"/x/../v1/chat/completions",
        b"/v1/./chat/completions",
        b"/v1/chat/completions/",
        b"/v1/chat/completions/x/..",
        b"/v1/%2e%2e/v1/chat/completions",
        b"/v1/chat/completions%0A",  # Starlette's routes end with `$`, which also stands before a line's end
        b"/v1/chat/completions%20",
        b"/v1/chat%2Fcompletions",
        b"/V1/Chat/Completions",
        b"/v1/%2563hat/completions",
        b"/v1/chat\\completions",
        b"/v1/chat;a=b/completions;c",
    ],
)
def test_a_guarded_path_is_guarded_however_it_is_written(behind: Behind, path: bytes) -> None:
    """What is behind us may merge slashes and resolve dots: else a request could so pass the sidecar by.

    The engine gets the path that was admitted. In the one spelling that every engine reads alike, it is the client's.
    """
    count = len(behind.seen)
    answer = behind.send(request(path + b"?api-version=1", Case("", LENGTH)))
    assert b"x-admission-tier: normal" in answer
    target = path if path in {b"/v1/%63hat/completions", b"/v1/chat%2Fcompletions"} else GUARDED
    assert behind.seen[count].target == target + b"?api-version=1"
    assert behind.seen[count].all(b"x-vllm-priority") == [b"20"]


# What is written by us into somebody's headers


@each(
    "value",
    [
        b"high\xe5\x98\x8a\xe5\x98\x8dset-cookie: a=1",  # two characters whose last bytes are CR and LF
        b"high%0d%0aset-cookie: a=1",
        b"high\\r\\nset-cookie: a=1",
        b"high\x0bset-cookie: a=1",
        b"high\x85set-cookie: a=1",
        b"\xe2\x80\xa8high",
    ],
)
@each("header", [b"x-priority", b"x-admission-max-wait", b"x-request-id", b"authorization"])
def test_no_value_of_a_client_ends_a_header_of_ours(behind: Behind, header: bytes, value: bytes) -> None:
    case = Case("", b"%s: %s\r\n%s" % (header, value, LENGTH))
    answer = behind.send(request(GUARDED, case))
    head = answer.partition(b"\r\n\r\n")[0]
    assert b"set-cookie" not in head
    assert all(b": " in line for line in head.split(b"\r\n")[1:])
    untouched(behind)


@each("where", ["body", "header"])
def test_what_is_said_of_ignored_priorities_is_in_one_line(behind: Behind, where: str) -> None:
    body = b'{"messages":["hi"],"nvext":{"agent_hints":{"priority":1,"x\\r\\nset-cookie: a=1":2}}}'
    header = b"x-override-a\xc3\xa9: 1\r\n" if where == "header" else b""
    request_bytes = b"POST %s HTTP/1.1\r\nhost: sidecar\r\n%scontent-length: %d\r\n\r\n%s" % (
        GUARDED,
        header,
        len(body),
        body,
    )
    answer = behind.send(request_bytes)
    assert b"set-cookie" not in answer.partition(b"\r\n\r\n")[0]
    untouched(behind)
