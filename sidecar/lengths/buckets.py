"""Bucket of a request: the class that its output length is learned in, by what its client says.

There are 768 buckets, whatever clients send.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from typing import NamedTuple

from sidecar.payload.traits import EFFORTS, Traits

_FORCED = ("required", "named")
_SIZES = (64, 256, 1024, 4096, 16_384, 65_536)
_SIZE_NAMES = ("max 64", "max 256", "max 1k", "max 4k", "max 16k", "max 64k", "max more", "")


def bucket_for(traits: Traits, most: int | None) -> str:
    """The bucket, such as `tools, effort high, max 4k`, or `plain`. `most` is the request's max_tokens, if it has one.

    The size class of `most` is the first that holds it: 64, 256, 1k, 4k, 16k, 64k, or more.
    """
    effort, tools, choice, has_format, has_stop = traits
    if effort is not None and effort not in EFFORTS:
        effort = "other"
    size = len(_SIZES) + 1 if most is None else bisect_left(_SIZES, most)
    if not tools or choice == "none":
        return _name("", effort, bool(has_format), bool(has_stop), size)
    return _name("tools forced" if choice in _FORCED else "tools", effort, bool(has_format), bool(has_stop), size)


@cache  # its arguments are classes already, never what a client wrote
def _name(tools: str, effort: str | None, has_format: bool, has_stop: bool, size: int) -> str:
    parts = [
        tools,
        "" if effort is None else f"effort {effort}",
        "format" if has_format else "",
        "stop" if has_stop else "",
        _SIZE_NAMES[size],
    ]
    return ", ".join(filter(None, parts)) or "plain"


class LengthKey(NamedTuple):
    """Key under which output lengths are learned, beside the tenant: the endpoint's path, the model, and the bucket."""

    endpoint: str
    model: str | None
    bucket: str
