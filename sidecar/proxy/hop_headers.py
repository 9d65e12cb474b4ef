"""Headers of a message on its way through the proxy: hop-by-hop headers, the target, the declared length."""

from __future__ import annotations

import re
from urllib.parse import quote

from multidict import CIMultiDict
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
_NO_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NOT_FORWARDED = _HOP_BY_HOP | _REPLACED


def target(scope: Scope) -> str:
    """The request's target as the client wrote it. Raises InvalidHeader where it is no path."""
    raw_path: bytes = scope.get("raw_path") or quote(scope["path"]).encode("ascii")
    if not raw_path.startswith(b"/") or scope["method"] == "CONNECT":
        raise InvalidHeader("the request's target must be a path")
    query: bytes = scope.get("query_string", b"")
    return (raw_path + b"?" + query if query else raw_path).decode("ascii")


def forwarded_headers(scope: Scope) -> CIMultiDict[str]:
    """The client's headers for the engine: without this hop's, without a length, with `via` and `x-forwarded-*`.

    Raises LoopDetected for a request that this process has sent.
    """
    received: list[tuple[bytes, bytes]] = scope["headers"]
    dropped = _NOT_FORWARDED | _named_by_connection(received)
    headers = CIMultiDict([(name.decode("ascii"), _text(value)) for name, value in received if name not in dropped])
    if client := scope.get("client"):
        already = headers.getall("x-forwarded-for", ())
        headers["x-forwarded-for"] = ", ".join([*already, client[0]])
    if before := headers.getall("via", ()):
        vias = ", ".join(before)
        refuse_loop(vias.encode())
        headers["via"] = f"{vias}, {OWN_VIA}"
    else:
        headers["via"] = OWN_VIA
    headers.setdefault("x-forwarded-proto", scope.get("scheme", "http"))
    host = next((value for name, value in received if name == b"host"), None)
    if host is not None:
        headers.setdefault("x-forwarded-host", _text(host))
    return headers


def returned_headers(status: int, raw_headers: Headers) -> list[tuple[bytes, bytes]]:
    """The engine's headers for the client, in ASGI's lower case: without this hop's; duplicates and order stay."""
    received = [(name.lower(), value) for name, value in raw_headers]
    dropped = _HOP_BY_HOP | _named_by_connection(received)
    # Beside chunks a length has no meaning and is how responses are smuggled; 204 and 304 have no body.
    if status in {204, 304} or any(name == b"transfer-encoding" for name, _ in received):
        dropped |= {b"content-length"}
    return [header for header in received if header[0] not in dropped]


def can_be_written(headers: Headers) -> bool:
    """Whether a server can write them: aiohttp reads more than HTTP allows, and uvicorn would raise midway."""
    values = b"".join([value for _, value in headers])
    return not _NO_VALUE.search(values) and all(_NAME.fullmatch(name) for name, _ in headers)


def declared_length(headers: Headers) -> str | None:
    """The length of a body that is streamed; None where it comes in chunks. Raises InvalidHeader for two lengths."""
    lengths = {value for name, value in headers if name == b"content-length"}
    if any(name == b"transfer-encoding" for name, _ in headers) or not lengths:
        return None
    length = lengths.pop()
    if lengths or not length.isdigit() or len(length) > _LONGEST_LENGTH:
        raise InvalidHeader("content-length must be one whole number")
    return str(int(length))  # without leading zeros, which some servers read as octal


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))


def _text(value: bytes) -> str:
    """A value for aiohttp, which writes UTF-8: UTF-8 stays unchanged, and Latin-1 is re-encoded rather than lost."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")
