"""Classification of a request: the API key names the tenant, and the policy's sources name the tier.

The sources are asked in the policy's order and the first that answers wins. The answer is then clamped to the best tier
that the tenant may ask for. No priority that a client states is dropped silently: those that did not count are returned
as `ignored`, and a value without a meaning is an error that lists the tiers.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from enum import Enum
from math import floor
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import unquote_to_bytes

import msgspec

from sidecar.engines.base import Carrier, Engine
from sidecar.engines.registry import client_members
from sidecar.errors import (
    AdmissionError,
    ExpiredApiKey,
    InvalidApiKey,
    InvalidToken,
    TenantsUnavailable,
    UnknownTenant,
    UnknownTier,
)
from sidecar.events import Headers
from sidecar.identity.tokens import TokenVerifier, is_token
from sidecar.payload.decode import Payload
from sidecar.policy.choices import StoredTenants, TierSource
from sidecar.policy.endpoint import Endpoint
from sidecar.policy.identity import GatewayPolicy
from sidecar.policy.model import Policy
from sidecar.policy.tenant import KeyHolder, Tenant

if TYPE_CHECKING:
    from sidecar.identity.service_tiers import ServiceTiers
    from sidecar.identity.users import RequestUser

API_KEY_HEADERS = (b"x-api-key", b"api-key")
"""Headers that hold a key and nothing else: Anthropic's clients send the first, Azure's the second."""
may_hold_keys = re.compile(rb"key|token|auth").search
"""Finds names of headers in which clients of other servers send their keys, such as `x-goog-api-key`."""
_SHOWN_PLACE = re.compile(rb"[A-Za-z0-9_.-]{1,64}")
_MOST_PARAMETERS = 32
"""Of a query, that are looked at."""
MOST_KEPT = 4096
"""Headers with a known key whose tenant is kept. A client may write the same key in many ways."""
_LONGEST_KEPT = 256
"""Bytes of such a header. Tokens are longer, and have a store of their own."""


_NO_SCOPE: Mapping[str, Any] = MappingProxyType({})
_UNREAD = (
    "a key of tenant %s is in %s, where it does not count: its requests are refused, or served as those of no tenant; "
    "send `Authorization: Bearer KEY`, `x-api-key: KEY` or `api-key: KEY`"
)
_log = logging.getLogger("sidecar.keys")


class TenantClaims(NamedTuple):
    """A tenant by its name, and the tier that it asks for, None where it names none."""

    tenant: str
    tier: str | None


NamedByApp: TypeAlias = "TenantClaims | AdmissionError | None"
named_by_app: ContextVar[NamedByApp] = ContextVar("admission_said_by_app", default=None)
"""What the app around the middleware says of the request's tenant, or why it cannot. It counts once."""


class Fallback(str, Enum):
    """Stands in for a source: the policy's `default_tier` where none answers, and the holder of a lease from Python."""

    DEFAULT = "default"
    LEASE = "lease"


class Asked(msgspec.Struct, frozen=True, gc=False):
    """The parts of a request that may state a priority.

    `headers` holds the last value of every header, by lower-case name. `stripped` names those from which some engine
    would take a priority or a tenant (`engines.client_headers`). They are not forwarded.
    """

    endpoint: Endpoint
    payload: Payload
    headers: Mapping[bytes, bytes]
    stripped: Sequence[bytes]


class SourceAnswer(msgspec.Struct, frozen=True):
    """One source's answer. `level` is None where it has none; `statement` is the field or header that it read.

    `refusal` is the request's error where the value has no meaning and no earlier source answers.
    """

    source: TierSource | Fallback
    level: int | None
    statement: str | None = None
    value: str = ""
    refusal: UnknownTier | None = None


# The answers of most sources to a request that states no priority: made once.
_NO_BODY = SourceAnswer(TierSource.BODY, None)
_NO_HEADER = SourceAnswer(TierSource.HEADER, None)
_NO_ENGINE = SourceAnswer(TierSource.ENGINE, None)
_NO_SERVICE_TIER = SourceAnswer(TierSource.SERVICE_TIER, None)
_DEFAULT = SourceAnswer(Fallback.DEFAULT, None)


