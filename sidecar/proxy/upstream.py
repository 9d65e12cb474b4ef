"""The engine's address: the heads of requests to it, its spellings, and the messages of connections that fail."""

from __future__ import annotations

import os
import re
import socket
import ssl
import string
from collections.abc import AsyncIterator, Awaitable
from urllib.parse import SplitResult, urlsplit

import aiohttp

from sidecar.engines.pages import REFUSED
from sidecar.errors import InvalidHeader
from sidecar.events import Headers
from sidecar.proxy.connection import EngineConnections, Response
from sidecar.server.unix_address import socket_path, url_for

# Below the 5 s after which uvicorn, and so trtllm-serve, vLLM and SGLang, closes an idle connection.
KEEPALIVE_S = 4.0
# A network connects in milliseconds; 5 s outlast one lost SYN and its repetitions after 1 s and 2 s.
CONNECT_TIMEOUT_S = 5.0

_TARGET = re.compile(rb"[!-~]*")
_WITHOUT_BODY = frozenset(("GET", "HEAD", "OPTIONS", "TRACE"))
"""Methods whose requests need not say that they have no body."""
_OF_NAMES = (string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~").encode("ascii")
_IN_NO_VALUE = bytes(byte for byte in range(0x20) if byte != ord("\t")) + b"\x7f"
_PORTS = {"http": 80, "https": 443}
_LOCATION = re.compile(rb"(?:(?:https?:)?//(?:[^/\\?#]*@)?([^/\\?#]*))?(.*)", re.IGNORECASE | re.DOTALL)
_AUTHORITY = re.compile(rb"(.*?)\.?(?::([0-9]*))?", re.DOTALL)


class Upstream:
    """One engine's address and the pool of connections to it, which the first request opens.

    The pool belongs to the event loop that it was opened in. Raises ValueError for an invalid address.
    """

    def __init__(self, url: str, *, connect_timeout_s: float, keepalive_s: float) -> None:
        self.url = _validate(url)
        self.connect_timeout_s = connect_timeout_s
        parts = urlsplit(url_for(self.url))
        self._base = parts.path.encode("ascii")
        self._host = _host(parts)
        self._name, self._ports = _spellings(self._host, parts)
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout_s)
        self._keepalive_s = keepalive_s
        self._connections: EngineConnections | None = None

    def request(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        body: bytes | AsyncIterator[bytes],
        length: int | None,
        *,
        is_again: bool = False,
    ) -> Awaitable[Response]:
        """Sends one request unchanged, and returns at the response's headers.

        `length` is that of the body, None where it goes in chunks. A request that `is_again` sent, and one that could
        not be, because its body is streamed, go on a new connection: the engine may just have closed those that are
        kept, all of them at once. Raises aiohttp's exceptions where no connection can
        be made, one of FAILURES afterwards, and InvalidHeader before.
        """
        head = self._head(method, target, headers, length)
        if self._connections is None:
            self._connections = EngineConnections(self.url, self._timeout, keepalive_s=self._keepalive_s)
        return self._connections.request(head, body, length, is_head=method == "HEAD", is_again=is_again)

    async def close(self) -> None:
        """Closes the connections. A request that comes later opens new ones."""
        pool, self._connections = self._connections, None
        if pool is not None:
            await pool.close()

    def path_for(self, location: bytes) -> bytes | None:
        """The path, as a client of the proxy writes it, of an address on this engine. None for any other address.

        An engine writes its own address as the `Host` header says it, with either scheme. A path alone is its own, too.
        """
        authority, rest = _LOCATION.fullmatch(location.strip()).groups()  # type: ignore[union-attr]  # matches all
        if authority is None and not rest.startswith(b"/"):
            return None  # a path from where the request was
        if authority is not None and not self._is_called(authority):
            return None
        below = rest.removeprefix(self._base)
        # Two slashes at the beginning would be another server's name: a client may have asked for //elsewhere/.
        return b"/" + (below if below[:1] in (b"", b"/", b"?", b"#") else rest).lstrip(b"/\\\t ")

    def _is_called(self, authority: bytes) -> bool:
        name, port = _AUTHORITY.fullmatch(authority.lower()).groups(b"")  # type: ignore[union-attr]
        return name == self._name and port in self._ports

    def _head(self, method: str, target: bytes, headers: Headers, length: int | None) -> bytes:
        if not can_be_written(headers) or not _TARGET.fullmatch(target):
            raise InvalidHeader("the request cannot be forwarded: its target, or a header, has a character of no HTTP")
        lines = [b"%b %b%b HTTP/1.1" % (method.encode("ascii"), self._base, target), b"host: " + self._host]
        lines += map(b": ".join, headers)
        if length is None:
            lines.append(b"transfer-encoding: chunked")
        elif length or method not in _WITHOUT_BODY:
            lines.append(b"content-length: %d" % length)
        return b"\r\n".join([*lines, b"", b""])


