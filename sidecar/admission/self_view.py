"""A tenant's view of itself: `GET /v1/admission/self`, with its own key.

Its tiers, its limits with what is left of them, its requests here, and how long a request would wait now. Nothing of
other tenants is in it but how many requests wait in the tiers that this one may ask for.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.admission.client import UploadChannel
from sidecar.admission.controller import AdmissionController
from sidecar.admission.intake import refuse_two_keys
from sidecar.admission.request_path import exact_paths, guarded_endpoint
from sidecar.admission.responses import request_id, send_error, send_json
from sidecar.admission.unguarded import needs_tenant
from sidecar.errors import AdmissionError, RemainingLimit, RemainingLimits, TenantNotFound, UnknownTenant
from sidecar.identity.classify import NamedByApp, TenantClaims, named_by_app
from sidecar.identity.issuer_keys import with_keys
from sidecar.policy.declared import figures
from sidecar.policy.model import Policy
from sidecar.policy.tenant import Account, RateLimits, Tenant
from sidecar.pools.base import TenantUse
from sidecar.tenants.tenant_usage import BudgetView

PATH = "/v1/admission/self"
KEPT_US = 250_000
"""So long an answer is given again: to look costs as much as there are requests, and a client may ask without end."""


class LimitView(msgspec.Struct, frozen=True):
    """A limit by the minute. `left` and `full_in_s` (until all of it is there again) are None where not known now."""

    per_minute: int
    left: int | None
    full_in_s: float | None


class LimitsView(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tenant's limits; those that it does not have are left out. `models`: those at single models, beside them."""

    requests: LimitView | None = None
    tokens: LimitView | None = None
    concurrent_requests: int | None = None
    max_output_tokens: int | None = None
    tokens_per_day: BudgetView | None = None
    tokens_per_month: BudgetView | None = None
    models: dict[str, LimitsView] = {}


class UseView(msgspec.Struct, frozen=True):
    """The tenant's requests in this replica: how many wait and run, and the tokens that are held for them."""

    waiting: int
    running: int
    held_tokens: int


class OwnTierView(msgspec.Struct, frozen=True):
    """A tier that the tenant may ask for. `waiting` counts the requests of all tenants, in all replicas.

    `expected_wait_s` is for a request that comes now, at the present pace of the queue; None where that says nothing.
    """

    tier: str
    waiting: int
    expected_wait_s: float | None


