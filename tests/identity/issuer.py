"""An issuer of signed tokens: its keys, on a real HTTP server."""

from __future__ import annotations

import base64
import json
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from joserfc import jws
from joserfc.jwk import ECKey, Key, OKPKey, RSAKey

ISSUER = "https://id.example"
AUDIENCE = "llm"


def rsa(key_id: str = "one") -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": key_id})


def ec(key_id: str = "one") -> ECKey:
    return ECKey.generate_key("P-256", {"kid": key_id})


def ed(key_id: str = "one") -> OKPKey:
    return OKPKey.generate_key("Ed25519", {"kid": key_id})


class Issuer:
    """Signs tokens with its last key, and publishes all of them. It answers `status` where that is not 200."""

    def __init__(self, *keys: Key) -> None:
        self.keys = list(keys)
        self.fetches = 0
        self.status = 200
        self.url = ""

    def token(self, *, key: Key | None = None, algorithm: str = "ES256", header: Any = None, **claims: Any) -> str:
        """A token that is right, but for the `claims` and the `header` that are given; None leaves a claim out."""
        signing = key or self.keys[-1]
        whole = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 60, "tenant": "acme", **claims}
        payload = {name: value for name, value in whole.items() if value is not None}
        protected = {"alg": algorithm, "kid": signing.kid, "typ": "JWT", **(header or {})}
        protected = {name: value for name, value in protected.items() if value is not None}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the name EdDSA
            return jws.serialize_compact(protected, json.dumps(payload), signing, algorithms=[algorithm])

    def key_set(self) -> str:
        """Its public keys."""
        return json.dumps({"keys": [key.as_dict(private=False) for key in self.keys]})

    async def _answer(self, _: web.Request) -> web.Response:
        self.fetches += 1
        return web.Response(status=self.status, text=self.key_set(), content_type="application/json")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Issuer]:
        """Serves the keys at `url`."""
        app = web.Application()
        app.router.add_get("/keys", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined, unused-ignore]
        self.url = f"http://127.0.0.1:{port}/keys"
        try:
            yield self
        finally:
            await runner.cleanup()


def unsigned(header: Any, payload: Any, signature: bytes = b"") -> str:
    """A token that is made by hand."""
    parts = (json.dumps(header).encode(), json.dumps(payload).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


def jwt_section(key_set: str, **more: str) -> str:
    """The policy's section, with these keys of it."""
    keys = {"issuer": ISSUER, "audience": AUDIENCE, "jwks": key_set, "tenant_claim": "tenant", **more}
    return "jwt:\n" + "".join(f"  {name}: {value}\n" for name, value in keys.items())
