"""Routing: one request's way to the engines of its fleet, from the prediction of its prefix hits to its last byte.

What becomes of an attempt that ends before the first byte of the response's body:

| what happened | what becomes of the request |
|---|---|
| it was not sent: no connection, or the engine has restarted or gone | it waits again |
| 429, 503 or 529 | it waits again, and the engine gets no more requests than it runs, for a while |
| the connection broke, and the engine has crashed, restarted or gone | it is replayed at another engine |
| the connection broke, and the engine answers | the same, within the replay budget |
| a second engine broke it, or there is no other | the client gets a 502 |
| the engine is slow | nothing: it is never sent twice, and ends with its `timeouts` |

A crash is outside the budget. It happens once in an engine's life, and its requests were admitted once already, so that
the other engines take them by their ledgers. The budget bounds what an engine that lives on, or a request that breaks
its connections, may cost the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Collection
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from fractions import Fraction

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.admission.answer import EngineCall
from sidecar.admission.handover import ENGINE_ID_KEY
from sidecar.admission.intake import SizedRequest
from sidecar.admission.usage import UsageReader
from sidecar.apis import Api
from sidecar.engines.speed import EngineSpeeds
from sidecar.errors import AdmissionError, EngineUnreachable, ResponseCut
from sidecar.events import ReplayReason
from sidecar.fleet.affinity import AffinityPredictor, Prediction
from sidecar.fleet.fleet import Fleet
from sidecar.fleet.member import EngineMember
from sidecar.fleet.prefill import Prefill
from sidecar.fleet.setup import change_fleet
from sidecar.policy.model import Policy
from sidecar.pools import Lease, Pool

# -- `Retry-After` of an engine's response (RFC 9110, section 10.2.3).

WITHOUT_S = 1.0
"""Where an engine does not say when it takes requests again. It is full for steps, which take less."""
MOST_S = 60.0
"""An engine that says more is asked again by then: a mistaken header does not take it out for an hour."""


def retry_after_s(value: bytes | None, now: datetime | None = None) -> float:
    """Seconds until the engine takes requests again, from `WITHOUT_S` to `MOST_S`, by the header's value.

    A value that is missing, cannot be read or lies in the past counts as `WITHOUT_S`. `now` is for tests.
    """
    text = "" if value is None else value.decode("latin-1").strip()
    found = _seconds(text)
    if found is None:
        found = _until(text, now or datetime.now(timezone.utc))
    return WITHOUT_S if found is None else max(WITHOUT_S, min(MOST_S, found))


def _seconds(text: str) -> float | None:
    """Whole seconds, as the standard has them, or with decimals, as some servers send them."""
    if not text.isascii() or not text.replace(".", "", 1).isdigit():
        return None
    found = float(text)
    return found if math.isfinite(found) else MOST_S


def _until(text: str, now: datetime) -> float | None:
    try:
        date = parsedate_to_datetime(text)
        return (date.replace(tzinfo=date.tzinfo or timezone.utc) - now).total_seconds()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


# -- Replay budget: a broken engine must not double the load of the others.
#
# Within any minute at most a share of that minute's admissions is replayed, and `LEAST` replays in any case. The
# minute slides in steps of a second. One object costs 60 pairs of numbers, and a request one addition.

LEAST = 10
"""Replays within a minute that are allowed at any load: else the engine of a quiet pool could not fail unseen."""
MINUTE_S = 60
_SECOND_US = 1_000_000


class ReplayBudget:
    """The replays of one pool in one process. Times are microseconds of one clock that does not go back."""

    def __init__(self, share: Fraction, least: int = LEAST) -> None:
        self.share = share
        self._least = least
        self._admissions = [0] * MINUTE_S
        self._replays = [0] * MINUTE_S
        self._admitted = self._replayed = 0
        self._second = 0

    def admitted(self, now_us: int) -> None:
        """A request was admitted. A replay's own admission is none."""
        self._slide(now_us)
        self._admissions[self._second % MINUTE_S] += 1
        self._admitted += 1

    def take(self, now_us: int) -> bool:
        """Takes one replay out of the budget. False, and nothing changes, where none is left."""
        self._slide(now_us)
        if self.left <= 0:
            return False
        self._replays[self._second % MINUTE_S] += 1
        self._replayed += 1
        return True

    @property
    def left(self) -> int:
        """Replays that were left at the last call."""
        return max(self._least, int(self.share * self._admitted)) - self._replayed

    def _slide(self, now_us: int) -> None:
        """Forgets the seconds that lie a minute back."""
        second = now_us // _SECOND_US
        for passed in range(self._second + 1, min(second, self._second + MINUTE_S) + 1):
            self._admitted -= self._admissions[passed % MINUTE_S]
            self._replayed -= self._replays[passed % MINUTE_S]
            self._admissions[passed % MINUTE_S] = self._replays[passed % MINUTE_S] = 0
        self._second = max(second, self._second)


