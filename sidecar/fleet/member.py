"""One engine of a fleet: its connections, its health, its size, and the requests of this process that it serves.

An incarnation is one life of an engine. A connection that was refused and then made again is a new one, unless the
engine's own metrics say that its process is the same; a process that started later is a new one in any case. A new
incarnation starts slowly and is not drained.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from sidecar.admission.engine_pages import ANSWER_WITHIN_S, EnginePages
from sidecar.engines.pages import Page, Unread
from sidecar.engines.watch import EngineWatch, OutageCause
from sidecar.policy.fleet import EngineAddress, offered
from sidecar.pools.engine_reader import HELD_BACK_S, READ_EVERY_S, EngineReader, Size
from sidecar.pools.engines import EngineOffer
from sidecar.proxy.proxy import ReverseProxy
from sidecar.tasks import end

if TYPE_CHECKING:
    from sidecar.fleet.fleet import Fleet

FIRST_CAP_S = 0.1
"""So soon an engine that refused a request is tried again, in a long Retry-After, too: it may refuse that one alone."""
READS_A_SECOND = 16
"""Readings of capacity by a whole fleet: one costs about a millisecond. Each engine is read so much less often."""
SAME_START_S = 2.0
"""Two readings of one process's start differ by less: a machine's clock may be set meanwhile."""

MOST_STARTS, WITHIN_S = 5, 60.0
"""No process starts so often without a refused connection: what the metrics call its start is something else."""

_START = re.compile(r"^process_start_time_seconds(?:\{[^}\n]*\})? ([0-9.eE+]+)", re.MULTILINE)
_log = logging.getLogger("sidecar.fleet")


class MemberState(str, Enum):
    """State of an engine as people see it. It gets new requests while it is ready, starting or capped.

    STARTING: slow start. CAPPED: it answered that it is full. SUSPECT: it refused a connection, and a probe decides.
    GONE: discovery names it no more. UNREACHABLE: other replicas can use it, this one cannot.
    """

    READY = "ready"
    STARTING = "starting"
    CAPPED = "capped"
    SUSPECT = "suspect"
    DOWN = "down"
    DRAINING = "draining"
    GONE = "gone"
    UNREACHABLE = "unreachable"


class EngineMember:
    """One engine at one address, from the answer of discovery that names it to the end of its last request.

    `in_flight` counts the admitted requests that this process has sent to it, `open_requests` all of them,
    `ejections` how often it went out of use, by cause, and `preemptions` how often the engine has preempted a running
    request since it was first read. `is_reached_elsewhere` says that other replicas can use it. It
    is full, by its own word, until `capped_until_us`. Raises ValueError for an invalid address.
    """

    def __init__(self, address: EngineAddress, owner: Fleet, engine_key: str | None = None) -> None:
        self.address = address
        self.in_flight = 0
        self.ejections: Counter[OutageCause] = Counter()
        self.is_draining = self.is_gone = self.is_reached_elsewhere = False
        self.capped_until_us = self.since_us = 0
        self._capped_since_us, self._cap_s = 0, 0.0
        self._owner = owner
        self.open_requests = 0
        self._ramps = self._is_up = self._was_up = False
        self._started_s: float | None = None
        self._seen_starts: deque[float] = deque(maxlen=MOST_STARTS)
        self._emptied = asyncio.Event()
        self._turned = asyncio.Event()
        self._has_looked = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._comparing: asyncio.Task[None] | None = None
        self._old_readers: list[EngineReader] = []
        self.preemptions = 0
        self._preemptions_read = 0
        self.proxy = ReverseProxy(address.url)
        self.proxy.siblings = lambda: [one.proxy.upstream for one in owner.members()]
        self.incarnation = owner.next_incarnation(address.name)
        self.pages = _PagesWithStart(self.proxy, engine_key, owner.engine.metrics_page)
        self.watch = EngineWatch(
            self.pages,
            owner.engine,
            address=self.proxy.upstream.url,
            has_flowed=self.proxy.traffic.has_flowed,
            check=owner.check,
            health=owner.policy.health,
            who=f"engine {address.name}",
            may_eject_slow=lambda: owner.may_eject_slow(self),
        )
        self.watch.on_change.append(self._turn)
        self.proxy.on_failure = self.watch.request_failed
        self.reader = self._reader()

    def __repr__(self) -> str:
        return f"Member({self.id!r}, {self.state.value}, in_flight={self.in_flight})"

    @property
    def name(self) -> str:
        """The operator's name, or the address."""
        return self.address.name

    @property
    def id(self) -> str:
        """The engine id: `name#incarnation`."""
        return f"{self.address.name}#{self.incarnation}"

    @property
    def is_up(self) -> bool:
        """True if the engine can be used, as far as its answers say."""
        return self._is_up and self.watch.is_usable

    @property
    def takes_new(self) -> bool:
        """True if the pool may place requests here."""
        return self.is_up and self.size is not None and not self.is_draining and not self.is_gone

    @property
    def size(self) -> Size | None:
        """Tokens and requests; None while the engine has not reported them."""
        capacity = self.address.capacity
        if capacity.is_read:
            return None if self.reader is None else self.reader.size
        return capacity.tokens, capacity.requests

    @property
    def state(self) -> MemberState:
        """The state, as people see it."""
        if self.is_gone:
            return MemberState.GONE
        if self.is_up and self.size is not None:
            return self._state_of_usable()
        if self.watch.is_suspect:
            return MemberState.SUSPECT
        return MemberState.UNREACHABLE if self.is_reached_elsewhere else MemberState.DOWN

    @property
    def reason(self) -> str | None:
        """Why the engine gets no new requests; None where it does, or where its state says all."""
        if self.is_gone or self.takes_new or self.state is MemberState.DRAINING:
            return None
        if self.is_up and self.reader is not None:
            return f"it has not reported its capacity yet: {self.reader.trouble}"
        return self.watch.reason or "it has not answered yet"

    def offer(self) -> EngineOffer | None:
        """Offer of this engine to the pool; None while the engine's size is not known."""
        if self.size is None:
            return None
        tokens, requests = map(offered, self.size)
        address, ramp_us = self.address, self._ramp_us
        return EngineOffer(
            self.id, tokens, requests, address.prefill, address.speed, self.takes_new, ramp_us,
            self.since_us if ramp_us else 0,
        )  # fmt: skip

    def open(self) -> None:
        """Begins to watch the engine, in this event loop."""
        self._following = asyncio.get_running_loop().create_task(self._follow(), name=f"sidecar {self.name}")

    async def looked(self) -> None:
        """Returns after the first look at the engine, or after the end of the watching."""
        await self._has_looked.wait()

    async def looked_again(self, within_s: float) -> None:
        """Looks at once whether the engine answers, and whether another process does, for so many seconds at most."""
        if not await self.watch.looked_again(within_s) or not self._is_up or self._started_s is None:
            return
        if self._comparing is None or self._comparing.done():  # one answer is enough for all that ask
            self._comparing = asyncio.get_running_loop().create_task(self._compare_start(within_s))
        await asyncio.wait((self._comparing,))

    async def stop_watching(self) -> None:
        """Probes and reads the engine no more."""
        following, comparing = self._following, self._comparing
        self._following = self._comparing = None
        for task in (following, comparing):
            if task is not None:
                await end(task)
        self._has_looked.set()
        await self.watch.close()
        for reader in (*self._old_readers, self.reader):
            if reader is not None:
                await reader.close()

    async def close(self) -> None:
        """Ends the watching, and closes the connections."""
        await self.stop_watching()
        await self.proxy.close()

    async def emptied(self) -> None:
        """Returns when no request of this process is under way there."""
        while self.open_requests:
            self._emptied.clear()
            await self._emptied.wait()

    async def serve(self, scope: Scope, receive: Receive, send: Send, *, is_admitted: bool) -> None:
        """Serves one request at this engine."""
        self.open_requests += 1
        self.in_flight += is_admitted
        try:
            await self.proxy(scope, receive, send)
        finally:
            self.open_requests -= 1
            self.in_flight -= is_admitted
            if not self.open_requests:
                self._emptied.set()

    # -- what others know and want

    def change_address(self, address: EngineAddress) -> None:
        """Takes over another capacity, bound or speed of the same engine at the same address."""
        before, self.address = self.address.capacity, address
        if address.capacity.is_read and self.reader is not None:
            self.reader.change_capacity(address.capacity)
        elif before != address.capacity:
            if self.reader is not None:
                self.reader.on_preemptions = None  # the new reader's count begins at 0
                self._old_readers.append(self.reader)
            self.reader = self._reader()
            self._is_up = self._is_up and self.reader is None
            self._turned.set()
        self._owner.report()

    def drain(self) -> None:
        """Takes no new requests until `resume`, or until the engine is a new incarnation."""
        if not self.is_draining:
            drains = "engine %s drains: it gets no new requests, and serves the %d that it has from this process"
            _log.warning(drains, self.id, self.in_flight, extra={"event": "engine_draining"})
        self.is_draining = True
        self._owner.report()

    def resume(self) -> None:
        """Ends `drain`."""
        if self.is_draining:
            _log.warning("engine %s drains no more", self.id, extra={"event": "engine_resumed"})
        self.is_draining = False
        self._owner.report()

    def leave(self) -> None:
        """Discovery names the engine no more: it serves what it has."""
        self.is_gone = True
        self._owner.report()

    def cap(self, for_s: float) -> None:
        """The engine is full. The pool bounds its requests; this is what people see."""
        self.capped_until_us = max(self.capped_until_us, self._owner.now_us() + round(for_s * 1e6))
        self._owner.report()

    def refused(self, retry_after_s: float) -> float:
        """The engine says that it is full. Returns for how long it gets no more requests than it runs.

        At most as long as it says, and `FIRST_CAP_S` at first. That doubles each time that it refuses again and
        answered none in between.
        """
        now_us = self._owner.now_us()
        if now_us >= self.capped_until_us:
            self._capped_since_us = now_us
            self._cap_s *= 2
        self._cap_s = self._cap_s or FIRST_CAP_S
        for_s = min(self._cap_s, retry_after_s)
        self.cap(for_s)
        return for_s

    def answered(self, sent_us: int) -> None:
        """The engine answers a request that was sent to it then."""
        if sent_us > self._capped_since_us:
            self._cap_s = 0.0

    def adopt(self, incarnation: int, *, is_restart: bool) -> None:
        """Other replicas know the engine as this incarnation. A smaller number changes nothing.

        `is_restart`: they have seen it restart just now, which this process does not report once more.
        """
        if incarnation <= self.incarnation:
            return
        if is_restart:
            self.watch.was_refused, self._started_s = False, None
            self._become(incarnation)
        else:
            self.incarnation = incarnation
            self._owner.report()

    def document(self) -> Mapping[str, object]:
        """The engine, for people and dashboards: JSON types only."""
        size = self.size or (None, None)
        return {
            "name": self.name,
            "id": self.id,
            "url": self.address.url,
            "state": self.state.value,
            "reason": self.reason,
            "for_s": round(self.watch.for_s, 3),
            "tokens": size[0],
            "requests": size[1],
            "speed": self.address.speed / 1000,
            "in_flight": self.in_flight,
            "draining": self.is_draining,
            "ejections": {cause.value: count for cause, count in sorted(self.ejections.items())},
        }

    def notices(self) -> Sequence[str]:
        """Notices for the operator, one sentence each."""
        if self.is_gone:
            return ()
        found = list(self.watch.notices()) if self.is_up else []
        if self.reason is not None:
            found.append(f"engine {self.name} gets no requests ({self.state.value}): {self.reason}")
        if self.pages.ignores_starts:
            found.append(
                f"engine {self.name} says another process_start_time_seconds again and again, which is ignored: only a "
                "refused connection shows that it restarted"
            )
        if self.is_up and self.reader is not None and self.reader.notice is not None:
            found.append(self.reader.notice)
        return found

    # -- following the engine

    @property
    def _ramp_us(self) -> int:
        return round(self._owner.policy.slow_start_s * 1e6) if self._ramps else 0

    def _state_of_usable(self) -> MemberState:
        now_us = self._owner.now_us()
        if self.is_draining:
            return MemberState.DRAINING
        if now_us < self.capped_until_us:
            return MemberState.CAPPED
        is_starting = now_us < self.since_us + self._ramp_us
        return MemberState.STARTING if is_starting else MemberState.READY

    def _reader(self) -> EngineReader | None:
        capacity, owner = self.address.capacity, self._owner
        if not capacity.is_read:
            return None
        reader = EngineReader(
            owner.engine,
            capacity,
            self.pages,
            owner.now_us,
            resized=self._resized,
            was_read=self._was_read,
            read_every_s=max(READ_EVERY_S, len(owner.discovery.engines) / READS_A_SECOND),
            who=f"engine {self.name}",
            unread="it gets no requests",
        )
        self._preemptions_read, reader.on_preemptions = 0, self._preempted
        return reader

    def _preempted(self, total: int, now_us: int) -> None:
        self.preemptions += total - self._preemptions_read
        self._preemptions_read = total
        self._owner.on_preemptions(self.name, self.preemptions, now_us)

    def _turn(self) -> None:
        """The watch's state has changed."""
        was_up, self._is_up = self._is_up, self._is_up and self.watch.is_usable
        if was_up and not self._is_up and self.watch.cause is not None:
            self.ejections[self.watch.cause] += 1
        self._turned.set()
        self._owner.report()

    async def _follow(self) -> None:
        await self.watch.open()
        while True:
            self._turned.clear()
            try:
                await self._look()
            except Exception:
                _log.exception("a defect in the sidecar; engine %s", self.name, extra={"event": "defect"})
            self._has_looked.set()
            await self._turned.wait()

    async def _look(self) -> None:
        """Does what the watch's state calls for: the engine is read only while it answers."""
        while self._old_readers:
            await self._old_readers.pop().close()
        reader = self.reader
        if reader is not None and not self.watch.is_usable:
            await reader.close()
        if self._is_up or not self.watch.is_usable:
            return
        if reader is not None:
            await reader.open()  # its size, and when its process started
        if self.watch.is_usable and reader is self.reader:
            self._came_up()

    def _came_up(self) -> None:
        is_new = self._has_restarted()
        self.watch.was_refused, self._is_up = False, True
        if is_new:
            self._become(self._owner.next_incarnation(self.name))
        elif not self._was_up:
            self._begin()
        self._was_up = True
        self._owner.report()

    def _has_restarted(self) -> bool:
        """True if the engine that answers now may be another process than the one before."""
        before, self._started_s = self._started_s, self.pages.started_s or self._started_s
        if not self._was_up:
            return False
        if before is not None and self.pages.started_s is not None:
            return self.pages.started_s > before + SAME_START_S
        return self.watch.was_refused

    async def _compare_start(self, within_s: float) -> None:
        with suppress(Unread):
            await self.pages.get(self._owner.engine.metrics_page, within_s=within_s)
            self._compare()

    def _compare(self) -> None:
        if not self._is_up or not self._has_restarted():
            return
        if not self.watch.was_refused and self._starts_too_often():
            # Each incarnation has a ledger of its own: the engine would get more and more than it can hold.
            self.pages.ignores_starts, self._started_s = True, None
            return
        self._become(self._owner.next_incarnation(self.name))

    def _starts_too_often(self) -> bool:
        now_s = time.monotonic()
        is_often = len(self._seen_starts) == MOST_STARTS and now_s - self._seen_starts[0] < WITHIN_S
        self._seen_starts.append(now_s)
        return is_often

    def _begin(self) -> None:
        """The engine is used for the first time: slowly, unless it was there before this process."""
        now_us = self._owner.now_us()
        self.since_us, self._ramps = now_us, not self._owner.is_starting
        age_s = None if self._started_s is None else time.time() - self._started_s
        if self._owner.is_starting and age_s is not None and 0 <= age_s < self._owner.policy.slow_start_s:
            self.since_us, self._ramps = now_us - round(age_s * 1e6), True

    def _become(self, incarnation: int) -> None:
        before, self.incarnation = self.id, incarnation
        self.is_draining = False
        self._cap_s = 0.0
        self.capped_until_us, self.since_us, self._ramps = 0, self._owner.now_us(), True
        _log.warning("engine %s restarted, and is now %s", before, self.id, extra={"event": "engine_restarted"})
        self._owner.restarted(self)
        self._owner.report()

    async def _resized(self, before: Size | None) -> None:
        if before is None:
            self._owner.sized(self)
        self._owner.report()

    def _was_read(self) -> None:
        reader = self.reader
        if reader is None:
            return
        self._compare()
        if reader.is_crowded:
            self.cap(HELD_BACK_S)
            self._owner.on_crowded(self.id, HELD_BACK_S)


class _PagesWithStart(EnginePages):
    """An engine's pages, which note when its process started, by the metrics that others read anyway.

    A later start counts, an earlier one does not: several processes may answer in turn at one address.
    """

    def __init__(self, proxy: ReverseProxy, engine_key: str | None, metrics_page: str) -> None:
        super().__init__(proxy, engine_key)
        self.ignores_starts = False
        self._started_s: float | None = None
        self._metrics_page = metrics_page

    @property
    def started_s(self) -> float | None:
        """The latest start that a page reported; None where none did, or they are ignored."""
        return None if self.ignores_starts else self._started_s

    async def get(self, path: str, *, within_s: float = ANSWER_WITHIN_S) -> Page:
        page = await super().get(path, within_s=within_s)
        if path == self._metrics_page and page.status == 200 and (found := _START.search(page.text)):
            with suppress(ValueError):
                started_s = float(found[1])
                if math.isfinite(started_s):  # of infinity no later start could ever be seen
                    self._started_s = max(started_s, self._started_s or 0.0)
        return page
