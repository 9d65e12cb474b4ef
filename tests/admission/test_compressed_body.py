"""Compressed request bodies: read within bounds, and passed to the engine as they would be without compression."""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import AdmissionError, BodyTooLarge, InvalidBody
from sidecar.payload.content_codings import FREE_BYTES, MOST_RATIO, packed_body
from tests.support.each import each
from tests.support.middleware import App, chat, guarding, key, policy

pytestmark = pytest.mark.anyio

BODY = json.dumps(chat(priority="high", max_tokens=7)).encode()
PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": gzip.compress,
    "zstd": zstandard.compress,
    "identity": bytes,
    "": bytes,
    "identity, gzip": gzip.compress,
    "zstd,gzip ": lambda body: gzip.compress(zstandard.compress(body)),
}
MOST = 1 << 21


def unpacked(coding: str, body: bytes, most: int = MOST, size: int = 1000) -> bytes:
    """The plain body, of one that arrives in pieces of `size`."""
    packed = packed_body([(b"content-encoding", coding.encode())], most)
    assert packed is not None
    pieces = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    return b"".join(packed.feed(piece, is_last=at == len(pieces) - 1) for at, piece in enumerate(pieces))


async def test_the_engine_gets_the_plain_body_as_if_it_had_been_sent_so() -> None:
    app = App()
    async with guarding(app) as guarded:
        for coding, pack in PACK.items():
            answer = await guarded.ask(pack(BODY), key("acme"), f"content-encoding: {coding}")
            assert (answer.status, answer.headers["x-admission-tier"]) == (200, "high"), coding
        for pieces in (["content-encoding: zstd", "content-encoding: gzip"],):  # two headers are one list
            assert (await guarded.ask(PACK["zstd,gzip "](BODY), key("acme"), *pieces)).status == 200
        plain = await guarded.ask(BODY, key("acme"))
        assert plain.status == 200
        for seen in app.seen[:-1]:
            assert seen.body == app.seen[-1].body
            assert seen.all(b"content-length") == [b"%d" % len(seen.body)]
            assert b"".join(seen.all(b"content-encoding")) in (b"", b"identity")
        await guarded.nothing_left()


async def test_what_is_not_read_is_a_415_that_says_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App()
    async with guarding(app) as guarded:
        for coding in ("br", "deflate", "gzip, br", "gzip;q=1", "gzip, gzip, gzip, gzip", "\xff"):
            refused = await guarded.ask(BODY, key("acme"), f"content-encoding: {coding}")
            assert refused.is_error(415, "unsupported_encoding", "gzip, zstd", "uncompressed"), coding
            assert refused.headers["accept-encoding"] == "gzip, zstd"
            assert refused.headers["x-should-retry"] == "false"
        monkeypatch.setitem(sys.modules, "zstandard", None)
        monkeypatch.setitem(sys.modules, "compression.zstd", None)
        refused = await guarded.ask(zstandard.compress(BODY), "content-encoding: zstd", path="/v1/messages")
        assert (refused.status, refused.headers["accept-encoding"]) == (415, "gzip")
        assert refused.json["error"]["type"] == "invalid_request_error"
        assert app.seen == []
        await guarded.nothing_left()


async def test_a_path_that_is_not_guarded_gets_what_was_sent() -> None:
    app = App()
    async with guarding(app, policy("unguarded: allow\n")) as guarded:
        body = gzip.compress(BODY)
        assert (await guarded.ask(body, "content-encoding: gzip", path="/own")).status == 200
        (seen,) = app.seen
        assert (seen.body, seen.all(b"content-encoding")) == (body, [b"gzip"])


def noise(size: int) -> bytes:
    """Bytes that no coding makes smaller."""
    return random.Random(1).randbytes(size)


