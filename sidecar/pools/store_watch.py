"""Notices on a pool's store, by how the replica stands with the ledger, and the refusals meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from sidecar.durations import short_duration
from sidecar.errors import StoreUnavailable
from sidecar.events import StoreChanged, StoreObserver, StoreState
from sidecar.policy.model import Policy
from sidecar.policy.rules import largest_admissible
from sidecar.pools.base import Ask, Clock, Lease
from sidecar.pools.calls import ALONE_US, DEAD_US, HEARTBEAT_US, HOLD_US, LAYOUT, EngineView, Reply
from sidecar.pools.engines import EngineOffer, name_and_incarnation, sum_figures
from sidecar.pools.member import Member
from sidecar.pools.member_events import MemberMode
from sidecar.pools.stats import TierUsage
from sidecar.scheduling.amounts import UNBOUNDED

# -- The status of a replica's store, for the readiness page; every change goes to the log and to metrics.

_log = logging.getLogger("sidecar.store")


class StoreStatus:
    """The state, its reason and its age. CONNECTING ends with the first answer, or the first failure.

    `was_reached` says that the store has answered this process at least once: only then can it be lost.
    """

    def __init__(self, pool: str, clock: Clock, observer: StoreObserver | None) -> None:
        self.state = StoreState.CONNECTING
        self.reason = "no attempt has ended yet"
        self.was_reached = False
        self._is_refused = False
        self._pool = pool
        self._clock = clock
        self._observer = observer
        self._since_us = clock()

    @property
    def since_s(self) -> float:
        """The age of the state, in seconds."""
        return (self._clock() - self._since_us) / 1e6

    def state_for_people(self) -> Mapping[str, object]:
        """The status for people and dashboards: JSON types only."""
        state, since_s = self.state.value, round(self.since_s, 3)
        return {
            "state": state,
            "since_s": since_s,
            "reason": self.reason,
            "pool": self._pool,
            "reached": self.was_reached,
        }

    def readiness(self) -> Sequence[str]:
        """Why no request is admitted at present; empty while requests are."""
        if self.state is StoreState.CLOSED and self._is_refused:
            return (f"the pool refuses this process: {self.reason}",)
        if self.state is StoreState.CLOSED and self.was_reached:
            what = "new requests are refused, and only this replica's requests are shown"
            return (f"{self._silent()}: {what} ({self.reason})",)
        if self.state in (StoreState.CLOSED, StoreState.CONNECTING):
            return (f"{self._silent()}: {self.reason}",)
        return ()

    def notices(self, part: str) -> Sequence[str]:
        """Warnings for the operator although requests are being admitted. `part` is this replica's, in words."""
        if self.state is StoreState.WAITING:
            return (f"requests have waited for {short_duration(self.since_s)}: {self.reason}",)
        if self.state is not StoreState.DIVIDED:
            return ()
        what = f"only this replica's requests are shown, its part of the pool is {part}"
        return (f"{self._silent()}: {what} ({self.reason})",)

    def _silent(self) -> str:
        if not self.was_reached:
            return "the store has not been reached yet"
        return f"the store has not answered for {short_duration(self.since_s)}"

    def change(self, state: StoreState, reason: str, *, is_refused: bool = False) -> None:
        """Notes a state, and reports a new one. `is_refused`: the pool is there, and refuses this process."""
        self.reason = reason
        was_refused, self._is_refused = self._is_refused, is_refused
        if is_refused and not was_refused:
            _log.warning("pool %s refuses this process: %s", self._pool, reason, extra=self._fields(state))
        if state is self.state:
            return
        before_s, is_first = self.since_s, self.state is StoreState.CONNECTING
        self.state, self._since_us = state, self._clock()
        if state is StoreState.WAITING:
            _log.warning("pool %s admits nothing yet: %s", self._pool, reason, extra=self._fields(state))
        elif state is not StoreState.SHARED:
            if not is_refused:
                self._log_loss(reason)
        elif not is_first:
            back = "store is back" if self.was_reached else "store is reached"
            text = "%s after %.1f s, pool %s is %s: %s"
            _log.warning(text, back, before_s, self._pool, state.value, reason, extra=self._fields(state))
        self.was_reached = self.was_reached or state in (StoreState.SHARED, StoreState.WAITING)
        if self._observer is not None:
            self._observer(StoreChanged(self._since_us, state, reason))

    def _log_loss(self, reason: str) -> None:
        """Logs that the store is lost, or that it was not there when this process began."""
        if self.was_reached:
            what = f"store lost, pool {self._pool} is {self.state.value}"
        else:
            what = f"the store of pool {self._pool} has not been reached yet"
        _log.warning("%s: %s", what, reason, extra=self._fields(self.state))

    def _fields(self, state: StoreState) -> dict[str, str]:
        """The fields of a log line about the state."""
        return {"event": f"store_{state.value}", "pool": self._pool}