# -- Refusals of one tenant's requests, which say nothing about an engine's room for those of others.
#
# An engine, or a gateway before it, may have a limit of its own for a client, and refuse only what that one asks. By
# the refusal alone this looks as if the engine were full. It does not where the engine answers others all the while.

IN_A_ROW = 5
"""So many refusals of one tenant without an answer, and so many answers to others in that time, are no chance."""
MOST_TENANTS = 256
"""Tenants that are remembered for one engine."""


@dataclass(slots=True)
class _Row:
    """A tenant's refusals by one engine since its last answer there, and others' answers to what was sent since."""

    since_us: int
    refusals: int = 0
    answers: int = 0


class Refusals:
    """The refusals by each engine, by its id. Times are microseconds of one clock."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, _Row]] = {}

    def refused(self, engine_id: str, tenant: str, now_us: int) -> bool:
        """Notes a refusal. Whether it is about the tenant, and not about the engine's room."""
        rows = self._rows.setdefault(engine_id, {})
        row = rows.get(tenant)
        if row is None:
            if len(rows) == MOST_TENANTS:
                del rows[next(iter(rows))]
            row = rows[tenant] = _Row(now_us)
        row.refusals += 1
        return row.refusals > IN_A_ROW and row.answers >= IN_A_ROW

    def answered(self, engine_id: str, tenant: str, sent_us: int) -> None:
        """The engine answers a request that was sent to it then."""
        rows = self._rows.get(engine_id)
        if not rows:
            return
        rows.pop(tenant, None)
        for row in rows.values():
            row.answers += sent_us > row.since_us

    def keep(self, engine_ids: Collection[str]) -> None:
        """Forgets all other engines."""
        for engine_id in self._rows.keys() - engine_ids:
            del self._rows[engine_id]


FULL_STATUSES = frozenset((429, 503, 529))
MOST_REFUSALS = 8
"""The most refusals of one request that its client does not see: the next one may be about this request."""
JUDGED_WITHIN_S = 1.0
"""How long an engine that broke a connection may take to show that it lives."""


class EngineRefused(Exception):
    """An engine answered that it is full. `retry_after_s` is when it takes requests again."""

    def __init__(self, status: int, retry_after_s: float) -> None:
        super().__init__(f"status {status}")
        self.retry_after_s = retry_after_s


