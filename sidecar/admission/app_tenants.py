"""Tenants that the app names: a function of its owner's knows the user, or the session, of a request.

It is asked where the tenant counts: on guarded paths, and where a request would else be refused for its key. So it is
asked before a byte of the body is read. One that waits, such as for a database, has as long as a body has
(`body_timeout`), and is canceled where its client disconnects meanwhile. What it raises refuses the request.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.admission.client import UploadChannel
from sidecar.admission.controller import AdmissionController
from sidecar.admission.request_path import guarded_endpoint
from sidecar.admission.self_view import is_self_view
from sidecar.admission.unguarded import needs_tenant
from sidecar.errors import TenantNotFound, UnknownTenant
from sidecar.identity.classify import NamedByApp, TenantClaims, named_by_app
from sidecar.policy.model import Policy

AppAnswer: TypeAlias = "str | Mapping[str, Any] | None"
"""An answer of the function: a tenant's name, claims as a token has them, or None: nothing is known."""
TenantOf: TypeAlias = "Callable[[Scope], AppAnswer | Awaitable[AppAnswer]]"

_RIGHT = "the name of a tenant, a mapping of claims, or None"
_REFUSED = "this server could not find out whose request this is; its log says why, for the operator"

_log = logging.getLogger("sidecar.tenants")


class _Failed(Exception):
    """The function has no usable answer. The message says what it did."""


class _ClientLeft(Exception):
    """The client disconnected while the function was asked."""


def naming(tenant_of: TenantOf) -> Callable[[AdmissionController, ASGIApp], ASGIApp]:
    """Wrapper of an app that serves a controller's requests, so that it serves them with the app's tenants.

    Raises ValueError for what is no function, or cannot be called with a scope alone.
    """
    given: object = tenant_of
    if not callable(given):
        raise ValueError(f"tenant: {given!r} is no function; give one that gets the scope, and returns {_RIGHT}")
    try:
        inspect.signature(tenant_of).bind({})
    except TypeError as wrong:
        raise ValueError(f"tenant: {tenant_of!r} cannot be called with the scope alone: {wrong}") from None
    except ValueError:  # some that are written in C have no signature
        pass
    return partial(_with_tenants, tenant_of)


def _with_tenants(tenant_of: TenantOf, controller: AdmissionController, serve: ASGIApp) -> ASGIApp:
    async def serve_named(scope: Scope, receive: Receive, send: Send) -> None:
        if not _counts(controller, scope):
            await serve(scope, receive, send)
            return
        client = UploadChannel(receive, send, controller.pool.now_us)
        try:
            token = named_by_app.set(await _ask_app(tenant_of, scope, client, controller.policy))
            try:
                await serve(scope, client.receive if client.is_watched else receive, send)
            finally:
                named_by_app.reset(token)
        except _ClientLeft:
            return
        finally:
            client.close()

    return serve_named


def _counts(controller: AdmissionController, scope: Scope) -> bool:
    """True if anything depends on the tenant of a request."""
    if scope["type"] not in ("http", "websocket"):
        return False
    if controller.is_passing:  # only who gets the engine's key
        return bool(controller.snapshot.credentials.added) and controller.policy.anonymous is None
    return (
        guarded_endpoint(controller.snapshot.endpoints, scope) is not None
        or is_self_view(scope)
        or needs_tenant(controller, scope)
    )


async def _ask_app(tenant_of: TenantOf, scope: Scope, client: UploadChannel, policy: Policy) -> NamedByApp:
    """The function's answer, or why the request is refused. Raises _ClientLeft."""
    try:
        named = tenant_of(scope)
        if inspect.isawaitable(named):
            named = await _wait_for_name(named, client if scope["type"] == "http" else None, policy.body_timeout_s)
        return _read_claims(named, policy)
    except (UnknownTenant, TenantNotFound) as refusal:
        return refusal
    except _ClientLeft:
        raise
    except _Failed as failed:
        _log.error("the app's function `tenant` %s", failed, extra={"event": "tenant_failed"})
    except Exception:
        _log.exception("the app's function `tenant` has raised an error", extra={"event": "tenant_failed"})
    return TenantNotFound(_REFUSED)


async def _wait_for_name(named: Awaitable[AppAnswer], client: UploadChannel | None, most_s: float) -> AppAnswer:
    asking = asyncio.ensure_future(named)
    try:
        await asyncio.sleep(0)  # most have nothing to wait for
        if not asking.done():
            left = () if client is None else (client.disconnect(),)
            await asyncio.wait((asking, *left), timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
            if left and left[0].done():
                raise _ClientLeft
        if not asking.done():
            raise _Failed(f"has not answered within {most_s:g} s (the policy's `body_timeout`)")
        if asking.cancelled():
            raise _Failed("was canceled by itself")
        return asking.result()
    finally:
        asking.cancel()


def _read_claims(named: object, policy: Policy) -> TenantClaims | None:
    """The claims, by the names that the policy's `jwt` gives them. Raises UnknownTenant, or _Failed."""
    if named is None:
        return None
    if isinstance(named, str):
        return TenantClaims(named, None)
    if not isinstance(named, Mapping):
        raise _Failed(f"has returned {type(named).__name__}; return {_RIGHT}")
    jwt = policy.jwt
    tenant_claim, tier_claim = ("tenant", "tier") if jwt is None else (jwt.tenant_claim, jwt.tier_claim)
    tenant, tier = named.get(tenant_claim), None if tier_claim is None else named.get(tier_claim)
    if not isinstance(tenant, str):
        raise UnknownTenant("the claims of this request's user name no tenant; ask the operator for one")
    if tier is not None and not isinstance(tier, str):
        raise UnknownTenant("the claims of this request's user name a tier that is no text; ask the operator")
    return TenantClaims(tenant, tier)
