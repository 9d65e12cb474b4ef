r"""Changes single members of a JSON object and leaves every other byte as the client wrote it.

The body has been validated before (`payload.read`), so the scan may trust its syntax: it only has to tell strings from
structure. Keys are compared decoded, because `"pr\u0069ority"` is `priority` to the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],:]', re.DOTALL)
_OPENS = re.compile(rb"[ \t\r\n]*\{")
_CLOSES = re.compile(rb"[ \t\r\n]*\}")


class Member(NamedTuple):
    """One `"key": value` of an object, as offsets into the body; `end` is behind the value."""

    key: str
    start: int
    value: int
    end: int


def insert(body: bytes, key: str, value: bytes) -> bytes:
    """Puts a member first in the outermost object. `value` is JSON."""
    inside = body.index(b"{") + 1
    comma = b"" if _CLOSES.match(body, inside) else b","
    return b'%b"%b":%b%b%b' % (body[:inside], key.encode(), value, comma, body[inside:])


def remove(body: bytes, path: Sequence[str]) -> bytes:
    """Takes out every member that a path of keys leads to, duplicates included."""
    opens = _OPENS.match(body)
    if opens is None:
        return body
    found = list(_find(body, opens.end() - 1, tuple(path)))
    for start, end in reversed(found):
        body = body[:start] + body[end:]
    return body


def _find(body: bytes, opening: int, path: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """The spans to cut, commas included, in order."""
    members = list(_members(body, opening))
    cut_before = True  # nothing that stays stands before this member: its comma is the one behind it
    for index, member in enumerate(members):
        if member.key != path[0]:
            cut_before = False
        elif len(path) > 1:
            cut_before = False
            if body[member.value : member.value + 1] == b"{":
                yield from _find(body, member.value, path[1:])
        elif not cut_before:
            yield members[index - 1].end, member.end
        else:
            following = members[index + 1].start if index + 1 < len(members) else member.end
            yield member.start, following


def _members(body: bytes, opening: int) -> Iterator[Member]:
    """The members of the object that opens at `opening`."""
    depth = 0
    key: re.Match[bytes] | None = None
    value = -1
    end = opening
    for token in _TOKEN.finditer(body, opening):
        mark = token.group()[:1]
        if mark in b"}]":
            depth -= 1
        if depth == 1 and key is None and mark == b'"':
            key = token
        elif depth == 1 and mark == b":" and value < 0:
            value = _next_byte(body, token.end())
        elif key is not None and ((depth == 1 and mark == b",") or depth == 0):
            end = _last_byte(body, token.start())
            yield Member(msgspec.json.decode(key.group(), type=str), key.start(), value, end)
            key, value = None, -1
        if depth == 0 and mark == b"}":
            return
        if mark in b"{[":
            depth += 1


def _next_byte(body: bytes, offset: int) -> int:
    while body[offset] in b" \t\r\n":
        offset += 1
    return offset


def _last_byte(body: bytes, offset: int) -> int:
    while body[offset - 1] in b" \t\r\n":
        offset -= 1
    return offset