CLOSE_WITHIN_S = 1.0
NO_ANSWER = "no answer in time"
"""The reason of a loss where the link names none: the member gave a call up by its time."""
OTHER_LAYOUT = f"the pool is kept in another layout than {LAYOUT} until the last replica of another version has ended"


class _Outlook:
    """Prospects of requests while the store does not decide, in one loss, one state and by one policy.

    The engines are this replica's parts of them when the others have died; they count where the pool is divided.
    """

    def __init__(self, of: tuple[int | None, StoreState, Policy, list[EngineView]]) -> None:
        self.of = of
        self.is_new = True
        self.is_known_to_all = False
        """Whether all that wait have been judged by it."""
        _, state, policy, self._engines = of
        self._rules = policy.rules_for(*_size(self._engines)) if state is StoreState.DIVIDED else None

    def has_room_for(self, ask: Ask) -> bool:
        """True if engines of these sizes could ever run the request."""
        if self._rules is None:
            return True
        tokens, requests = largest_admissible(self._rules, ask.tier)
        is_within = ask.tokens <= tokens and ask.requests <= requests
        return is_within and any(ask.tokens <= it.tokens and ask.requests <= it.requests for it in self._engines)


class StoreWatch:
    """The state of one replica's store. `name` is the replica's; `observer` is called with every change."""

    def __init__(self, pool: str, tiers: Sequence[str], clock: Clock, observer: StoreObserver | None) -> None:
        self.status = StoreStatus(pool, clock, observer)
        self.decided, self._left = asyncio.Event(), asyncio.Event()
        self.why = NO_ANSWER
        self._pool, self._tiers, self._clock = pool, tiers, clock
        self._held_since_us: int | None = None
        self._entering: list[tuple[int, Lease]] = []
        self._outlook: _Outlook | None = None

    def answered(self, reply: Reply) -> None:
        """The ledger has looked at the requests of its call."""
        self.why = NO_ANSWER  # what ended another call is no reason for the next loss
        now_us = self._clock()
        if not reply.on_hold:
            self._held_since_us = None
        elif self._held_since_us is None:
            self._held_since_us = now_us
        for number, lease in self._entering:
            if number <= reply.number:
                lease.waits()
        self._entering = [(number, lease) for number, lease in self._entering if number > reply.number]

    def enters(self, lease: Lease, number: int, member: Member) -> None:
        """The ledger looks at a new request with the call of this number. Where none is on its way, enough before it
        are shown, and it only waits.
        """
        self._entering.append((number, lease))
        self._let_wait(member)

    def _let_wait(self, member: Member) -> None:
        if self._entering and member.mode is MemberMode.SHARED and not member.is_awaiting:
            for _, lease in self._entering:
                lease.waits()
            self._entering = []

    def forget(self) -> None:
        """The pool begins anew."""
        self.decided, self._left = asyncio.Event(), asyncio.Event()
        self._held_since_us = None
        self._entering.clear()

    async def gone(self, member: Member) -> None:
        """Returns when the store has the goodbye, or cannot within a second."""
        if self.status.state is StoreState.SHARED and not member.is_gone:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._left.wait(), CLOSE_WITHIN_S)

    def look(self, member: Member) -> None:
        """Notes how the member stands with the ledger now."""
        self._let_wait(member)
        if member.is_gone:
            self._left.set()
        state, reason = self.status.state, self.why
        is_refused = False
        if member.mode is MemberMode.SHARED:
            state, reason = StoreState.SHARED, f"{len(member.leases) + member.waiting()} requests of this replica"
            if member.is_foreign and member.pool.reply is not None:
                state, reason, is_refused = StoreState.CLOSED, self._other_tiers(member.pool.reply), True
            elif self._held_since_us is not None and self._clock() - self._held_since_us > HOLD_US + HEARTBEAT_US:
                state, reason = StoreState.WAITING, OTHER_LAYOUT
        elif member.mode is MemberMode.WAITING:
            state, reason = StoreState.WAITING, OTHER_LAYOUT
        elif member.mode is MemberMode.ALONE:
            state = StoreState.DIVIDED
        elif member.mode is MemberMode.JOINING and self._has_been_lost(member):
            state = StoreState.CLOSED
        if state is not StoreState.CONNECTING and member.mode not in (MemberMode.STATING, MemberMode.LOST):
            self.status.change(state, reason, is_refused=is_refused)
        elif state is StoreState.CONNECTING and member.failures:
            self.status.reason = reason
        is_held = self._held_since_us is not None and self._clock() < self._held_since_us + HOLD_US
        if member.failures or member.mode is MemberMode.WAITING or (member.mode is MemberMode.SHARED and not is_held):
            self.decided.set()

    def _has_been_lost(self, member: Member) -> bool:
        """A store that was never reached is lost at the first failure, another when others may go on alone."""
        since_us = member.first_failure_us
        return since_us is not None and (not self.status.was_reached or self._clock() >= since_us + ALONE_US)

    def _other_tiers(self, reply: Reply) -> str:
        theirs, own = ", ".join(tier.tier for tier in reply.tiers), ", ".join(self._tiers)
        return (
            f"pool {self._pool} has the tiers {theirs}, and the policy of this process has {own}; start it with the "
            "pool's tiers, name another pool, end all replicas of the pool first, or take it over with "
            "--take-over-pool"
        )

    # -- without the store

    @property
    def is_away(self) -> bool:
        """True if the ledger looks at no request for now: none may wait for it to be let in or to be refused."""
        return self.status.state in (StoreState.WAITING, StoreState.DIVIDED, StoreState.CLOSED)

    def judged(
        self, waiting: Iterable[Lease], unjudged: Iterable[Lease], policy: Policy, member: Member
    ) -> list[tuple[Lease, StoreUnavailable | None]]:
        """The requests that do not wait for the ledger's look any more, and those refused that cannot be admitted.

        They are those that it has not looked at, and those whose limits are `unjudged` when the outlook has changed.
        All that are `waiting` are among them when they have hoped for the store for as long as other replicas may be
        alive, and again when their outlook has changed since.
        """
        outlook = self._new_outlook(policy, member)
        leases, self._entering = [lease for _, lease in self._entering], []
        is_hopeless = member.first_failure_us is not None and self._clock() >= member.first_failure_us + DEAD_US
        leases += [lease for lease in unjudged if outlook.is_new or lease.is_entering]
        outlook.is_new = False
        if is_hopeless and not outlook.is_known_to_all:
            outlook.is_known_to_all = True
            leases += waiting
        return [(lease, self._refusal_by(outlook, lease.ask, member)) for lease in leases]

    def refusal(self, ask: Ask, policy: Policy, member: Member) -> StoreUnavailable | None:
        """Why a request cannot be admitted as things are; None where it may wait."""
        return self._refusal_by(self._new_outlook(policy, member), ask, member) if self.is_away else None

    def _new_outlook(self, policy: Policy, member: Member) -> _Outlook:
        state = self.status.state
        engines = member.parts(UNBOUNDED) if state is StoreState.DIVIDED else []
        now = member.first_failure_us, state, policy, engines
        if self._outlook is None or self._outlook.of != now:
            self._outlook = _Outlook(now)
        return self._outlook

    def _refusal_by(self, outlook: _Outlook, ask: Ask, member: Member) -> StoreUnavailable | None:
        state = self.status.state
        if state is StoreState.CLOSED and member.is_foreign:
            return self.other_tiers()
        if state is StoreState.CLOSED and not self.status.was_reached:
            why = "the store of this pool has not been reached yet; try again"
        elif state is StoreState.CLOSED:
            why = "the store of this pool cannot be reached; try again"
        elif not outlook.has_room_for(ask):
            why = (
                f"the store of this pool cannot be reached, and this request ({ask.tokens} tokens, {ask.requests} "
                "sequences) does not fit into this replica's part of it; try again, or ask for less output"
            )
        else:
            return None
        return _unavailable(why)

    def other_tiers(self) -> StoreUnavailable:
        """The refusal in a pool that has other tiers."""
        return _unavailable(
            "this replica admits nothing, because its policy and its pool have other tiers; try another replica"
        )

    def state(
        self, member: Member, own: Mapping[str, int], usage: Sequence[TierUsage], round_trips: int
    ) -> Mapping[str, object]:
        """Its part of the pool's state, for people and dashboards: JSON types only."""
        part, reply = self.part(member), member.pool.reply
        found: dict[str, object] = {}
        if self.status.state is StoreState.SHARED:
            found["waiting"] = own["waiting"] + member.others_waiting
            found["leases"] = sum(tier.held_requests for tier in usage)
        found["store"] = {
            **self.status.state_for_people(),
            "replica": member.who,
            "replicas": None if reply is None else reply.alive,
            "own": own,
            "part": None if part is None else dict(zip(("tokens", "requests"), part, strict=True)),
            "round_trips": round_trips,
        }
        return found

    def part(self, member: Member) -> tuple[int | None, int | None] | None:
        """The size of what this replica has for itself now, None for an unbounded one; None where it is not alone.

        Where nothing is admitted without the store it is 0.
        """
        state = self.status.state
        if state is StoreState.DIVIDED:
            return _size(member.parts(self._clock()))
        return (0, 0) if state is StoreState.CLOSED and not member.is_foreign else None