class FleetRouting:
    """Routes for the requests to one fleet, whose pool is `pool`. See `EngineRouting`.

    `replays` counts by engine name and reason. By engine name, `prompt_tokens` were answered, of which
    `predicted_tokens` were predicted to be cached; of the `counted_tokens` of prompts whose engine says so,
    `cached_tokens` were. `model` is the one that the pool serves, None for all.
    """

    def __init__(self, fleet: Fleet, pool: Pool, policy: Policy, model: str | None = None) -> None:
        assert policy.engines is not None
        self.fleet = fleet
        self.pool = pool
        self._model = model
        self.replays: Counter[tuple[str, ReplayReason]] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        self.predicted_tokens: Counter[str] = Counter()
        self.counted_tokens: Counter[str] = Counter()
        self.cached_tokens: Counter[str] = Counter()
        self._counting: set[tuple[str, Api]] = set()
        self.speeds = EngineSpeeds()
        self.drain_timeout_s = policy.engines.drain_timeout_s
        self.has_choice = False
        self.refusals = Refusals()
        self.most_breaks = policy.engines.replay.before_first_byte
        self.budget = ReplayBudget(policy.engines.replay.budget)
        self._settings = policy.engines.affinity
        self.affinity = _affinity(policy)
        fleet.on_change = self._engines_changed
        fleet.on_crowded = lambda engine_id, for_s: pool.cap_engine(engine_id, for_s, 0)

    def route(self, request: SizedRequest) -> Route:
        """See `EngineRouting`."""
        return Route(self, request)

    def wake(self) -> None:
        """See `EngineRouting`: nothing sleeps here."""

    def url_for(self, engine_id: str) -> str | None:
        """See `EngineRouting`."""
        member = self.fleet.member(engine_id)
        return None if member is None else member.address.url

    def change_policy(self, policy: Policy) -> None:
        """See `EngineRouting`. What is known of the engines' caches stays while `affinity` does."""
        assert policy.engines is not None
        self.drain_timeout_s = policy.engines.drain_timeout_s
        self.most_breaks = policy.engines.replay.before_first_byte
        self.budget.share = policy.engines.replay.budget
        self.pool.change_weight(policy.engines.affinity.weight_percent)
        change_fleet(self.fleet, policy, self._model)
        before, self._settings = self._settings, policy.engines.affinity
        if (before.prefix, before.session) != (self._settings.prefix, self._settings.session):
            self.affinity = _affinity(policy)
            self._engines_changed()

    def refused(self, member: EngineMember, error: EngineRefused, requests: int, tenant: str) -> None:
        """An engine refused a request of so many sequences. Where only this tenant is refused, nothing follows."""
        if not self.refusals.refused(member.id, tenant, self.pool.now_us()):
            self.pool.cap_engine(member.id, member.refused(error.retry_after_s), requests)

    def served(self, name: str, prompt_tokens: int, hit: int) -> None:
        """An engine answers a prompt, of which it was predicted to have `hit` tokens."""
        self.prompt_tokens[name] += prompt_tokens
        self.predicted_tokens[name] += hit

    def counted(self, name: str, api: Api, prompt_tokens: int, cached: int | None) -> None:
        """An engine's own count of a prompt. Engines that report `cached` leave it out where it is 0."""
        if cached is not None:
            self._counting.add((name, api))
        elif (name, api) not in self._counting:
            return
        self.counted_tokens[name] += prompt_tokens
        self.cached_tokens[name] += cached or 0

    def has_other_than(self, names: Collection[str]) -> bool:
        """True if there is an engine besides these, in whatever state: a request may wait for that one."""
        return any(member.name not in names and not member.is_gone for member in self.fleet.members())

    def _engines_changed(self) -> None:
        offers = self.fleet.offers()
        self.has_choice = len(offers) > 1  # else nothing is predicted
        self._forget_gone()
        if self.affinity is not None:
            self.affinity.set_engines({offer.id: offer.tokens for offer in offers})
        self.pool.set_engines(offers)

    def _forget_gone(self) -> None:
        """Drops the counts of engines that are gone: with pods that change their addresses names are ever new."""
        known = {member.name for member in self.fleet.members()}
        for counts in (self.prompt_tokens, self.predicted_tokens, self.counted_tokens, self.cached_tokens):
            for name in [name for name in counts if name not in known]:
                del counts[name]
        for key in [key for key in self.replays if key[0] not in known]:
            del self.replays[key]
        self._counting = {pair for pair in self._counting if pair[0] in known}
        self.refusals.keep({member.id for member in self.fleet.members()})


def _affinity(policy: Policy) -> AffinityPredictor | None:
    assert policy.engines is not None
    affinity = policy.engines.affinity
    if not affinity.prefix and not affinity.session:
        return None
    return AffinityPredictor(prefix=affinity.prefix, session=affinity.session)


