"""Access control of the admin pages: a port on loopback is open to its machine; any other port needs the token.

Without a token the port's address is the only protection. Two attacks through a browser on this machine are refused: a
host name that an attacker points to 127.0.0.1 (DNS rebinding), by its `Host`; and background requests of another site's
page, by `Sec-Fetch-Site`, which every browser sends. Whatever changes something (POST) is refused to every page but the
port's own, also as a form that the browser navigates to, and to every caller of a port that the network reaches without
a token. With a token the name does not matter: the attacker's page has
neither the token nor, under that name, the cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.admin.answers import refused
from sidecar.policy.secrets import HOW_TO_SET, TOKEN_VARIABLE, admin_token

OPEN_PATHS = frozenset(("/healthz", "/readyz"))
"""Paths of an orchestrator's probes, which have no token."""

_NEEDS_TOKEN = (
    "this needs the admin token: send `Authorization: Bearer TOKEN`, open /?token=TOKEN once in a browser, or set "
    f"{TOKEN_VARIABLE} for sidecar top and sidecar explain"
)
_WRONG_TOKEN = f"this is not the admin token; it is the one in {TOKEN_VARIABLE} of the sidecar's own environment"
_SAFE = frozenset(("GET", "HEAD", "OPTIONS"))
"""Methods that change nothing."""
_CHANGE_NEEDS_TOKEN = (
    f"on a port that the network reaches, a change needs the admin token: {HOW_TO_SET}, or serve the port on 127.0.0.1"
)
_ALWAYS = ((b"cross-origin-resource-policy", b"same-origin"),)


@dataclass(frozen=True, slots=True)
class Access:
    """Access rule: with a `token` only its bearers; else every caller, by address if the port `is_local`."""

    token: str | None = field(default=None, repr=False)
    is_local: bool = True

    @property
    def is_open(self) -> bool:
        """True if every caller on the network has access."""
        return self.token is None and not self.is_local


def read_access(environment: Mapping[str, str], host: str) -> Access:
    """How a port on `host` is guarded by the environment. Raises ValueError for a token that cannot be one."""
    return Access(admin_token(environment), is_loopback(host))


def open_port(host: str) -> str:
    """Warning where `Access.is_open`."""
    return (
        f"the admin port on {host} shows every caller what tenants ask and how the pool stands; "
        f"{HOW_TO_SET}, or serve it on 127.0.0.1"
    )


def is_loopback(host: str) -> bool:
    """True if only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class AdminGuard:
    """Around the admin pages: answers 401 or 403 itself, and lets the rest pass."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        token = access.token
        # Not the token itself: a cookie shows in a browser's tools, and goes to every port of this host.
        self._cookie = (
            None if token is None else hmac.new(token.encode(), b"sidecar admin cookie", "sha256").hexdigest()
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_ALWAYS]}
            await send(message)

        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        answer = self._answer(request)
        await (self._app if answer is None else answer)(scope, receive, sent)

    def _answer(self, request: Request) -> Response | None:
        """None where the pages are to be shown."""
        headers = request.headers
        if request.method not in _SAFE and (refusal := self._change_refusal(request)) is not None:
            return refusal
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return refused(403, "cross_site", "a page of another site asked for this; open the admin port itself")
        if self._access.token is None:
            return None if not self._access.is_local or _names_this_machine(headers.get("host")) else _other_name()
        if self._has_token(headers.get("authorization", "")) or self._has_cookie(request):
            return None
        if request.scope["path"] == "/" and "token" in request.query_params:
            return self._welcome(request)
        return _refuse(_WRONG_TOKEN if "authorization" in headers else _NEEDS_TOKEN)

    def _change_refusal(self, request: Request) -> Response | None:
        """Of a request that changes something, beyond what is asked of every request."""
        if not _is_own(request):
            return refused(
                403, "cross_site", "only a page of this port, or a client that is no browser, may change this"
            )
        return refused(403, "admin_token_required", _CHANGE_NEEDS_TOKEN) if self._access.is_open else None

    def _has_token(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and self._is_token(token.strip())

    def _is_token(self, given: str) -> bool:
        assert self._access.token is not None
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._access.token.encode())

    def _has_cookie(self, request: Request) -> bool:
        assert self._cookie is not None
        given = request.cookies.get(_cookie_name(request), "")
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._cookie.encode())

    def _welcome(self, request: Request) -> Response:
        """The token of the address becomes a cookie, and leaves the address."""
        if not self._is_token(request.query_params["token"]):
            return _refuse(_WRONG_TOKEN)
        assert self._cookie is not None
        headers = {"cache-control": "no-store", "referrer-policy": "no-referrer"}
        answer = RedirectResponse("./", 303, headers)
        is_secure = request.scope.get("scheme") == "https"
        answer.set_cookie(_cookie_name(request), self._cookie, httponly=True, samesite="strict", secure=is_secure)
        return answer


def _cookie_name(request: Request) -> str:
    # Cookies ignore ports: two sidecars on one machine must not log each other out.
    return f"sidecar-admin-{(request.scope.get('server') or ('', 0))[1]}"


def _is_own(request: Request) -> bool:
    """True if no browser sends it, or one whose user is on a page of this port. Old browsers send `Origin` alone."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site == "same-origin"
    return origin is None or origin.partition("://")[2] == request.headers.get("host")


def _names_this_machine(host: str | None) -> bool:
    """True if a `Host` is an address or localhost. An attacker controls what another name points to."""
    if host is None:  # HTTP/1.0; every browser sends one
        return True
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
    with suppress(ValueError):
        ipaddress.ip_address(name.strip("[]"))
        return True
    return name.lower() == "localhost" or name.lower().endswith(".localhost")


def _other_name() -> Response:
    return refused(
        403,
        "unknown_host",
        "this port is served on loopback: ask for 127.0.0.1 or localhost. A proxy that must use another name needs "
        f"{TOKEN_VARIABLE} to be set",
    )


def _refuse(message: str) -> Response:
    return refused(401, "admin_token_required", message, {"www-authenticate": "Bearer"})
