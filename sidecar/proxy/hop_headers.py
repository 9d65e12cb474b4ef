"""Headers of a message on its way through the proxy: hop-by-hop headers, the target, the declared length."""

from __future__ import annotations

import string
from collections.abc import Callable, Container
from urllib.parse import quote

from starlette.types import Scope

from sidecar.errors import InvalidHeader
from sidecar.events import Headers
from sidecar.via import OWN_VIA, refuse_loop

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
# Written anew for the engine. The sidecar's server answers `expect` itself, when the body is first read.
_REPLACED = frozenset([b"host", b"content-length", b"expect"])
_LONGEST_LENGTH = 18
"""Digits of a Content-Length: an exabyte."""
_ADDRESSES = (b"location", b"content-location")
_OF_NAMES = (string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~").encode("ascii")
_IN_NO_VALUE = bytes(byte for byte in range(0x20) if byte != ord("\t")) + b"\x7f"
_OWN_VIA = OWN_VIA.encode("ascii")
_NOT_FORWARDED = _HOP_BY_HOP | _REPLACED


def target(scope: Scope) -> bytes:
    """The request's target as the client wrote it. Raises InvalidHeader where it is no path."""
    raw_path: bytes = scope.get("raw_path") or quote(scope["path"]).encode("ascii")
    if not raw_path.startswith(b"/") or scope["method"] == "CONNECT":
        raise InvalidHeader("the request's target must be a path")
    query: bytes = scope.get("query_string", b"")
    return raw_path + b"?" + query if query else raw_path


def forwarded_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The client's headers for the engine: without this hop's, without a length, with `via` and `x-forwarded-*`.

    Raises LoopDetected for a request that this process has sent.
    """
    received: Headers = scope["headers"]
    first = dict(reversed(received))
    dropped = _NOT_FORWARDED | _named_by_connection(received) if b"connection" in first else _NOT_FORWARDED
    headers = [pair for pair in received if pair[0] not in dropped]
    if client := scope.get("client"):
        _append(headers, first, b"x-forwarded-for", client[0].encode())
    if b"via" in first:
        refuse_loop(b", ".join([value for name, value in headers if name == b"via"]))
    _append(headers, first, b"via", _OWN_VIA)
    if b"x-forwarded-proto" not in first:
        headers.append((b"x-forwarded-proto", scope.get("scheme", "http").encode()))
    if b"x-forwarded-host" not in first and b"host" in first:
        headers.append((b"x-forwarded-host", first[b"host"]))
    return headers


def returned_headers(
    status: int, raw_headers: Headers, for_client: Callable[[bytes], bytes]
) -> list[tuple[bytes, bytes]]:
    """The engine's headers for the client, in ASGI's lower case: without this hop's; duplicates and order stay.

    `for_client` writes an address of the engine's as the client must write it: else a redirect would lead past here.
    """
    received = [(name.lower(), value) for name, value in raw_headers]
    present, dropped = dict(received), _HOP_BY_HOP
    if b"location" in present or b"content-location" in present:
        received = [(name, for_client(value)) if name in _ADDRESSES else (name, value) for name, value in received]
    if b"connection" in present:
        dropped |= _named_by_connection(received)
    # Beside chunks a length has no meaning and is how responses are smuggled; 204 and 304 have no body.
    if status in {204, 304} or b"transfer-encoding" in present:
        dropped |= {b"content-length"}
    return [header for header in received if header[0] not in dropped]


def can_be_written(headers: Headers) -> bool:
    """Whether they can be written: a parser reads more than HTTP allows, and a server would raise midway."""
    if not headers:
        return True
    names, values = zip(*headers, strict=True)
    if b"" in names or b"".join(names).translate(None, _OF_NAMES):
        return False
    text = b"".join(values)
    return text == text.translate(None, _IN_NO_VALUE)


def declared_length(headers: Headers) -> int | None:
    """The length of a body that is streamed; None where it comes in chunks. Raises InvalidHeader for two lengths."""
    lengths = {value for name, value in headers if name == b"content-length"}
    if any(name == b"transfer-encoding" for name, _ in headers) or not lengths:
        return None
    length = lengths.pop()
    if lengths or not length.isdigit() or len(length) > _LONGEST_LENGTH:
        raise InvalidHeader("content-length must be one whole number")
    return int(length)  # written without leading zeros, which some servers read as octal


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))


def _append(headers: list[tuple[bytes, bytes]], received: Container[bytes], name: bytes, value: bytes) -> None:
    """Adds a value to those that `headers` have of that name, in one line."""
    if name in received:
        value = b", ".join([*(before for found, before in headers if found == name), value])
        headers[:] = [pair for pair in headers if pair[0] != name]
    headers.append((name, value))