class Classification(msgspec.Struct, frozen=True, gc=False):
    """A request's tenant and level.

    `clamped_from` is the level asked for where the tenant may not have it. `downgraded_from` is the level within the
    tenant's limits, where the request is over them, `risen_from` the level that a request with a deadline had before it
    rose. `ignored` lists the client's priority fields and headers that did not count, as a client writes them, and
    where a key is that was not read. `user` is None where the tenant has no `users`.
    """

    tenant: Tenant
    level: int
    source: TierSource | Fallback
    clamped_from: int | None
    ignored: tuple[str, ...]
    downgraded_from: int | None = None
    risen_from: int | None = None
    user: RequestUser | None = None

    def charged(self, level: int) -> Classification:
        """With the level that the pool charges, or whose queue is full. It rose to a better one."""
        if level < self.level:
            return msgspec.structs.replace(self, level=level, risen_from=self.risen_from or self.level)
        return msgspec.structs.replace(self, level=level, downgraded_from=self.level)

    @property
    def best_level(self) -> int:
        """The best level that it may rise to: none above the one that it has where its tenant is over its limits."""
        return self.tenant.max_level if self.downgraded_from is None else self.level

    def ignoring(self, more: Iterable[str]) -> Classification:
        """With more that did not count."""
        return msgspec.structs.replace(self, ignored=(*self.ignored, *more))


