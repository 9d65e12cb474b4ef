"""Engine watch: whether the engine answers, and whether it is the engine that the policy names.

A proxy's engine is asked for its health page every two seconds, which costs requests nothing. A refused connection
means DOWN at once. A slow page or a router's 502, 503 or 504 means DOWN only while nothing else comes from the engine.
Any other response is life: a 404 or a 401, too. While the engine is down it is asked every half second.

An engine that comes up is identified by its pages before any request is sent to it, and again after each time it was
down. Of an app that this process runs only the identity is read: it lives as long as the process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING

from sidecar.engines.base import Engine
from sidecar.engines.discovery import Identity, identify, identify_by_models, identify_by_routes, serves_models
from sidecar.engines.pages import NoAnswer, NotConnected, Page, Unread
from sidecar.errors import LoopDetected

if TYPE_CHECKING:
    from sidecar.middleware.engine_pages import EnginePages

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
    """What is known of the engine. MISMATCH: an engine answers, and it is another one than the policy's."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"
    MISMATCH = "mismatch"


class EngineCheck(str, Enum):
    """What the watch does: liveness and identity, liveness alone, or nothing."""

    ON = "on"
    ALIVE = "alive"
    OFF = "off"


class EngineWatch:
    """One per admission controller, for one event loop from `open` to `close`.

    `expected` is the policy's engine, or another class that drives it. `address` is where a proxy's engine is, None for
    an app in this process. `has_flowed` says whether the engine has sent responses since its last call. `place` names
    the policy's line of the engine. `on_change` are called after each change of the state, in the event loop.
    """

    def __init__(
        self,
        pages: EnginePages,
        expected: type[Engine],
        *,
        address: str | None = None,
        has_flowed: Callable[[], bool] = lambda: False,
        check: EngineCheck = EngineCheck.ON,
        place: Callable[[], str] = lambda: "",
    ) -> None:
        self._pages = pages
        self._expected = expected
        self._address = address
        self._has_flowed = has_flowed
        self._check = check
        self._place = place
        self.state = EngineState.UNKNOWN
        self.reason: str | None = None
        self.since_s = time.monotonic()
        self.on_change: list[Callable[[], None]] = []
        self._failures = 0
        self._identity: Identity | None = None
        self._identified_s = 0.0
        self._has_warned = False
        self._wake = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    @property
    def is_usable(self) -> bool:
        """Whether requests may be sent to the engine. True while nothing is known of it."""
        return self.state is EngineState.UP or self.state is EngineState.UNKNOWN

    @property
    def up(self) -> int | None:
        """1 where the policy's engine answers, 0 where it does not, None where nothing is known: for metrics."""
        return None if self.state is EngineState.UNKNOWN else int(self.is_usable)

    @property
    def for_s(self) -> float:
        """How long the state has lasted, in seconds."""
        return time.monotonic() - self.since_s

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
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following

    def unreachable(self, reason: str) -> None:
        """A request could not connect to the engine: it is down until a probe, which runs at once, says otherwise."""
        if self._is_following():
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
            return (f"the engine does not answer: {self.reason}",)
        return (str(self.reason),) if self.state is EngineState.MISMATCH else ()

    def notices(self) -> Sequence[str]:
        """What the operator should know besides: that it cannot be known which engine answers."""
        return () if self._identity is None or not self._is_unknown(self._identity) else (self._unknown_sentence(),)

    def document(self) -> Mapping[str, object]:
        """The state, for people and dashboards: JSON types only."""
        found = None if self._identity is None or self.state is EngineState.DOWN else self._identity.engine
        return {
            "state": self.state.value,
            "reason": self.reason,
            "for_s": round(self.for_s, 3),
            "answers": None if found is None else found.name,
            "check": self._check.value,
        }

    # -- liveness

    def _is_following(self) -> bool:
        """Whether the engine is watched in this event loop: one that has ended watches no more."""
        return self._following is not None and self._following.get_loop() is asyncio.get_running_loop()

    async def _follow(self) -> None:
        while True:
            is_calm = self.state is EngineState.UP and self._failures == 0
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), PROBE_EVERY_S if is_calm else RETRY_EVERY_S)
            self._wake.clear()
            await self._look_safely()

    async def _look_safely(self) -> None:
        try:
            await self._look()
        except Exception:
            _log.exception("a defect in the sidecar; the engine was not looked at", extra={"event": "defect"})

    async def _look(self) -> None:
        try:
            page = await self._get_health()
            if page.status == LoopDetected.status:
                raise NoAnswer(
                    f"{self._address} leads back to the sidecar that asks; give --upstream the engine's address"
                )
            if page.status in UNREACHABLE_STATUSES:
                raise Unread(f"GET {self._expected.health_page} answered {page.status}")
            await self._identify()
        except NotConnected as trouble:
            self._failures = SLOW_PROBES
            self._down(str(trouble))
        except Unread as trouble:
            self._failed(str(trouble))
        else:
            self._failures = 0

    async def _get_health(self) -> Page:
        within_s = ANSWER_WITHIN_S if self.state is EngineState.UP else COMES_WITHIN_S
        return await self._pages.get(self._expected.health_page, within_s=within_s)

    def _failed(self, trouble: str) -> None:
        """Counts a failure that a busy engine may cause, unless it sends responses all the same."""
        self._failures = 0 if self._has_flowed() else self._failures + 1
        if self.state is not EngineState.UP or self._failures >= SLOW_PROBES:
            self._down(trouble)

    def _down(self, reason: str) -> None:
        is_news = self.state is not EngineState.DOWN or reason != self.reason
        self._identified_s = 0.0
        self._change(EngineState.DOWN, reason)
        if is_news:
            _log.warning("the engine does not answer: %s", reason, extra={"event": "engine_down"})

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
        """The same for an app in this process, whose routes say most; its other pages may be anything."""
        identity = identify_by_routes(self._pages.host)
        if identity is None and serves_models(self._pages.host):
            with suppress(Unread):
                identity = await identify_by_models(self._pages)
        if identity is None or identity.engine is None:
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
            f"{self._expected.name}{self._place()}; write engine: {found.name}"
            + ("" if self._address is None else f", or give --upstream the address of a {self._expected.title}")
        )
        is_news = sentence != self.reason
        self._change(EngineState.MISMATCH, sentence)
        if is_news:
            _log.error("%s", sentence, extra={"event": "engine_mismatch"})

    def _is_there(self) -> None:
        before, reason = self.state, self.reason
        self._change(EngineState.UP, None)
        if before is not EngineState.UP and reason is not None:
            _log.warning("the engine answers again: %s", self._address, extra={"event": "engine_up"})

    def _is_unknown(self, identity: Identity) -> bool:
        return identity.engine is None and self._expected.is_recognizable()

    def _unknown_sentence(self) -> str:
        return (
            f"no page of {self._address} says which engine answers there; the policy's {self._expected.name} is used "
            "as it is (sidecar doctor can try whether priorities work)"
        )

    def _change(self, state: EngineState, reason: str | None) -> None:
        if state is self.state:
            self.reason = reason
            return
        self.state, self.reason, self.since_s = state, reason, time.monotonic()
        for changed in self.on_change:
            changed()
