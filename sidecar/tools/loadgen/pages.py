"""An engine's pages over the network: `sidecar.engines.pages.Pages` with aiohttp, bounded in time and size."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping

import aiohttp

from sidecar.admission.via import PSEUDONYM
from sidecar.engines.pages import Page, Unread
from sidecar.server.unix_address import url_for

PATIENCE_S = 5.0
"""For one page: an engine under load answers later than an idle one, and who does not answer by then is of no use."""
MOST_BYTES = 16 * 2**20
"""A page beyond is no engine's: the metrics of a large deployment stay under one MiB."""


def why_not(error: Exception) -> str:
    """The reason of a failed connection in the system's own words, without the library's."""
    failed = getattr(error, "os_error", error)
    if isinstance(failed, socket.gaierror):
        return "no such host" if failed.errno == socket.EAI_NONAME else str(failed.strerror)
    number = getattr(failed, "errno", None)
    return os.strerror(number).lower() if number else " ".join(str(error).split()) or type(error).__name__


class HttpPages:
    """The pages of the server at `url`. `headers` go with every request, such as the one that carries a key.

    `is_sidecar` says whether a page came through a sidecar's proxy.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._headers = headers
        self._timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        self.is_sidecar = False

    @property
    def host(self) -> object | None:
        """It runs elsewhere."""
        return None

    async def get(self, path: str) -> Page:
        """See `Pages.get`."""
        try:
            async with self._session.get(
                url_for(self._url) + path, headers=self._headers, timeout=self._timeout, allow_redirects=False
            ) as response:
                self.is_sidecar = self.is_sidecar or PSEUDONYM in response.headers.get("via", "")
                return Page(response.status, (await self._body(response)).decode("utf-8", "replace"))
        except asyncio.TimeoutError:  # in Python 3.10 not yet the builtin TimeoutError
            raise Unread(f"GET {self._url}{path} did not answer within {PATIENCE_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unread(f"cannot reach {self._url}: {why_not(error)}") from None

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for part in response.content.iter_any():
            body += part
            if len(body) > MOST_BYTES:
                raise Unread(f"GET {response.url} is longer than {MOST_BYTES} bytes")
        return bytes(body)