class Classifier:
    """Classifies requests by one policy. Shared by all requests. `tokens` is None where no tokens are accepted.

    `clock` is the wall clock, in seconds. `service_tiers` are there where the policy reads the body's `service_tier`.
    """

    def __init__(
        self,
        policy: Policy,
        dialect: Engine,
        tokens: TokenVerifier | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tokens = tokens
        self._clock = clock
        self._gateway = policy.gateway
        self._by_asked_tier: dict[tuple[str, str], Tenant] = {}
        self._of_keys = policy.tenants
        self._of_authorization: dict[bytes | None, Tenant] = {}
        self._logged: set[tuple[str, str]] = set()
        self._policy = policy
        self._dialect = dialect
        self._last = len(policy.tiers) - 1
        self.service_tiers: ServiceTiers | None = None
        if policy.service_tiers:
            from sidecar.identity.service_tiers import ServiceTiers

            self.service_tiers = ServiceTiers(policy.service_tiers)
        consults: Mapping[TierSource, Callable[[Asked, Tenant], SourceAnswer]] = {
            TierSource.BODY: self._body,
            TierSource.HEADER: self._header,
            TierSource.ENDPOINT: lambda asked, _: self._of_endpoint[asked.endpoint.level],
            TierSource.KEY: lambda _, tenant: self._of_key[tenant.level],
            TierSource.ENGINE: self._engine,
            TierSource.SERVICE_TIER: self._service_tier,
        }
        levels = [None, *range(len(policy.tiers))]
        self._of_endpoint = {level: SourceAnswer(TierSource.ENDPOINT, level) for level in levels}
        self._of_key = {level: SourceAnswer(TierSource.KEY, level) for level in levels}
        self._consults = tuple(consults[source] for source in policy.sources)

    def tenant(
        self, headers: Mapping[bytes, bytes], scope: Mapping[str, Any] = _NO_SCOPE, pairs: Headers = ()
    ) -> Tenant:
        """The tenant that the app or the gateway names, or whose key or token the request carries.

        The server's `scope` says from which address it came, and `pairs` are the headers as they came. Raises
        InvalidApiKey, which says nothing of the key itself, but where a known key is that was not read; and what
        `TokenVerifier.claims` raises.
        """
        try:
            return self._find_tenant(headers, scope, pairs)
        except ExpiredApiKey:
            raise
        except InvalidApiKey as refusal:
            places = self.unread(headers, scope.get("query_string", b""))
            if type(refusal) is not InvalidApiKey or not places:
                raise
            raise InvalidApiKey(f"{refusal.message} (a known key in {', '.join(places)} does not count)") from None

    def _find_tenant(self, headers: Mapping[bytes, bytes], scope: Mapping[str, Any], pairs: Headers) -> Tenant:
        answer, gateway = named_by_app.get(), self._gateway
        if answer is not None:
            return self._tenant_by_app(answer)
        if gateway is not None and gateway.tenant_header in headers and gateway.sent(scope.get("client"), pairs):
            return self._tenant_by_gateway(gateway, headers)
        # A digest is looked up, not the key: timing could only reveal a hash, which no one can invert.
        sent = headers.get(b"authorization")
        digest = None if sent is None or len(sent) > _LONGEST_KEPT else hashlib.blake2s(sent).digest()
        return self._of_authorization.get(digest) or self._by_key(headers, digest)

    def _by_key(self, headers: Mapping[bytes, bytes], digest: bytes | None) -> Tenant:
        """The tenant of a key or token. It is kept by the `digest` of `Authorization` where that holds a known key:
        the policy's SHA-256, and what comes before it, cost more than twice as much.
        """
        key = api_key(headers)
        if key is None:
            if self._policy.anonymous is None:
                raise InvalidApiKey(self._without_key(headers))
            return self._policy.anonymous
        tenant = self._of_keys.get(hashlib.sha256(key).hexdigest())
        if tenant is None:
            return self._tenant_by_token(key)
        if type(tenant) is KeyHolder and tenant.key.expires_s is not None:  # asked anew each time, so it is not kept
            return self._unless_expired(tenant, tenant.key.expires_s)
        if digest is not None and headers.keys().isdisjoint(API_KEY_HEADERS):  # else the key may be from there
            if len(self._of_authorization) >= MOST_KEPT:
                self._of_authorization.clear()
            self._of_authorization[digest] = tenant
        return tenant

    def _unless_expired(self, holder: KeyHolder, expires_s: int) -> Tenant:
        if self._clock() < expires_s:
            return holder
        raise ExpiredApiKey(
            f"API key {holder.key.title} of tenant {holder.name} has expired, {holder.key.last} was its end; "
            "ask the operator for a new one"
        )

    def unread(self, headers: Mapping[bytes, bytes], query: bytes) -> tuple[str, ...]:
        """Places in which a request has a tenant's key that is not read there: a header, or `?` and a parameter.

        The log says it once for each place and tenant. The key itself is not shown.
        """
        found = _unread_keys(headers, query, self._of_keys)
        for place, tenant in found.items():
            if (place, tenant.name) not in self._logged and len(self._logged) < MOST_KEPT:
                self._logged.add((place, tenant.name))
                _log.warning(_UNREAD, tenant.name, place, extra={"event": "key_not_read"})
        return tuple(found)

    def _without_key(self, headers: Mapping[bytes, bytes]) -> str:
        answer, gateway = "no API key; send `Authorization: Bearer KEY` or `x-api-key: KEY`", self._gateway
        if gateway is None or gateway.tenant_header not in headers:
            return answer
        return f"{answer}; {gateway.tenant_header.decode('ascii')} counts only from an address of the policy's gateway"

    def _tenant_by_token(self, key: bytes) -> Tenant:
        """The tenant that a token names. It asks for the tier that the token names, where that names one."""
        if self._tokens is None or not is_token(key):
            raise self._unknown(InvalidApiKey("this API key is not known here; ask the operator for one"))
        claims = self._tokens.claims(key, hashlib.sha256(key).digest())
        return self._by_name(claims.tenant, claims.tier, "token", InvalidToken)

    def _tenant_by_gateway(self, gateway: GatewayPolicy, headers: Mapping[bytes, bytes]) -> Tenant:
        """The tenant that the gateway names, which asks for the tier that it names, where it names one."""
        tier = None if gateway.tier_header is None else headers.get(gateway.tier_header)
        named = headers[gateway.tenant_header].decode("latin-1")
        return self._by_name(named, None if tier is None else tier.decode("latin-1"), "gateway", UnknownTenant)

    def _tenant_by_app(self, answer: TenantClaims | AdmissionError) -> Tenant:
        # The app, which may have another admission controller in it, is called with this context.
        named_by_app.set(None)
        if isinstance(answer, AdmissionError):
            raise answer
        return self._by_name(answer.tenant, answer.tier, "app", UnknownTenant)

    def _by_name(self, named: str, tier: str | None, by: str, refusal: type[InvalidApiKey]) -> Tenant:
        """The tenant of this name. It asks for the tier, where one is named."""
        tenant = self._policy.named.get(named)
        if tenant is None:
            raise self._unknown(refusal(f"the {by} names a tenant that is not known here; ask the operator to add it"))
        if tier is None:
            return tenant
        asked = self._asking(tenant, tier)
        if asked is None:
            raise refusal(f"the {by} names a tier that the policy does not have; ask the operator which there are")
        return asked

    def _unknown(self, refusal: InvalidApiKey) -> AdmissionError:
        """The refusal of an unknown tenant. It may be one of the store's, as long as those were not read."""
        if self._policy.stored_tenants is not StoredTenants.UNREAD:
            return refusal
        return TenantsUnavailable("the tenants in the store have not been read yet; send it again", retry_after_s=1)

    def _asking(self, tenant: Tenant, tier: str) -> Tenant | None:
        """The tenant, as it asks for a tier; None where there is no such tier."""
        asked = self._by_asked_tier.get((tenant.name, tier))
        if asked is None and (level := self._policy.level_for(tier)) is not None:
            asked = self._by_asked_tier[tenant.name, tier] = replace(tenant, level=level)
        return asked

    def classify(self, asked: Asked, tenant: Tenant) -> Classification:
        """The level a request gets. Raises UnknownTier for a name that is no tier or a number out of range."""
        won = _DEFAULT
        for consult in self._consults:
            answer = consult(asked, tenant)
            if answer.refusal is not None:
                raise answer.refusal
            if answer.level is not None:
                won = answer
                break
        level, best = self._policy.default_level if won.level is None else won.level, tenant.max_level
        ignored: tuple[str, ...] = ()
        if stated := self._statements(asked):
            ignored = tuple([name for name in stated if name != won.statement])
        return Classification(tenant, max(level, best), won.source, level if level < best else None, ignored)

    def answers(self, asked: Asked, tenant: Tenant) -> list[SourceAnswer]:
        """All sources' answers, in the policy's order, including those after the winner: for `sidecar explain`."""
        return [consult(asked, tenant) for consult in self._consults]

    def _statements(self, asked: Asked) -> list[str]:
        """Every field and header of a request that states a priority, the sidecar's or an engine's."""
        payload, own = asked.payload, self._policy.tier_header
        found = [] if payload.priority is None and payload.nvext is None else client_members(payload)
        if asked.stripped:
            found += [name.decode("latin-1") for name in asked.stripped]
        if own in asked.headers:
            found.append(own.decode("latin-1"))
        tiers, service_tier = self.service_tiers, payload.service_tier
        if tiers is not None and service_tier is not None and not tiers.is_silent(service_tier):
            found.append("service_tier")
        return found

    def _body(self, asked: Asked, tenant: Tenant) -> SourceAnswer:  # noqa: ARG002  # every source is asked alike
        raw = asked.payload.priority
        # Where the engine's own priorities count, a number in `priority` is the engine's; a name is always a tier's.
        if raw in (None, b"null") or (TierSource.ENGINE in self._policy.sources and self._is_engines(asked.payload)):
            return _NO_BODY
        assert raw is not None
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.MsgspecError, RecursionError):  # a number beyond a double, or nested too deeply
            value = None
        return self._answer(TierSource.BODY, "priority", value, raw)

    def _is_engines(self, payload: Payload) -> bool:
        stated = self._dialect.asked(payload, {})
        return stated is not None and stated.statement == "priority"

    def _header(self, asked: Asked, tenant: Tenant) -> SourceAnswer:  # noqa: ARG002
        raw = asked.headers.get(self._policy.tier_header)
        if raw is None:
            return _NO_HEADER
        name = self._policy.tier_header.decode("latin-1")
        text = raw.decode("latin-1").strip()
        value: object = text
        if self._policy.level_for(text) is None:
            with suppress(ValueError):
                value = float(text)
        return self._answer(TierSource.HEADER, name, value, raw)

    def _engine(self, asked: Asked, tenant: Tenant) -> SourceAnswer:  # noqa: ARG002
        stated = self._dialect.asked(asked.payload, asked.headers)
        if stated is None:
            return _NO_ENGINE
        direction = 1 if self._dialect.more_important_is_higher else -1
        level = next(
            (
                level
                for threshold, level in self._policy.engine_levels
                if direction * stated.value >= direction * threshold
            ),
            self._last,
        )
        return SourceAnswer(TierSource.ENGINE, level, stated.statement, f"{stated.value:g}")

    def _service_tier(self, asked: Asked, tenant: Tenant) -> SourceAnswer:  # noqa: ARG002
        raw, tiers = asked.payload.service_tier, self.service_tiers
        if raw is None or tiers is None or tiers.is_silent(raw):
            return _NO_SERVICE_TIER
        return SourceAnswer(TierSource.SERVICE_TIER, tiers.level(raw), "service_tier", _show(raw))

    def _answer(self, source: TierSource, where: str, value: object, raw: bytes) -> SourceAnswer:
        """The level of a tier's name, or of a number in [0, 1] with 1 the most important, rounded to the nearest."""
        if isinstance(value, str) and (level := self._policy.level_for(value)) is not None:
            return SourceAnswer(source, level, where, _show(raw))
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
            return SourceAnswer(source, self._last - floor(value * self._last + 0.5), where, _show(raw))
        tiers, is_body = ", ".join(tier.name for tier in self._policy.tiers), source is TierSource.BODY
        is_engines = is_body and TierSource.ENGINE in self._policy.sources and Carrier.BODY in self._dialect.carriers
        number = (
            f"a number as {self._dialect.title} takes it ({self._dialect.direction()} is more important)"
            if is_engines
            else "a number from 0 to 1 (1 is the most important)"
        )
        refusal = UnknownTier(
            f"{where}: {_show(raw)} is not a tier; send one of {tiers}, or {number}", param=where if is_body else None
        )
        return SourceAnswer(source, None, where, _show(raw), refusal)


