"""Content codings of a request's body (RFC 9110, section 8.4): gzip, and zstd where a package reads it.

A body is unpacked as it arrives, in slices that yield a few MiB at most, so a body that would unpack to gigabytes is
refused before it has taken more memory than a large one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple, Protocol

from sidecar.errors import BodyTooLarge, InvalidBody, UnknownCoding

MOST_RATIO, FREE_BYTES = 100, 1024 * 1024
"""A body may unpack to so many times its size, and to `FREE_BYTES` whatever its size. JSON of prompts shrinks to a
third or a tenth; only a short phrase that is repeated thousands of times shrinks more."""
_MOST_CODINGS = 3
_MOST_PARTS = 1000
"""Gzip members or zstd frames. Each costs a new decompressor; `bgzip` makes one of 64 KiB."""
_SHOWN_BYTES = 20
"""Of a header's value that is quoted in an error."""


class _Part(Protocol):
    """The decompressor of one gzip member or zstd frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


class _Coding(NamedTuple):
    """`begin` makes the decompressor of a part. It is given `slice_bytes` at a time, which yield 4 MiB at most."""

    begin: Callable[[], _Part]
    slice_bytes: int
    error: type[Exception]


def _zstd() -> _Coding | None:
    """The reader of zstd, from the standard library or from the package `zstandard`; None where there is neither.

    A block of 4 bytes unpacks to up to 128 KiB. RFC 9659 bounds the window of this coding to 8 MiB.
    """
    begin: Callable[[], _Part]
    try:
        library = import_module("compression.zstd")  # from Python 3.14 on
        begin = partial(library.ZstdDecompressor, options={library.DecompressionParameter.window_log_max: 23})
    except ImportError:
        try:
            library = import_module("zstandard")
        except ImportError:
            return None
        begin = library.ZstdDecompressor(max_window_size=8 * 1024 * 1024).decompressobj
    return _Coding(begin, 128, library.ZstdError)


def _find_codings() -> Mapping[str, _Coding]:
    """The codings that are read here. Deflate's most is a ratio of 1032."""
    gzip, zstd = _Coding(partial(zlib.decompressobj, wbits=16 + zlib.MAX_WBITS), 4096, zlib.error), _zstd()
    return {"gzip": gzip, "x-gzip": gzip, **({} if zstd is None else {"zstd": zstd})}


class PackedBody:
    """A body that its client has compressed, as it arrives. `most_bytes` bounds it before and after."""

    def __init__(self, streams: Sequence[_Stream], most_bytes: int) -> None:
        self._streams = streams
        self._left_bytes = most_bytes

    def feed(self, data: bytes, *, is_last: bool) -> bytes:
        """The plain bytes of the next ones. Raises BodyTooLarge, or InvalidBody where the last are not the end."""
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise BodyTooLarge("the compressed body is larger than a body may be here; send less")
        pieces: Iterable[bytes] = (data,)
        for stream in self._streams:
            pieces = stream.unpacked(pieces)
        plain = b"".join(pieces)
        if is_last:
            for stream in self._streams:
                stream.check_end()
        return plain


class _Stream:
    """One coding of a body."""

    def __init__(self, name: str, coding: _Coding, most_bytes: int) -> None:
        self._name = name
        self._coding = coding
        self._most_bytes = most_bytes
        self._part: _Part | None = None
        self._parts = self._packed_bytes = self._plain_bytes = 0

    def unpacked(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The plain bytes of the next ones, in pieces."""
        size = self._coding.slice_bytes
        for piece in pieces:
            for at in range(0, len(piece), size):
                rest = piece[at : at + size]
                self._packed_bytes += len(rest)
                while rest:
                    plain, rest = self._step(rest)
                    yield plain

    def check_end(self) -> None:
        """Raises InvalidBody where a part is not complete."""
        if self._part is not None:
            raise InvalidBody(f"content-encoding: the body ends in the middle of its {self._name} data; send all of it")

    def _step(self, data: bytes) -> tuple[bytes, bytes]:
        """Unpacks bytes of one part: the plain ones, and those that come after it."""
        part = self._part or self._next_part()
        try:
            plain = part.decompress(data)
        except self._coding.error as error:
            raise InvalidBody(
                f"content-encoding: the body is not {self._name}, or damaged ({error}); send it again, or without "
                "compression and this header"
            ) from None
        self._plain_bytes += len(plain)
        self._check_size()
        if not part.eof:
            return plain, b""
        self._part = None
        return plain, part.unused_data

    def _next_part(self) -> _Part:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise InvalidBody(f"content-encoding: more than {_MOST_PARTS} parts of {self._name}; compress it as one")
        self._part = self._coding.begin()
        return self._part

    def _check_size(self) -> None:
        if self._plain_bytes > self._most_bytes:
            raise BodyTooLarge(f"the body unpacks to more than the {self._most_bytes} bytes allowed here; send less")
        if self._plain_bytes > max(FREE_BYTES, MOST_RATIO * self._packed_bytes):
            raise BodyTooLarge(
                f"the body unpacks to more than {MOST_RATIO} times its size; send it without compression"
            )


def packed_body(headers: Sequence[tuple[bytes, bytes]], most_bytes: int) -> PackedBody | None:
    """The body of a request with these headers, None where it is plain. Raises UnknownCoding."""
    codings = b",".join(value for name, value in headers if name == b"content-encoding").lower().split(b",")
    names = [name for coding in codings if (name := coding.strip()) not in (b"", b"identity")]
    if not names:
        return None
    known = _find_codings()
    unknown = next((name for name in names if name.decode("latin-1") not in known), None)
    if unknown is not None or len(names) > _MOST_CODINGS:
        shown = b", ".join(names) if unknown is None else unknown
        read = ", ".join(name for name in known if name != "x-gzip")
        raise UnknownCoding(
            f"content-encoding: {shown[:_SHOWN_BYTES].decode('ascii', 'replace')} is not read here; send the body in "
            f"one of {read}, or uncompressed without this header",
            read,
        )
    found = [name.decode("ascii") for name in reversed(names)]  # the last one was applied last
    return PackedBody([_Stream(name, known[name], most_bytes) for name in found], most_bytes)
