"""Reads a request's body: once, whole, and never more of it than the policy allows."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from sidecar.asgi.types import Receive
from sidecar.errors import BodyTimeout, BodyTooLarge
from sidecar.pools import Grant


class ClientLeft(Exception):
    """The client hung up before it was admitted. `wait` is how its wait had gone, None where it had not waited."""

    def __init__(self, wait: Grant | None = None) -> None:
        self.wait = wait


async def read_body(receive: Receive, most_bytes: int, declared_bytes: int | None) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as it must be, and ClientLeft where the client hangs up.

    `declared_bytes` is the Content-Length, None for a body of unknown length.
    """
    if declared_bytes is not None and declared_bytes > most_bytes:
        raise too_large(most_bytes)
    message = await receive()
    body: bytes = message.get("body", b"")
    if message["type"] == "http.request" and not message.get("more_body", False) and len(body) <= most_bytes:
        return body  # the usual case: all of it came at once, and is not copied
    return await _read_on(receive, message, most_bytes)


async def _read_on(receive: Receive, message: object, most_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        assert isinstance(message, dict)
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > most_bytes:
            raise too_large(most_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)
        message = await receive()


async def discard_body(receive: Receive, most_s: float) -> None:
    """Reads on for at most `most_s` and keeps nothing: most clients read no answer before they have sent everything."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_to_the_end(receive), most_s)


async def _to_the_end(receive: Receive) -> None:
    message = await receive()
    while message["type"] == "http.request" and message.get("more_body", False):
        message = await receive()


def too_large(most_bytes: int) -> BodyTooLarge:
    """What a body over the policy's limit is answered with."""
    return BodyTooLarge(f"the body is larger than the {most_bytes} bytes allowed here; send less")


def too_late(most_s: float) -> BodyTimeout:
    """The refusal of a body that has been on its way for longer than `most_s`."""
    return BodyTimeout(f"the body did not arrive within {most_s:g} s; send it faster")