def api_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key of `Authorization: Bearer` or, without one, of `x-api-key` or `api-key`; None where there is none.

    An empty `Bearer` is none: OpenAI's clients send it where they have no key.
    """
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and (key := key.strip()):
        return key
    return headers[b"x-api-key"] if b"x-api-key" in headers else headers.get(b"api-key")


def _unread_keys(headers: Mapping[bytes, bytes], query: bytes, tenants: Mapping[str, Tenant]) -> Mapping[str, Tenant]:
    """The tenants whose keys are anywhere in a query, or in a header that may hold one, by the place."""
    if not query and not may_hold_keys(b" ".join(headers)):
        return {}
    sent = [("", name, value) for name, value in headers.items() if may_hold_keys(name)]
    for part in query.split(b"&", _MOST_PARAMETERS)[:_MOST_PARAMETERS]:
        name, _, value = part.partition(b"=")
        sent.append(("?", name, unquote_to_bytes(value)))
    found = {}
    for kind, name, value in sent:
        for key in (value, value.partition(b" ")[2]):  # the second after a scheme
            tenant = tenants.get(hashlib.sha256(key.strip()).hexdigest())
            if tenant is not None and _SHOWN_PLACE.fullmatch(name):
                found[kind + name.decode("ascii")] = tenant
    return found


def _show(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace")
    return text if len(text) <= 40 else text[:40] + "…" + '"' * text.startswith('"')
