"""An issuer's page with its public keys. Apart, because only a policy with such an address needs an HTTP client."""

from __future__ import annotations

import asyncio

import aiohttp

from sidecar.policy.identity import MOST_KEY_SET_BYTES


async def key_page(address: str, within_s: float) -> bytes:
    """The page. Raises asyncio.TimeoutError, OSError where there is no answer, and ValueError for another one."""
    timeout = aiohttp.ClientTimeout(total=within_s)
    headers = {"Accept": "application/json"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
            # A redirect could lead to an address that the policy does not name, or that is not encrypted.
            session.get(address, headers=headers, allow_redirects=False) as response,
        ):
            return await _body(response)
    except asyncio.TimeoutError:  # aiohttp's own are of both kinds
        raise
    except aiohttp.ClientError as error:
        raise OSError(str(error) or type(error).__name__) from error


async def _body(response: aiohttp.ClientResponse) -> bytes:
    if response.status != 200:
        is_elsewhere = 300 <= response.status < 400
        raise ValueError(f"answered {response.status}{', which is not followed' if is_elsewhere else ''}")
    raw = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        raw += chunk
        if len(raw) > MOST_KEY_SET_BYTES:
            raise ValueError(f"is larger than {MOST_KEY_SET_BYTES} bytes")
    return bytes(raw)
