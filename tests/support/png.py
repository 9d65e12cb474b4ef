"""Smaller PNG files: the picture of a page has few colors, and is a third of the size with a palette of them."""

from __future__ import annotations

import struct
import zlib
from collections import Counter

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLORS = 256

Color = tuple[int, ...]


def smaller(png: bytes) -> bytes:
    """The same picture with its 256 most frequent colors; every other becomes the nearest of them.

    For pictures of 8 bits a channel that are not interlaced, as browsers make them; transparency is dropped.
    """
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", _chunk(png, b"IHDR"))
    assert (depth, interlaced) == (8, 0)
    channels = {2: 3, 6: 4}[kind]
    rows = _rows(zlib.decompress(_chunk(png, b"IDAT")), width * channels, height, channels)
    pixels = [[tuple(row[at : at + 3]) for at in range(0, len(row), channels)] for row in rows]
    seen = Counter(color for row in pixels for color in row)
    palette = [color for color, _ in seen.most_common(_COLORS)]
    places = {color: _nearest(palette, color) for color in seen}
    image = b"".join(b"\0" + bytes(places[color] for color in row) for row in pixels)
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in (
            (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            (b"PLTE", b"".join(bytes(color) for color in palette)),
            (b"IDAT", zlib.compress(image, 9)),
            (b"IEND", b""),
        )
    )


def _chunk(png: bytes, wanted: bytes) -> bytes:
    """The data of all chunks of a name."""
    assert png.startswith(_SIGNATURE)
    found, at = b"", len(_SIGNATURE)
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        if png[at + 4 : at + 8] == wanted:
            found += png[at + 8 : at + 8 + length]
        at += 12 + length
    return found


def _rows(data: bytes, length: int, height: int, step: int) -> list[bytearray]:
    """The rows as they were before the filters of the format."""
    rows: list[bytearray] = []
    above = bytearray(length)
    for number in range(height):
        start = number * (length + 1)
        row = bytearray(data[start + 1 : start + 1 + length])
        _unfilter(data[start], row, above, step)
        rows.append(row)
        above = row
    return rows


def _unfilter(kind: int, row: bytearray, above: bytearray, step: int) -> None:
    for at in range(len(row)) if kind else ():
        left = row[at - step] if at >= step else 0
        corner = above[at - step] if at >= step else 0
        guess = (0, left, above[at], (left + above[at]) // 2, _paeth(left, above[at], corner))[kind]
        row[at] = (row[at] + guess) & 255


def _paeth(left: int, above: int, corner: int) -> int:
    estimate = left + above - corner
    return min((left, above, corner), key=lambda value: abs(estimate - value))


def _nearest(palette: list[Color], color: Color) -> int:
    distances = (sum((a - b) ** 2 for a, b in zip(color, one, strict=True)) for one in palette)
    return min(enumerate(distances), key=lambda pair: pair[1])[0]
