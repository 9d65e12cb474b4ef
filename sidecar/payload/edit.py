r"""Edits of single members of a JSON object; every other byte stays as the client wrote it.

The body has been validated before (`payload.decode`), so the scan may trust its syntax: it only tells strings from
structure. It finds the keys first and counts the brackets up to each, all in C: a body of 8 MB takes milliseconds, and
a body of millions of brackets or strings does not block the event loop.

Keys match decoded, because `"pr\u0069ority"` is `priority` to the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

_SPACES = b" \t\r\n"
_SPACE = re.compile(rb"[ \t\r\n]*")
_OPENS = re.compile(rb"[ \t\r\n]*\{")
_CLOSES = re.compile(rb"[ \t\r\n]*\}")
_SCALAR = re.compile(rb'"[^"]*"|[^\s,}\]]+')
_STRUCTURE = re.compile(rb'"[^"]*"|[{}\[\]]')
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_STEP = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}
_FIRST_CHUNK = 256


def insert(body: bytes, key: str, value: bytes) -> bytes:
    """Puts a member first in the outermost object. `value` is JSON."""
    inside = body.index(b"{") + 1
    comma = b"" if _CLOSES.match(body, inside) else b","
    return b'%b"%b":%b%b%b' % (body[:inside], key.encode(), value, comma, body[inside:])


def remove(body: bytes, path: Sequence[str]) -> bytes:
    """Removes every member at the end of a path of keys, duplicates included. Keys are ASCII identifiers."""
    if _OPENS.match(body) is None:
        return body
    plain = _without_escaped_quotes(body)
    kept, since = [], 0
    for start, end in _cuts(plain, _members(plain, tuple(path))):
        kept.append(body[since:start])
        since = end
    return b"".join([*kept, body[since:]]) if kept else body


def count(body: bytes, key: str) -> int:
    """How many members of the outermost object have this key, an ASCII identifier."""
    if _OPENS.match(body) is None:
        return 0
    return sum(1 for _ in _members(_without_escaped_quotes(body), (key,)))


def _without_escaped_quotes(body: bytes) -> bytes:
    """A body of the same length, in which every quote begins or ends a string: no backslash is outside of one."""
    return body.replace(b"\\\\", b"??").replace(b'\\"', b"??") if b"\\" in body else body


@lru_cache(maxsize=64)
def _keys(path: tuple[str, ...], escapes: bool) -> re.Pattern[bytes]:
    """Finds the keys of a path, each character as itself or, with `escapes`, as its escape."""
    if not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) for key in path):
        raise ValueError(f"keys are ASCII identifiers, not {path}")
    spelled = [
        "".join(rf"(?:{letter}|\\u00(?i:{ord(letter):02x}))" if escapes else letter for letter in key)
        for key in dict.fromkeys(path)
    ]
    return re.compile(rf'"(?:{"|".join(f"({key})" for key in spelled)})"[ \t\r\n]*:[ \t\r\n]*'.encode())


def _members(plain: bytes, path: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Where the members at the end of a path begin, and their values.

    `known` counts the keys of the path whose objects are open: the object of key number n is `n + 1` deep, and closes
    when the depth falls below that.
    """
    names = list(dict.fromkeys(path))
    depth = known = since = 0
    for found in _keys(path, b"\\u" in plain).finditer(plain):
        brackets = _brackets(plain, since, found.start())
        if known:
            lowest = min(accumulate(map(_STEP.__getitem__, brackets), initial=depth))
            known = min(known, lowest - 1)
        depth += brackets.count(b"{") + brackets.count(b"[") - brackets.count(b"}") - brackets.count(b"]")
        since = found.end()
        if depth != known + 1 or names[(found.lastindex or 1) - 1] != path[known]:
            continue
        if known == len(path) - 1:
            yield found.start(), found.end()
        elif plain[since : since + 1] == b"{":
            known, depth, since = known + 1, depth + 1, since + 1


def _brackets(plain: bytes, start: int, end: int) -> bytes:
    """The brackets between two places outside of strings, those in strings left out."""
    return b"".join(plain[start:end].split(b'"')[::2]).translate(None, _ALL_BUT_BRACKETS)


def _cuts(plain: bytes, members: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The spans to remove, with one comma each, in order."""
    first = -1  # where the object's first member begins, once those before it are cut
    for start, value in members:
        end = _end(plain, value)
        before = _without_space(plain, start)
        if plain[before - 1] != ord("{") and start != first:
            yield _without_space(plain, before - 1), end
            continue
        following = _space(plain, end)
        if plain[following] == ord(","):
            first = _space(plain, following + 1)
            yield start, first
        else:
            yield start, end


def _end(plain: bytes, value: int) -> int:
    """Where a value ends. Reads little more than the value itself."""
    scalar = _SCALAR.match(plain, value) if plain[value] not in b"{[" else None
    if scalar is not None:
        return scalar.end()
    depth, since, chunk = 0, value, _FIRST_CHUNK
    while True:
        until = min(since + chunk, len(plain))
        if plain.count(b'"', since, until) % 2:
            until = plain.index(b'"', until) + 1
        steps = [_STEP[bracket] for bracket in _brackets(plain, since, until)]
        if depth + min(accumulate(steps), default=1) <= 0:
            return _closing(plain, since, depth)
        depth, since, chunk = depth + sum(steps), until, chunk * 2


def _closing(plain: bytes, since: int, depth: int) -> int:
    """Where the depth first comes back to zero."""
    for token in _STRUCTURE.finditer(plain, since):
        depth += _STEP.get(plain[token.start()], 0)
        if depth == 0:
            return token.end()
    raise ValueError("a bracket is not closed")


def _space(plain: bytes, offset: int) -> int:
    """The end of the white space that begins at `offset`."""
    found = _SPACE.match(plain, offset)
    return offset if found is None else found.end()


def _without_space(plain: bytes, end: int) -> int:
    """The beginning of the white space that ends at `end`."""
    width = _FIRST_CHUNK
    while not (text := plain[max(0, end - width) : end].rstrip(_SPACES)) and width < end:
        width *= 2
    return max(0, end - width) + len(text)
