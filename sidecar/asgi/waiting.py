"""How one request waits: for its grant, for its client's hanging up, or for the end of its time, whichever is first."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from sidecar.apis import Api
from sidecar.asgi.body import ClientLeft
from sidecar.asgi.client import Client
from sidecar.asgi.keep_alive import STREAMING
from sidecar.asgi.types import Message
from sidecar.events import Headers
from sidecar.pools import Grant, Lease


class WaitedTooLong(Exception):
    """Carries how the wait had gone when its time was over."""

    def __init__(self, wait: Grant | None) -> None:
        self.wait = wait


@dataclass(frozen=True, slots=True)
class Comments:
    """What a streaming client hears while it waits, and how often. `headers` begin an answer of the API's."""

    every_s: float
    api: Api
    headers: Headers


def comments(every_s: float, api: Api, headers: Headers) -> Comments | None:
    """What a client of the API that asked for a stream hears; None where the API has none."""
    return Comments(every_s, api, headers) if api in STREAMING else None


async def wait(
    lease: Lease, granted: asyncio.Future[Grant], client: Client, most_s: float | None, heard: Comments | None
) -> Grant:
    """The grant. Raises ClientLeft or WaitedTooLong, with the wait given up, and what `granted` raises."""
    departure = client.departure()
    if heard is None:
        await asyncio.wait((granted, departure), timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
    else:
        await _wait_and_comment(granted, departure, client, math.inf if most_s is None else most_s, heard)
    if departure.done():  # also in the very moment of the grant: nobody is there to run for
        raise ClientLeft(lease.grant if lease.settle(0) else await lease.leave())
    if not granted.done():
        raise WaitedTooLong(await lease.leave())
    grant = granted.result()
    if heard is not None and client.kept_alive is not None:
        await client.comment(f"admitted after {grant.queue_wait_us / 1e6:.1f} s", heard.api, heard.headers)
    return grant


async def _wait_and_comment(
    granted: asyncio.Future[Grant], departure: asyncio.Task[Message], client: Client, most_s: float, heard: Comments
) -> None:
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + most_s
    while (left_s := ends_s - loop.time()) > 0:
        both = (granted, departure)
        await asyncio.wait(both, timeout=min(heard.every_s, left_s), return_when=asyncio.FIRST_COMPLETED)
        if granted.done() or departure.done():
            return
        if loop.time() < ends_s:
            await client.comment("waiting for admission", heard.api, heard.headers)