def _unavailable(why: str) -> StoreUnavailable:
    return StoreUnavailable(why, retry_after_s=HEARTBEAT_US / 1e6 * random.uniform(1, 2))


def _size(engines: Sequence[EngineView]) -> tuple[int | None, int | None]:
    """Of all together."""
    return sum_figures([it.tokens for it in engines]), sum_figures([it.requests for it in engines])


class Elsewhere:
    """Findings of other replicas on the engines, passed to this process's own engines when they change."""

    def __init__(self) -> None:
        self.on_incarnation: Callable[[str, int, bool], None] = lambda _, __, ___: None
        self.on_drain: Callable[[str, bool], None] = lambda _, __: None
        self.on_reached: Callable[[Collection[str]], None] = lambda _: None
        self.draining: set[str] = set()
        self._reached: set[str] = set()

    def note_offers(self, member: Member, offers: Sequence[EngineOffer], *, is_first: bool) -> None:
        """The pool has reported its engines; `is_first`: in answer to a statement."""
        engines, words = member.seen()
        latest: dict[str, int] = {}
        for engine in engines:
            name, incarnation = name_and_incarnation(engine.id)
            latest[name] = max(latest.get(name, 0), incarnation)
        for name, own in [name_and_incarnation(offer.id) for offer in offers]:
            if own < latest.get(name, own):
                self.on_incarnation(name, latest[name], not is_first)
        draining = {name for name, word in words.items() if word.is_drained}
        before, self.draining = self.draining, draining
        for name in sorted(before ^ draining):
            self.on_drain(name, name in draining)
        usable = {name_and_incarnation(offer.id)[0] for offer in offers if offer.takes_new}
        reached = {name_and_incarnation(engine.id)[0] for engine in engines if engine.is_ready} - usable
        if reached != self._reached:
            self._reached = reached
            self.on_reached(reached)


# -- A call that an event loop makes when it is due, the soonest of those that were asked for.


class Alarm:
    """Of one pool: `ring` is called on its event loop."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_us = 0
        self._soon: asyncio.Handle | None = None

    def set(self, due_us: int, now_us: int) -> None:
        """Something is due at this moment, perhaps in this tick of the event loop."""
        if due_us <= now_us:
            if self._soon is None:
                self._soon = asyncio.get_running_loop().call_soon(self._ring_soon)
        elif self._timer is None or due_us < self._timer_at_us:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at_us = due_us
            self._timer = asyncio.get_running_loop().call_later((due_us - now_us) / 1e6, self._ring_in_time)

    def stop(self) -> None:
        """Nothing is due any more, or its event loop has ended."""
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self._timer = self._soon = None

    def _ring_soon(self) -> None:
        self._soon = None
        self._ring()

    def _ring_in_time(self) -> None:
        self._timer = None
        self._ring()