GZIPPED, ZSTD = gzip.compress(noise(5000)), zstandard.compress(noise(5000))
REFUSED: dict[str, tuple[str, bytes, type[AdmissionError], str]] = {
    "gzip cut off": ("gzip", GZIPPED[:-1], InvalidBody, "in the middle"),
    "gzip of nothing but a head": ("gzip", GZIPPED[:5], InvalidBody, "in the middle"),
    "gzip with a wrong sum": ("gzip", GZIPPED[:-8] + bytes(8), InvalidBody, "damaged"),
    "gzip and then something": ("gzip", GZIPPED + b"{}", InvalidBody, "damaged"),
    "plain text as gzip": ("gzip", b"{}", InvalidBody, "not gzip"),
    "zlib as gzip": ("gzip", zlib.compress(BODY), InvalidBody, "not gzip"),
    "zstd cut off": ("zstd", ZSTD[:-1], InvalidBody, "in the middle"),
    "zstd damaged": ("zstd", ZSTD[:9] + b"\xff" * 9 + ZSTD[18:], InvalidBody, "damaged"),
    "plain text as zstd": ("zstd", b"{} and more", InvalidBody, "not zstd"),
    "zstd with a window of 64 MiB": ("zstd", b"\x28\xb5\x2f\xfd\x00\x80" + bytes(9), InvalidBody, "not zstd"),
    "gzip in zstd cut off": ("gzip, zstd", zstandard.compress(GZIPPED[:-1]), InvalidBody, "in the middle of its gzip"),
    "too many members": ("gzip", gzip.compress(b"") * 1001, InvalidBody, "more than 1000 parts"),
    "too many frames": ("zstd", zstandard.compress(b"") * 1001, InvalidBody, "more than 1000 parts"),
    "too large before": ("gzip", gzip.compress(noise(MOST), 0) + GZIPPED, BodyTooLarge, "larger than"),
    "too large after": (
        "gzip",
        gzip.compress(noise(MOST // 2 + 1).hex().encode(), 1),
        BodyTooLarge,
        f"more than the {MOST} bytes",
    ),
    "gzip bomb": ("gzip", gzip.compress(bytes(MOST)), BodyTooLarge, "100 times its size"),
    "zstd bomb": ("zstd", zstandard.compress(bytes(1 << 26)), BodyTooLarge, "more than"),
    "bomb in a bomb": ("zstd, gzip", gzip.compress(zstandard.compress(bytes(1 << 26))), BodyTooLarge, "more than"),
    "many empty blocks": ("gzip, zstd", zstandard.compress(b"\0\0\0\xff\xff" * (1 << 20)), BodyTooLarge, "more than"),
}


@each(("coding", "body", "kind", "words"), REFUSED.values(), list(REFUSED))
def test_a_body_that_does_not_unpack_within_bounds_is_refused(
    coding: str, body: bytes, kind: type[AdmissionError], words: str
) -> None:
    for size in (len(body), 7000):
        tracemalloc.start()
        try:
            with pytest.raises(kind, match=words):
                unpacked(coding, body, size=size)
            assert tracemalloc.get_traced_memory()[1] < 5 * MOST
        finally:
            tracemalloc.stop()


def test_a_repeated_phrase_and_many_members_are_read() -> None:
    assert len(unpacked("gzip", gzip.compress(b"word " * (FREE_BYTES // 5)))) > FREE_BYTES - 5
    slow = noise(FREE_BYTES // MOST_RATIO * 2) + bytes(FREE_BYTES)
    assert unpacked("zstd", zstandard.compress(slow)) == slow
    for pack, coding in ((gzip.compress, "gzip"), (zstandard.compress, "zstd")):
        assert unpacked(coding, b"".join(pack(b"%d," % n) for n in range(1000)))[-4:] == b"999,"
    assert unpacked("gzip", b"") == b""


@given(
    st.binary(max_size=5000), st.sampled_from([name for name in PACK if PACK[name] is not bytes]), st.integers(1, 99)
)
def test_every_body_arrives_whole_however_it_is_cut(body: bytes, coding: str, size: int) -> None:
    assert unpacked(coding, PACK[coding](body), size=size) == body


@given(st.binary(max_size=300), st.sampled_from(["gzip", "zstd", "gzip, zstd"]), st.integers(1, 99), st.booleans())
def test_no_bytes_do_more_than_be_refused(body: bytes, coding: str, size: int, begins_well: bool) -> None:
    with suppress(InvalidBody, BodyTooLarge):
        unpacked(coding, (GZIPPED if coding == "gzip" else ZSTD)[: 40 if begins_well else 0] + body, size=size)


async def test_a_body_that_is_too_large_unpacked_is_refused_and_nothing_more_is_waited_for() -> None:
    async with guarding(App(), policy(body_timeout="60s")) as guarded:  # longer than a test asks
        refused = await guarded.ask(gzip.compress(os.urandom(1000) + bytes(100_000)), "content-encoding: gzip")
        assert refused.is_error(413, "body_too_large", "unpacks to more than the 65536 bytes")
        assert guarded.recorder.ends == ["body_too_large"]
        await guarded.nothing_left()