def can_be_written(headers: Headers) -> bool:
    """True if they can be written: a parser reads more than HTTP allows, and a server would raise midway."""
    if not headers:
        return True
    names, values = zip(*headers, strict=True)
    if b"" in names or b"".join(names).translate(None, _OF_NAMES):
        return False
    text = b"".join(values)
    return text == text.translate(None, _IN_NO_VALUE)


def connect_trouble(url: str, error: aiohttp.ClientError, within_s: float) -> str:
    """Why no connection to `url` could be made, in words for the operator. `within_s` is the timeout of connecting."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection to {url} within {within_s:g} s"
    cause = getattr(error, "os_error", None)
    if isinstance(error, aiohttp.ClientSSLError) or isinstance(cause, ssl.SSLError):
        return f"TLS with {url} failed: {getattr(error, 'certificate_error', None) or cause}"
    if isinstance(cause, socket.gaierror):
        return f"the name in {url} cannot be resolved: {cause.strerror}"
    if isinstance(cause, ConnectionRefusedError):
        return f"{REFUSED} {url}"
    reason = None if cause is None or not cause.errno else os.strerror(cause.errno)
    return f"no connection to {url}: {reason or cause or type(error).__name__}"


def error_text(error: Exception | None) -> str:
    """An error's text for a log."""
    return f"{type(error).__name__}: {error}" if error else "no error"


def _host(parts: SplitResult) -> bytes:
    """The value of the `Host` header (RFC 9110, section 7.2)."""
    name = (parts.hostname or "").partition("%")[0].rstrip(".")
    name = f"[{name}]" if ":" in name else name
    port = parts.port
    return (name if port in {None, _PORTS[parts.scheme]} else f"{name}:{port}").encode("ascii")


def _spellings(host: bytes, parts: SplitResult) -> tuple[bytes, frozenset[bytes]]:
    """The name in an address of the same server, and the ports that may follow it."""
    name, _ = _AUTHORITY.fullmatch(host).groups()  # type: ignore[union-attr]
    port = parts.port or _PORTS[parts.scheme]
    usual = frozenset((b"", b"80", b"443"))  # before the TLS of another server an engine may write either scheme
    return name, usual if port in _PORTS.values() else frozenset((b"%d" % port,))


def _validate(upstream: str) -> str:
    """`upstream` without its trailing slash, ready to be put in front of a path."""
    if socket_path(upstream) is not None:
        return upstream
    parts = urlsplit(upstream)
    example = "write it like http://127.0.0.1:8000"
    if not re.fullmatch(r"[!-~]+", upstream):
        raise ValueError(f"upstream {upstream!r} contains a space or a character beyond ASCII; {example}")
    if parts.scheme not in {"http", "https"}:
        raise ValueError(f"upstream {upstream!r} does not begin with http:// or https://; {example}")
    try:
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"upstream {upstream!r}: {error}; {example}") from None
    if not host:
        raise ValueError(f"upstream {upstream!r} names no host; {example}")
    if parts.username is not None:
        raise ValueError(f"upstream {parts.hostname!r} must not contain a user or a password; {example}")
    if parts.query or parts.fragment:
        raise ValueError(f"upstream {upstream!r} must end with its path, without ? or #; {example}")
    return upstream.rstrip("/")