class Route:
    """One request's route. See `EngineRoute`."""

    __slots__ = (
        "_answered", "_broken", "_call", "_error", "_hit", "_lease", "_member", "_name", "_prediction", "_prefill",
        "_refusals", "_request", "_routing", "_send", "_sent_us", "_start", "barred", "hits", "replay", "usage",
    )  # fmt: skip

    _lease: Lease
    _send: Send
    _call: RoutedCall
    usage: UsageReader

    def __init__(self, routing: FleetRouting, request: SizedRequest) -> None:
        self._routing = routing
        self._request = request
        self._prediction: Prediction | None = None
        self.hits: tuple[tuple[str, int], ...] = ()
        self.barred: tuple[str, ...] = ()
        self.replay: ReplayReason | None = None
        if routing.affinity is not None and routing.has_choice:
            tenant = request.classification.tenant.name
            self._prediction = routing.affinity.predict(
                tenant, request.api, request.body, request.headers, request.prompt_tokens
            )
            self.hits = self._prediction.hits
        self._member: EngineMember | None = None
        self._name = ""
        self._error: Exception | None = None
        self._start: Message | None = None
        self._prefill: Prefill | None = None
        self._answered = False
        self._broken: list[str] = []
        self._refusals = self._hit = self._sent_us = 0

    # -- one attempt

    def begin(self, lease: Lease, send: Send) -> Send:
        """See `EngineRoute`."""
        routing, grant = self._routing, lease.grant
        assert grant is not None
        assert grant.engine is not None
        engine_id, now_us = grant.engine, routing.pool.now_us()
        if self._member is None and not self._name:
            routing.budget.admitted(now_us)
        self._member = routing.fleet.member(engine_id)
        self._name = engine_id.rpartition("#")[0]
        self._lease, self._send, self._sent_us = lease, send, now_us
        self._error = self._start = None
        self._answered, self.barred = False, ()
        self._hit = next((tokens for name, tokens in self.hits if name == engine_id), 0)
        uncached = max(0, self._request.prompt_tokens - self._hit)
        if self._prediction is not None and routing.affinity is not None:
            routing.affinity.sent(self._prediction, engine_id)
        self._prefill = Prefill(routing.speeds.engine(self._name), self._request, uncached, lease, now_us)
        return self._send_with_body

    def call(self) -> RoutedCall:
        """See `EngineRoute`."""
        self._end_prefill()  # of an attempt that was preempted
        self.usage = UsageReader()
        self._call = RoutedCall(_route=self)
        return self._call

    def pinned(self, app: ASGIApp) -> ASGIApp:
        """See `EngineRoute`."""
        grant = self._lease.grant
        engine_id = None if grant is None else grant.engine

        async def ask(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, ENGINE_ID_KEY: engine_id}, receive, send)

        return ask

    def _send_with_body(self, message: Message) -> Awaitable[None]:
        """The app's `send`: passes the head on with the first byte of the body. Later chunks need no coroutine here."""
        return self._send(message) if self._answered else self._send_first(message)

    async def _send_first(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] in FULL_STATUSES and self._refusals < MOST_REFUSALS:
                # It ends the attempt, and closes the connection: the body may be without end.
                raise EngineRefused(message["status"], retry_after_s(_header(message, b"retry-after")))
            self._start = message
            return
        if message["type"] == "http.response.body" and not message.get("body") and message.get("more_body", False):
            return
        self._answered = True
        if self._start is not None:
            await self._send(self._start)
        await self._send(message)

    def first_byte(self) -> None:
        """See `EngineRoute`."""
        routing, grant, member = self._routing, self._lease.grant, self._member
        if self._prefill is not None:
            self._prefill.first_byte(routing.pool.now_us(), is_served=self._is_served)
        if grant is None or grant.engine is None or not self._is_served:
            return
        routing.served(self._name, self._request.prompt_tokens, self._hit)
        routing.refusals.answered(grant.engine, self._request.classification.tenant.name, self._sent_us)
        if member is not None:
            member.answered(self._sent_us)

    def ended(self) -> None:
        """See `EngineRoute`."""
        self._end_prefill()
        affinity, usage = self._routing.affinity, self.usage
        if not self._answered or not self._is_served:
            return
        cached = usage.cached_tokens
        if usage.input_tokens is not None:
            self._routing.counted(self._name, self._request.api, usage.input_tokens, cached)
        if affinity is not None and self._prediction is not None:
            output = usage.chunks if usage.output_tokens is None else usage.output_tokens
            affinity.ended(
                self._prediction, prompt_tokens=usage.input_tokens, cached_tokens=cached, output_tokens=output
            )

    @property
    def _is_served(self) -> bool:
        """True if the engine computes the answer. An error says nothing of its caches, its speed, or its room."""
        return self._start is not None and self._start["status"] < 400

    def _end_prefill(self) -> None:
        if self._prefill is not None:
            self._prefill.end(self._routing.pool.now_us())

    # -- its failure

    def failed(self, error: Exception) -> bool:
        """See `EngineRoute`."""
        if self._answered or not isinstance(error, EngineRefused | ResponseCut):
            return False
        self._error, self._start = error, None
        if isinstance(error, ResponseCut):
            self._call.error = EngineUnreachable(
                "the engine could not be reached: it closed the connection before it answered", retry_after_s=1
            )
        else:
            self._call.may_run = False
        self._call.is_handed_back = True
        return True

    def not_answered(self, error: AdmissionError, *, was_sent: bool) -> bool:
        """The proxy got no answer. Whether the request may wait again."""
        if self._answered or not isinstance(error, EngineUnreachable):
            return False
        self._error = error
        self._call.may_run = was_sent
        return True

    async def waits_again(self) -> bool:
        """See `EngineRoute`."""
        self._end_prefill()
        routing, member, error = self._routing, self._member, self._error
        if isinstance(error, EngineRefused):
            self._refusals += 1
            if member is not None:
                routing.refused(member, error, self._lease.ask.requests, self._request.classification.tenant.name)
            return self._counted(ReplayReason.FULL)
        if not self._call.may_run and not self._is_there(member):
            return self._counted(ReplayReason.UNREACHED)
        has_crashed = await self._has_crashed(member)
        if has_crashed:
            self._call.may_run = False
        self._broken.append(self._name)
        self.barred = (self._name,)
        if len(self._broken) > routing.most_breaks:
            if len(self._broken) > 1:
                self._call.error = _broken(self._broken)
            return False
        if not routing.has_other_than(self._broken):
            return False
        if has_crashed:
            return self._counted(ReplayReason.CRASHED)
        return routing.budget.take(routing.pool.now_us()) and self._counted(ReplayReason.BROKEN)

    async def _has_crashed(self, member: EngineMember | None) -> bool:
        """True if the engine that broke the connection is there no more. One that has gone gets no more requests, so
        there is nothing that the budget would have to bound.
        """
        if self._call.may_run and member is not None and self._is_there(member):
            await member.looked_again(JUDGED_WITHIN_S)
        return member is None or member.is_gone or not self._is_there(member)

    def _is_there(self, member: EngineMember | None) -> bool:
        """True if the incarnation that the request was sent to can still be used."""
        grant = self._lease.grant
        return member is not None and grant is not None and member.id == grant.engine and member.watch.is_usable

    def _counted(self, reason: ReplayReason) -> bool:
        self._routing.replays[self._name, reason] += 1
        self.replay = reason
        return True


class RoutedCall(EngineCall, kw_only=True):
    """The call of one attempt of a route. See `EngineCall`."""

    _route: Route

    def failed(self, error: AdmissionError, *, was_sent: bool) -> bool:
        """See `EngineCall`."""
        self.is_handed_back = self._route.not_answered(error, was_sent=was_sent)
        if not self.is_handed_back:
            return super().failed(error, was_sent=was_sent)
        self.error = error
        return False


def _broken(names: list[str]) -> EngineUnreachable:
    return EngineUnreachable(
        f"{len(names)} engines closed the connection before they answered this request, and it is not sent to another",
        trouble=f"the engines {', '.join(names)} broke off before their first byte",
    )


def _header(message: Message, name: bytes) -> bytes | None:
    return next((value for found, value in message.get("headers", ()) if found.lower() == name), None)