class SelfView(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer. With several models each has tiers of its own, and in a store also its own limits by the minute.

    `cost` has the weights of tokens in limits and budgets, by model; none where each counts as one.
    """

    tenant: str
    tier: str
    max_tier: str
    weight: int
    limits: LimitsView
    here: UseView
    tiers: list[OwnTierView] = []
    models: dict[str, list[OwnTierView]] = {}
    limits_by_model: dict[str, LimitsView] = {}
    cost: dict[str, dict[str, float]] = {}


def is_self_view(scope: Scope) -> bool:
    """True if a request asks for this page."""
    return scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and PATH in exact_paths(scope)


async def send_self_view(controller: AdmissionController, scope: Scope, send: Send) -> None:
    """Answers with the view of the tenant whose key the request has."""
    headers = dict(scope["headers"])
    named = request_id(headers)
    try:
        refuse_two_keys(scope["headers"], headers, controller.snapshot)
        tenant = await with_keys(lambda: controller.snapshot.classifier.tenant(headers, scope, scope["headers"]))
    except AdmissionError as refusal:
        await send_error(send, refusal, request_id=named)
        return
    await send_json(scope, send, await _kept(controller, tenant), named, (b"cache-control", b"no-store"))


async def _kept(controller: AdmissionController, tenant: Tenant) -> bytes:
    """The answer, or the last one where that was a moment ago. A token may name a tier that is not its tenant's own."""
    now_us, kept, whose = controller.pool.now_us(), controller.self_views, (tenant.name, tenant.level)
    last = kept.get(whose)
    if last is not None and now_us - last[0] < KEPT_US:
        return last[1]
    body = msgspec.json.encode(await _view(controller, tenant))
    policy = controller.policy
    if len(kept) > (len(policy.named) + 1) * len(policy.tiers):  # of tenants that are gone
        kept.clear()
    kept[whose] = now_us, body
    return body


async def _view(controller: AdmissionController, tenant: Tenant) -> SelfView:
    tiers = controller.policy.tiers
    view = SelfView(
        tenant=tenant.name,
        tier=tiers[tenant.level].name,
        max_tier=tiers[tenant.max_level].name,
        weight=tenant.weight,
        limits=await _limits(controller, tenant),
        here=_here(controller, tenant),
        cost={model: figures(cost) for model, cost in controller.policy.costs.items()},
    )
    if controller.controllers:
        found = {name: _tiers(one, tenant) for name, one in _pools(controller, tenant).items()}
        return msgspec.structs.replace(view, models=found, limits_by_model=await _limits_by_model(controller, tenant))
    return msgspec.structs.replace(view, tiers=_tiers(controller, tenant))


async def _limits(controller: AdmissionController, tenant: Tenant) -> LimitsView:
    at_models = {model: tenant.account_at(model) for model in tenant.limits.models}
    return msgspec.structs.replace(
        await _of_account(controller, None if controller.counts_apart else controller, tenant.account),
        max_output_tokens=tenant.limits.max_output_tokens,
        models={
            model: await _of_account(controller, _counting_for(controller, model), account)
            for model, account in at_models.items()
            if account is not None
        },
    )


def _counting_for(controller: AdmissionController, model: str) -> AdmissionController | None:
    """The controller whose pool counts a tenant's requests to a model; None where there is no such model."""
    return controller.controllers.get(model) if controller.counts_apart else controller


async def _of_account(
    controller: AdmissionController, counting: AdmissionController | None, account: Account
) -> LimitsView:
    """The limits of an account. `counting` has the pool that counts those by the minute, None where several do."""
    left = None if counting is None else await _left(counting, account)
    budgets = {} if controller.usage is None else controller.usage.budgets(account)
    return LimitsView(
        *_by_minute(account.limits, left),
        concurrent_requests=account.limits.concurrent_requests,
        tokens_per_day=_budget(budgets.get("day")),
        tokens_per_month=_budget(budgets.get("month")),
    )


async def _limits_by_model(controller: AdmissionController, tenant: Tenant) -> dict[str, LimitsView]:
    limits = tenant.limits
    if not controller.counts_apart or limits.requests_per_minute is limits.tokens_per_minute is None:
        return {}
    models = _pools(controller, tenant).items()
    return {name: LimitsView(*_by_minute(limits, await _left(one, tenant.account))) for name, one in models}


def _pools(controller: AdmissionController, tenant: Tenant) -> dict[str, AdmissionController]:
    """The controllers of the models whose pools a tenant may use by some name, by the first such name."""
    found: dict[str, str] = {}
    for name in controller.snapshot.names.usable(tenant):
        found.setdefault(controller.snapshot.names.called[name], name)
    return {name: controller.controllers[model] for model, name in found.items()}


def _by_minute(limits: RateLimits, left: RemainingLimits | None) -> tuple[LimitView | None, LimitView | None]:
    """The limits of requests and of tokens, with what is left of them; None: not known."""
    return (
        _limit(limits.requests_per_minute, None if left is None else left.requests),
        _limit(limits.tokens_per_minute, None if left is None else left.tokens),
    )


async def _left(controller: AdmissionController, account: Account) -> RemainingLimits | None:
    return await controller.pool.allowance(account.name, account.limits) if account.limits.are_counted else None


def _budget(view: BudgetView | None) -> BudgetView | None:
    return None if view is None else msgspec.structs.replace(view, ends_in_s=round(view.ends_in_s, 1))


def _limit(per_minute: int | None, left: RemainingLimit | None) -> LimitView | None:
    if per_minute is None:
        return None
    return (
        LimitView(per_minute, None, None)
        if left is None
        else LimitView(per_minute, left.left, round(left.reset_us / 1e6, 3))
    )


def _here(controller: AdmissionController, tenant: Tenant) -> UseView:
    found = controller.controllers.values() or [controller]
    uses = [one.pool.tenant_use(tenant.name) for one in found]
    return UseView(*map(sum, zip(*uses, strict=True))) if uses else UseView(*TenantUse(0, 0, 0))


def _tiers(controller: AdmissionController, tenant: Tenant) -> list[OwnTierView]:
    pool, tiers = controller.pool, controller.policy.tiers
    waiting = [tier["queued"]["requests"] for tier in pool.state()["tiers"]]  # type: ignore[attr-defined]
    return [
        OwnTierView(tier.name, count, _wait_s(controller, tier.level, count))
        for tier, count in zip(tiers, waiting, strict=True)
        if tier.level >= tenant.max_level
    ]


def _wait_s(controller: AdmissionController, level: int, waiting: int) -> float | None:
    if not waiting:
        return 0.0
    wait_s = controller.pool.standing(level, controller.pool.mark(level)).wait_s
    return None if wait_s is None else round(wait_s, 1)


# -- Tenants that the app names: a function of its owner's knows the user, or the session, of a request.
#
# It is asked where the tenant counts: on guarded paths, and where a request would else be refused for its key. So it
# is asked before a byte of the body is read. One that waits, such as for a database, has as long as a body has
# (`body_timeout`), and is canceled where its client disconnects meanwhile. What it raises refuses the request.

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
