"""What a strict client makes of the bytes of a connection: one response after the other, each whole or not."""

from __future__ import annotations

import re
from typing import NamedTuple

_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+: [\t\x20-\x7e\x80-\xff]*")


class Response(NamedTuple):
    """One response. `is_whole` is False where the connection ended before it did."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    is_whole: bool

    def all(self, name: bytes) -> list[bytes]:
        """Every value of a header."""
        return [value for found, value in self.headers if found.lower() == name]


def responses(raw: bytes, *, may_be_to_head: bool = False) -> list[Response]:
    """All of them, interim ones left out. Fails where the bytes are no HTTP/1.1, or anything stands between two.

    `may_be_to_head`: a request may have been a HEAD, and the next response follows the headers of its own.
    """
    found = []
    while raw:
        head, end, rest = raw.partition(b"\r\n\r\n")
        assert end, raw
        status, *lines = head.split(b"\r\n")
        assert re.fullmatch(rb"HTTP/1\.1 [1-5][0-9][0-9] [\t\x20-\x7e]*", status), raw
        assert [line for line in lines if not _LINE.fullmatch(line)] == [], raw
        code = int(status.split(b" ")[1])
        if code == 100:
            raw = rest
            continue
        headers = tuple((name.lower(), value) for name, _, value in (line.partition(b": ") for line in lines))
        if may_be_to_head and rest.startswith(b"HTTP/1.1 "):
            body, is_whole, raw = b"", True, rest
        else:
            body, is_whole, raw = _body(code, headers, rest)
        found.append(Response(code, headers, body, is_whole))
    return found


def _body(code: int, headers: tuple[tuple[bytes, bytes], ...], rest: bytes) -> tuple[bytes, bool, bytes]:
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if code in {204, 304}:
        return b"", True, rest
    assert (len(lengths), codings) in ((1, []), (0, [b"chunked"])), headers
    if lengths:
        length = int(lengths[0])
        return rest[:length], len(rest) >= length, rest[length:]
    body = b""
    while True:
        size, end, rest = rest.partition(b"\r\n")
        if not end:
            return body, False, b""
        count = int(size, 16)
        if len(rest) < count + 2:
            return body + rest, False, b""
        assert rest[count : count + 2] == b"\r\n", rest
        body, rest = body + rest[:count], rest[count + 2 :]
        if not count:
            return body, True, rest
