"""Engine watch: whether the engine answers, and whether it is the engine that the policy names.

A proxy's engine is asked for its health page every two seconds, which costs requests nothing. A refused connection
means DOWN at once. A slow page or a router's 502, 503 or 504 means DOWN only while nothing else comes from the engine.
Any other response is life: a 404 or a 401, too. While the engine is down it is asked every half second.

An engine that comes up is identified by its pages before any request is sent to it, and again after each time it was
down. Of an app that this process runs only the identity is read: it lives as long as the process.

Each engine of a fleet has a watch of its own, with the policy's figures (`Health`). There a request that is
refused makes the engine suspect, and the next probe decides. A slow page means DOWN only where the fleet allows it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Protocol

from sidecar.engines.base import Engine
from sidecar.engines.discovery import Identity, identify, identify_by_models, identify_by_routes, serves_models
from sidecar.engines.pages import REFUSED, Health, NoAnswer, NotConnected, Page, Pages, TooSlow, Unread
from sidecar.errors import LoopDetected
from sidecar.tasks import end, is_set_within

PROBE_EVERY_S = 2.0
RETRY_EVERY_S = 0.5
"""While the engine is down, or after a failure: an engine that is back gets requests this soon."""
ANSWER_WITHIN_S = 2.0
"""A health page takes milliseconds. A busy engine may take seconds, and is not down for that: see `SLOW_PROBES`."""
COMES_WITHIN_S = 5.5
"""The same while the engine is down: a page that is slow, but there, ends that. Longer than the proxy waits to
connect: its words say more."""
SLOW_PROBES = 3
"""So many failures in a row, while nothing else comes from the engine, mean that it is down."""
IDENTIFY_EVERY_S = 30.0
"""An engine that is replaced between two probes is noticed after this time at most."""
UNREACHABLE_STATUSES = frozenset((502, 503, 504))
"""From a router before an engine that is away, or from an engine whose core has died."""

_log = logging.getLogger("sidecar.engine")


class EngineState(str, Enum):
    """State of the engine, as far as it is known. MISMATCH: an engine answers, and it is another one than the
    policy's.
    """

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"
    MISMATCH = "mismatch"


class OutageCause(str, Enum):
    """Why no request is sent to an engine: nothing listens there, no connection can be made for another reason, its
    pages are slow, they are errors, or it is another engine than the policy's.
    """

    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    SLOW = "slow"
    ERROR = "error"
    MISMATCH = "mismatch"


ENGINE_CHECK_VARIABLE = "SIDECAR_ENGINE_CHECK"
"""`on`, `alive` (any engine may answer) or `off` (the engine is not asked at all). See docs/how-it-works.md."""


class EngineCheck(str, Enum):
    """Subject of the watch: liveness and identity, liveness alone, or nothing."""

    ON = "on"
    ALIVE = "alive"
    OFF = "off"


class EngineHealth:
    """Health of an engine, or of several: can requests be sent? `state`, and since when, by the monotonic clock.

    `on_change` are called after each change of the state, in the event loop.
    """

    def __init__(self) -> None:
        self.state = EngineState.UNKNOWN
        self.since_s = time.monotonic()
        self.on_change: list[Callable[[], None]] = []

    @property
    def reason(self) -> str | None:
        """Why no request can be sent; None where one can."""
        return "; ".join(self.readiness()) or None

    @property
    def is_usable(self) -> bool:
        """True if requests may be sent. True while nothing is known."""
        return self.state is EngineState.UP or self.state is EngineState.UNKNOWN

    @property
    def up(self) -> int | None:
        """1 where requests can be sent, 0 where they cannot, None where nothing is known: for metrics."""
        return None if self.state is EngineState.UNKNOWN else int(self.is_usable)

    @property
    def for_s(self) -> float:
        """How long the state has lasted, in seconds."""
        return time.monotonic() - self.since_s

    async def open(self) -> None:
        """Looks once, then begins to watch. It does not raise."""

    async def close(self) -> None:
        """Ends the watching."""

    def readiness(self) -> Sequence[str]:
        """Reasons why no request can be sent; empty where there is none."""
        return ()

    def notices(self) -> Sequence[str]:
        """Further sentences for the operator."""
        return ()

    def document(self) -> Mapping[str, object]:
        """The state, for people and dashboards: JSON types only."""
        return {"state": self.state.value, "reason": self.reason, "for_s": round(self.for_s, 3)}

    def _changed(self) -> None:
        for changed in list(self.on_change):
            changed()


class WatchedPages(Pages, Protocol):
    """Pages that are asked for often, and so for a time that their reader chooses."""

    async def get(self, path: str, *, within_s: float = ANSWER_WITHIN_S) -> Page:
        """See `Pages.get`. An engine that has not answered after `within_s` seconds is too slow."""


class EngineWatch(EngineHealth):
    """One per engine, for one event loop from `open` to `close`.

    `expected` is the policy's engine, or another class that drives it. `address` is where a proxy's engine is, None for
    an app in this process. `has_flowed` says whether the engine has sent responses since its last call. `place` names
    the policy's line of the engine.

    The rest is for an engine of a fleet. `health` has the policy's figures, `who` names the engine in the log, and
    `may_eject_slow` says whether this engine may be down for being slow. `is_suspect` says that the engine is down
    because a request could not connect, and no probe has looked since; `cause` why it is, or last was, not usable.
    `was_refused` stays set after a connection was refused, because another process may answer now, until the fleet has
    looked at that. A lost packet or a name that cannot be resolved says nothing of the process.
    """

    reason: str | None = None

    def __init__(
        self,
        pages: WatchedPages,
        expected: type[Engine],
        *,
        address: str | None = None,
        has_flowed: Callable[[], bool] = lambda: False,
        check: EngineCheck = EngineCheck.ON,
        place: Callable[[], str] = lambda: "",
        health: Health | None = None,
        who: str = "the engine",
        may_eject_slow: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__()
        self._pages = pages
        self._expected = expected
        self._address = address
        self._has_flowed = has_flowed
        self._check = check
        self._place = place
        self._health = health
        self._who = who
        self._may_eject_slow = may_eject_slow
        self.is_suspect = self.was_refused = False
        self.cause: OutageCause | None = None
        self._slowness: str | None = None
        self._failures = 0
        self._passes = 0
        self._identity: Identity | None = None
        self._identified_s = 0.0
        self._has_warned = False
        self._wake = asyncio.Event()
        self._looks_begun = 0
        self._awaited: list[tuple[int, asyncio.Future[None]]] = []
        self._following: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Looks at the engine once, then begins to watch it. The server's start calls it. It does not raise."""
        if self._check is EngineCheck.OFF:
            return
        if self._address is None:
            if self._check is EngineCheck.ON:
                await self._identify_app()
        elif not self._is_following():
            self._wake = asyncio.Event()
            await self._look_safely()
            self._following = asyncio.get_running_loop().create_task(self._follow(), name="sidecar engine")

    async def close(self) -> None:
        """Ends the watching. Nothing is known of the engine any more."""
        following, self._following = self._following, None
        if following is not None and following.get_loop() is asyncio.get_running_loop():
            await end(following)
        self._end_awaited(self._looks_begun + 1)

    async def looked_again(self, within_s: float) -> bool:
        """Looks at once. False where that takes longer than `within_s` seconds, or the engine is not watched."""
        if not self._is_following():
            return False
        looked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.append((self._looks_begun + 1, looked))
        self._wake.set()
        await asyncio.wait((looked,), timeout=within_s)
        return looked.done()

    def change_health(self, health: Health) -> None:
        """A fleet's engine is probed by other figures from the next probe on."""
        self._health = health

    def unreachable(self, reason: str) -> None:
        """A request could not connect to the engine: it is down until a probe, which runs at once, says otherwise."""
        if self._is_following():
            self.is_suspect |= self.state is not EngineState.DOWN
            self._not_connected(reason)
            self._passes = 0
            self._change(EngineState.DOWN, reason)
            self._wake.set()

    def request_failed(self, reason: str | None) -> None:
        """The engine failed a request. `reason` says why no connection could be made; None where there was one."""
        if reason is not None:
            self.unreachable(reason)
        else:
            self._wake.set()

    def readiness(self) -> Sequence[str]:
        """Reasons why no request can be sent to the engine; empty where there is none."""
        if self.state is EngineState.DOWN:
            return (f"{self._who} does not answer: {self.reason}",)
        return (str(self.reason),) if self.state is EngineState.MISMATCH else ()

    def notices(self) -> Sequence[str]:
        """Further sentence for the operator: that it cannot be known which engine answers."""
        found = [] if self._identity is None or not self._is_unknown(self._identity) else [self._unknown_sentence()]
        if self._slowness is not None and self.state is EngineState.UP:
            found.append(self._slow_sentence())
        return tuple(found)

    def _slow_sentence(self) -> str:
        return (
            f"{self._who} is slow ({self._slowness}), and is used all the same: without it more than half of the "
            "engines would be out of use"
        )

    def document(self) -> Mapping[str, object]:
        """See `EngineHealth`."""
        found = None if self._identity is None or self.state is EngineState.DOWN else self._identity.engine
        return {
            **super().document(),
            "answers": None if found is None else found.name,
            "check": self._check.value,
        }

    # -- liveness

    def _is_following(self) -> bool:
        """True if the engine is watched in this event loop: one that has ended watches no more."""
        return self._following is not None and self._following.get_loop() is asyncio.get_running_loop()

    async def _follow(self) -> None:
        while True:
            await is_set_within(self._wake, self._pause_s())
            self._wake.clear()
            await self._look_safely()

    def _pause_s(self) -> float:
        is_calm = self.state is EngineState.UP and self._failures == 0
        if self._health is None:
            return PROBE_EVERY_S if is_calm else RETRY_EVERY_S
        # The probes of many engines do not stay at one moment.
        every_s = self._health.every_s * random.uniform(0.8, 1)
        return every_s if is_calm else min(every_s, RETRY_EVERY_S)

    async def _look_safely(self) -> None:
        self._looks_begun += 1
        try:
            await self._look()
        except Exception:
            _log.exception("a defect in the sidecar; the engine was not looked at", extra={"event": "defect"})
        if self._awaited:
            self._end_awaited(self._looks_begun)

    def _end_awaited(self, look: int) -> None:
        for wanted, looked in self._awaited:
            if wanted <= look and not looked.done():
                looked.set_result(None)
        self._awaited = [pair for pair in self._awaited if not pair[1].done()]

    async def _look(self) -> None:
        try:
            page = await self._get_health()
            if page.status == LoopDetected.status:
                remedy = "give --upstream" if self._health is None else "name"
                raise NoAnswer(f"{self._address} leads back to the sidecar that asks; {remedy} the engine's address")
            if page.status in UNREACHABLE_STATUSES:
                raise Unread(f"GET {self._health_page} answered {page.status}")
            await self._passed()
        except NotConnected as trouble:
            self._failures = self._most_failures
            self._not_connected(str(trouble))
            self._down(str(trouble))
        except Unread as trouble:
            self._failed(str(trouble), is_slow=isinstance(trouble, TooSlow))
        else:
            self._failures, self._slowness = 0, None

    async def _passed(self) -> None:
        """A probe has passed: the engine is up, but a fleet's engine that was down only after several."""
        self._passes += 1
        is_risen = self._health is None or self._passes >= self._health.rise
        if self.state is EngineState.DOWN and not self.is_suspect and not is_risen:
            return
        await self._identify()

    @property
    def _health_page(self) -> str:
        return self._expected.health_page if self._health is None else self._health.path

    @property
    def _most_failures(self) -> int:
        return SLOW_PROBES if self._health is None else self._health.fail

    async def _get_health(self) -> Page:
        within_s = ANSWER_WITHIN_S if self.state is EngineState.UP else COMES_WITHIN_S
        return await self._pages.get(self._health_page, within_s=within_s)

    def _not_connected(self, reason: str) -> None:
        self.was_refused |= reason.startswith(REFUSED)
        self.cause = OutageCause.REFUSED if reason.startswith(REFUSED) else OutageCause.UNREACHABLE

    def _failed(self, trouble: str, *, is_slow: bool) -> None:
        """Counts a failure that a busy engine may cause, unless it sends responses all the same."""
        self._failures = 0 if self._has_flowed() else self._failures + 1
        if self.state is EngineState.UP:
            if self._failures < self._most_failures:
                return
            if is_slow and not self._may_eject_slow():
                is_news, self._slowness = self._slowness is None, trouble
                if is_news:
                    _log.warning("%s", self._slow_sentence(), extra={"event": "engine_slow"})
                return
        self.cause = OutageCause.SLOW if is_slow else OutageCause.ERROR
        self._down(trouble)

    def _down(self, reason: str) -> None:
        was_suspect, self.is_suspect = self.is_suspect, False
        is_news = was_suspect or self.state is not EngineState.DOWN or reason != self.reason
        self._identified_s = 0.0
        self._passes = 0
        self._change(EngineState.DOWN, reason, is_news=was_suspect)
        if is_news:
            _log.warning("%s does not answer: %s", self._who, reason, extra={"event": "engine_down"})

    # -- identity

    async def _identify(self) -> None:
        """Reads which engine answers, where that is due. Raises Unread."""
        is_due = time.monotonic() - self._identified_s >= IDENTIFY_EVERY_S
        if self._check is EngineCheck.ALIVE or (self.state is EngineState.UP and not is_due):
            self._is_there()
            return
        if self.state is EngineState.UP:
            identity = await identify_by_models(self._pages)
            if identity.engine is None:  # as it was: only another engine's name is news
                identity = self._identity or identity
        else:
            # The figures on trtllm-serve's /metrics can be read once only.
            identity = await identify(self._pages, reads_metrics=self._expected.metrics_page == "/metrics")
        self._identified_s = time.monotonic()
        self._judge(identity)

    async def _identify_app(self) -> None:
        """Identifies an app in this process, whose routes say most; its other pages may be anything."""
        identity = identify_by_routes(self._pages.host)
        if identity is None and serves_models(self._pages.host):
            with suppress(Unread):
                identity = await identify_by_models(self._pages)
        if identity is None or identity.engine is None:
            if self._expected.is_recognizable():  # not `engine: none`, which expects no name
                known = "the app in this process names no engine; the policy's %s is used"
                _log.info(known, self._expected.name, extra={"event": "engine_unknown"})
            return
        self._judge(identity)

    def _judge(self, identity: Identity) -> None:
        self._identity = identity
        found = identity.engine
        if found is not None and not self._expected.may_be(found):
            self._mismatch(identity, found)
            return
        if self._is_unknown(identity) and not self._has_warned:
            self._has_warned = True
            _log.warning("%s", self._unknown_sentence(), extra={"event": "engine_unknown"})
        self._is_there()

    def _mismatch(self, identity: Identity, found: type[Engine]) -> None:
        where = "this app" if self._address is None else self._address
        sentence = (
            f"{where} is {found.title} ({identity.where} says so), but the policy says engine: "
            f"{self._expected.name}{self._place()}; {self._remedy(found)}"
        )
        is_news = sentence != self.reason
        self.cause = OutageCause.MISMATCH
        self._change(EngineState.MISMATCH, sentence)
        if is_news:
            _log.error("%s", sentence, extra={"event": "engine_mismatch"})

    def _remedy(self, found: type[Engine]) -> str:
        if self._health is not None:
            return f"a pool has engines of one kind: remove this one, or name a {self._expected.title}"
        other = "" if self._address is None else f", or give --upstream the address of a {self._expected.title}"
        return f"write engine: {found.name}{other}"

    def _is_there(self) -> None:
        before, reason = self.state, self.reason
        self._change(EngineState.UP, None)
        if before is not EngineState.UP and reason is not None:
            _log.warning("%s answers again: %s", self._who, self._address, extra={"event": "engine_up"})

    def _is_unknown(self, identity: Identity) -> bool:
        return identity.engine is None and self._expected.is_recognizable()

    def _unknown_sentence(self) -> str:
        return (
            f"no page of {self._address} says which engine answers there; the policy's {self._expected.name} is used "
            "as it is (sidecar doctor can try whether priorities work)"
        )

    def _change(self, state: EngineState, reason: str | None, *, is_news: bool = False) -> None:
        """`is_news`: an engine that was suspect is known to be down now."""
        if state is not EngineState.DOWN:
            self.is_suspect = False
        if state is self.state:
            self.reason = reason
            if not is_news:
                return
        else:
            self.state, self.reason, self.since_s = state, reason, time.monotonic()
        self._changed()
