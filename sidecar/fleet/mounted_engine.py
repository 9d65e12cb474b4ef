"""The engine of a process that mounts the middleware: one engine of its pool, for the requests of this process alone.

The engine and its process are one. A process that starts again is another engine: by a name with a random end, or by a
later incarnation of the name that the operator gave it. So what the process before it held is never charged to it, and
a drain ends with the process.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from starlette.types import ASGIApp, Message, Send

from sidecar.admission.answer import EngineCall
from sidecar.admission.engine_pages import EnginePages
from sidecar.admission.intake import SizedRequest
from sidecar.admission.usage import UsageReader
from sidecar.engines.base import Engine
from sidecar.engines.pages import Pages
from sidecar.engines.speed import EngineSpeed
from sidecar.engines.view import Amount, DrainEnd, EngineDocument
from sidecar.engines.watch import EngineCheck, EngineHealth, EngineWatch
from sidecar.errors import Draining
from sidecar.events import ReplayReason
from sidecar.fleet.member import MemberState
from sidecar.fleet.prefill import Prefill
from sidecar.policy.choices import Mode
from sidecar.policy.fields import engine_name
from sidecar.policy.fleet import offered
from sidecar.policy.model import Policy
from sidecar.pools import Lease, Pool
from sidecar.pools.engine_reader import HELD_BACK_S, EngineReader, Size, warn_of_unbounded
from sidecar.pools.engine_reports import engine_document, no_figures
from sidecar.pools.engines import EngineFigures, EngineOffer, name_and_incarnation
from sidecar.pools.stats import bounded
from sidecar.tasks import end

NAME_VARIABLE = "SIDECAR_ENGINE_NAME"
"""The name of this process's engine, where engines are mounted. By default the host's, with a random end."""
LOOK_EVERY_S = 0.1
"""Between two looks whether a draining process has served its last request."""
_LONGEST_HOST = 58

_log = logging.getLogger("sidecar.fleet")


def engine_of_process(environment: Mapping[str, str]) -> tuple[str, int]:
    """The name and the incarnation of this process's engine. Raises ValueError for a name that is none.

    The incarnation of a given name is the time of the calendar at which the process began, in us. In seconds, two
    processes that began in the same one would be one engine to the pool.
    """
    written = environment.get(NAME_VARIABLE, "").strip()
    if not written:
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")[:_LONGEST_HOST]
        return f"{host or 'engine'}-{secrets.token_hex(2)}", 1
    try:
        return engine_name(written), time.time_ns() // 1000
    except ValueError as mistake:
        raise ValueError(f"{NAME_VARIABLE}: {mistake}") from None


class MountedEngine:
    """The engine of this process, in `pool`, from `open` to `close`.

    `called` is what `engine_of_process` returns, `pages` are the app's own.
    `in_flight` counts the admitted requests that the app serves. While the engine is draining the process takes no new
    requests. When it has served its last one, the pool places nothing here.
    """

    def __init__(self, called: tuple[str, int], policy: Policy, pool: Pool, pages: Pages) -> None:
        assert policy.engines is not None
        name, incarnation = called
        self.name = name
        self.id = f"{name}#{incarnation}"
        self.pool = pool
        self.in_flight = 0
        self.is_draining = self.is_drained = False
        self._under_way: Callable[[], int] = lambda: 0
        self.since_us = self.capped_until_us = 0
        self._policy = policy
        self._engines = policy.engines
        self._leaving: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._succeeding: asyncio.Task[None] | None = None
        capacity = self._engines.capacity
        self.reader: EngineReader | None = None
        if capacity.is_read:
            self.reader = EngineReader(
                policy.engine, capacity, pages, pool.now_us, resized=self._resized, was_read=self._was_read
            )

    # -- what the pool knows

    @property
    def size(self) -> Size | None:
        """Tokens and requests; None while the engine has not reported them."""
        if self.reader is not None:
            return self.reader.size
        return self._engines.capacity.size(None, None)

    @property
    def takes_new(self) -> bool:
        """True if the pool places requests of this process here."""
        return self.size is not None and not self.is_drained

    @property
    def prefill(self) -> int:
        """The most un-prefilled prompt tokens that it may have at once."""
        return self._engines.prefill

    @property
    def drain_timeout_s(self) -> float:
        """The longest wait for a drain, by the policy."""
        return self._engines.drain_timeout_s

    @property
    def state(self) -> MemberState:
        """The state, as people see it."""
        now_us = self.pool.now_us()
        if self.is_draining:
            return MemberState.DRAINING
        if self.size is None or self.has_successor:
            return MemberState.DOWN
        if now_us < self.capped_until_us:
            return MemberState.CAPPED
        starts = self.since_us and now_us < self.since_us + round(self._engines.slow_start_s * 1e6)
        return MemberState.STARTING if starts else MemberState.READY

    @property
    def reason(self) -> str | None:
        """Why the engine gets no requests; None where it does, or where its state says all."""
        if self.size is None and self.reader is not None:
            return f"it has not reported its capacity yet: {self.reader.trouble}"
        if self.has_successor:
            return (
                f"a process that began later has its name, {self.name}; give each process a {NAME_VARIABLE} of its own"
            )
        return None

    @property
    def has_successor(self) -> bool:
        """True if a process that began later has the same name: the pool then places requests on that one alone."""
        own = name_and_incarnation(self.id)
        return any(
            found[0] == own[0] and found[1] > own[1] and state.takes_new
            for state in self.pool.engines()
            for found in (name_and_incarnation(state.id),)
        )

    def readiness(self) -> Sequence[str]:
        """Reasons why this process should get no traffic; empty where it should."""
        if self.is_draining:
            return (f"engine {self.name}, of this process, is draining",)
        reason = self.reason
        return () if reason is None else (f"engine {self.name}, of this process: {reason}",)

    def notices(self) -> Sequence[str]:
        """Further sentences for the operator."""
        return () if self.reader is None or self.reader.notice is None else (self.reader.notice,)

    def follow(
        self,
        under_way: Callable[[], int],
        on_unfinished: Callable[[int, int], None],
        on_preemptions: Callable[[int, int], None] | None = None,
    ) -> None:
        """`under_way` counts all requests of the process; for the others see `EngineReader`."""
        self._under_way = under_way
        if self.reader is not None:
            self.reader.on_unfinished = on_unfinished
            self.reader.on_preemptions = on_preemptions

    def begin(self) -> None:
        """Offers the engine to the pool. Harmless when repeated; the first call is at the server's start."""
        if self.since_us == 0 and self.size is not None:
            self.since_us = max(1, self.pool.now_us())
            self._offer()

    def wake(self) -> None:
        """A request comes. Where no server's start was seen, the engine is offered, or read, from now on."""
        if self.reader is None:
            self.begin()
        elif not self.reader.is_following():
            self._opening = asyncio.get_running_loop().create_task(self.open(), name="sidecar capacity")

    async def open(self) -> None:
        """Reads the engine, where the policy says so, and offers it. Returns when it was read, or could not be."""
        if self.reader is not None:
            await self.reader.open()
        self.begin()

    async def close(self) -> None:
        """Reads the engine no more."""
        await self._end_leaving()
        if self._succeeding is not None and self._succeeding.get_loop() is asyncio.get_running_loop():
            await end(self._succeeding)
        if self.reader is not None:
            await self.reader.close()

    def change_policy(self, policy: Policy) -> None:
        """Another policy counts from now on. Where its capacity comes from stays: `diff.needs_restart`."""
        assert policy.engines is not None
        self._policy, self._engines = policy, policy.engines
        if self.reader is not None and policy.engines.capacity.is_read:
            self.reader.change_capacity(policy.engines.capacity)
        self._offer()

    def _offer(self) -> None:
        size = self.size
        if size is None or not self.since_us:
            return
        tokens, requests = map(offered, size)
        ramp_us = round(self._engines.slow_start_s * 1e6)
        since_us = self.since_us if ramp_us else 0
        offer = EngineOffer(self.id, tokens, requests, self.prefill, 1000, self.takes_new, ramp_us, since_us)
        self.pool.set_engines((offer,))

    async def _resized(self, before: Size | None) -> None:
        assert self.reader is not None
        assert self.reader.size is not None
        if before is None:
            warn_of_unbounded(self._policy.engine, self.reader.size)
            self.begin()
        else:
            self._offer()

    def _was_read(self) -> None:
        """While too many requests wait inside the engine, it gets no more than it runs. In the dry run it gets all."""
        assert self.reader is not None
        if self.reader.is_crowded and self._policy.mode is not Mode.OBSERVE:
            self.capped_until_us = self.pool.now_us() + round(HELD_BACK_S * 1e6)
            self.pool.cap_engine(self.id, HELD_BACK_S, 0)

    # -- another process of the same name

    def adopt(self, name: str, incarnation: int, is_restart: bool) -> None:  # noqa: ARG002  # as a pool calls it
        """The pool knows a later incarnation: it places requests on that one alone, until it is gone."""
        if name == self.name and (self._succeeding is None or self._succeeding.done()):
            self._succeeding = asyncio.get_running_loop().create_task(self._succeed(incarnation), name="sidecar name")

    async def _succeed(self, incarnation: int) -> None:
        """Becomes the next incarnation, as soon as it holds nothing as this one: that would count beside the next."""
        await asyncio.sleep(LOOK_EVERY_S)
        while self.has_successor or self.in_flight:  # noqa: ASYNC110  # rare: a mistake in names, or a clock set back
            await asyncio.sleep(LOOK_EVERY_S)
        self.id = f"{self.name}#{incarnation + 1}"
        self._offer()

    # -- the drain

    def drain(self) -> None:
        """The process takes no new requests until `resume`. Those that wait or run are served."""
        self.is_draining = True
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_task(self._leave(), name="sidecar drain")

    async def resume(self) -> None:
        """Ends `drain`."""
        await self._end_leaving()
        self.is_draining = self.is_drained = False
        self._offer()

    async def _leave(self) -> None:
        while self._under_way():  # noqa: ASYNC110  # requests end in many places, and few processes drain
            await asyncio.sleep(LOOK_EVERY_S)
        self.is_drained = True
        self._offer()

    async def _end_leaving(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None and leaving.get_loop() is asyncio.get_running_loop():
            await end(leaving)


class MountedWatch(EngineWatch):
    """The watch of an app in this process, which is also not ready while its engine drains. See `EngineWatch`."""

    def __init__(
        self,
        pages: EnginePages,
        expected: type[Engine],
        engine: MountedEngine,
        *,
        check: EngineCheck = EngineCheck.ON,
        place: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__(pages, expected, check=check, place=place)
        self._mounted = engine

    async def open(self) -> None:
        """See `EngineHealth`; then the engine is offered to the pool."""
        await super().open()
        await self._mounted.open()

    async def close(self) -> None:
        """See `EngineHealth`."""
        await super().close()
        await self._mounted.close()

    def readiness(self) -> Sequence[str]:
        """See `EngineHealth`."""
        return [*super().readiness(), *self._mounted.readiness()]

    def notices(self) -> Sequence[str]:
        """See `EngineHealth`."""
        return [*super().notices(), *self._mounted.notices()]


# -- Routing to the engine of this process: the app itself, which is called once for each admission.
#
# Nothing is predicted, and nothing is sent a second time: the engine lives and ends with the process. An answer of
# the app's passes as it is, with its head.


class MountedRouting:
    """See `EngineRouting`. `watch` is the app's."""

    def __init__(self, engine: MountedEngine, watch: EngineHealth) -> None:
        self.engine = engine
        self.watch = watch
        self.speed = EngineSpeed()

    def route(self, request: SizedRequest) -> MountedRoute:
        """See `EngineRouting`. Raises Draining while the engine drains."""
        self.wake()
        return MountedRoute(self, request)

    def wake(self) -> None:
        """See `EngineRouting`. Raises Draining while the engine drains."""
        if self.engine.is_draining:
            raise Draining("this server is draining and takes no new request; try another", retry_after_s=1)
        self.engine.wake()

    def url_for(self, engine_id: str) -> None:
        """See `EngineRouting`: the engine is this process."""

    def change_policy(self, policy: Policy) -> None:
        """See `EngineRouting`."""
        self.engine.change_policy(policy)


class MountedRoute:
    """One request's route to the app. See `EngineRoute`."""

    __slots__ = (
        "_is_in_flight", "_lease", "_prefill", "_request", "_routing", "_send", "_status", "barred", "hits", "replay",
        "usage",
    )  # fmt: skip

    _lease: Lease
    _send: Send
    usage: UsageReader

    def __init__(self, routing: MountedRouting, request: SizedRequest) -> None:
        self._routing = routing
        self._request = request
        self.hits: tuple[tuple[str, int], ...] = ()
        self.barred: tuple[str, ...] = ()
        self.replay: ReplayReason | None = None
        self._prefill: Prefill | None = None
        self._is_in_flight = False
        self._status = 0

    def begin(self, lease: Lease, send: Send) -> Send:
        """See `EngineRoute`. The head is not held back."""
        engine, request = self._routing.engine, self._request
        self._lease, self._send = lease, send
        self._is_in_flight, self._status = True, 0
        engine.in_flight += 1
        now_us = engine.pool.now_us()
        self._prefill = Prefill(self._routing.speed, request, request.prompt_tokens, lease, now_us)
        return self._send_noting

    def call(self) -> EngineCall:
        """See `EngineRoute`."""
        self._end_attempt()  # one that was preempted
        self.usage = UsageReader()
        return EngineCall(self._routing.watch)

    def pinned(self, app: ASGIApp) -> ASGIApp:
        """See `EngineRoute`: the app is the engine."""
        return app

    async def _send_noting(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        await self._send(message)

    def first_byte(self) -> None:
        """See `EngineRoute`."""
        if self._prefill is not None:
            self._prefill.first_byte(self._routing.engine.pool.now_us(), is_served=0 < self._status < 400)

    def ended(self) -> None:
        """See `EngineRoute`."""
        self._end_attempt()

    def failed(self, error: Exception) -> bool:  # noqa: ARG002  # see `EngineRoute`
        """See `EngineRoute`: an error of the app's is the server's to answer."""
        return False

    async def waits_again(self) -> bool:
        """See `EngineRoute`: only a proxy leaves a request unanswered."""
        return False

    def _end_attempt(self) -> None:
        engine = self._routing.engine
        if self._prefill is not None:
            self._prefill.end(engine.pool.now_us())
        if self._is_in_flight:
            self._is_in_flight = False
            engine.in_flight -= 1


# -- The engines of a pool whose engines are mounted, as one process sees them: its own, and the others' ledgers.


class MountedView:
    """See `EngineView`. Only the engine of this process can be drained here: the others' processes drain their own."""

    def __init__(self, engine: MountedEngine, now_s: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self._now_s = now_s
        self._since_s = now_s()

    @property
    def drain_timeout_s(self) -> float:
        """See `EngineView`."""
        return self.engine.drain_timeout_s

    def documents(self) -> Sequence[EngineDocument]:
        """See `EngineView`."""
        ledgers = {ledger.id: ledger for ledger in self.engine.pool.engines()}
        rows = [self._own(ledgers.pop(self.engine.id, None)), *map(_other, ledgers.values())]
        return sorted(rows, key=lambda row: name_and_incarnation(row.id))

    async def drain(self, name: str) -> None:
        """See `EngineView`."""
        self._check(name)
        self.engine.drain()

    async def resume(self, name: str) -> None:
        """See `EngineView`."""
        self._check(name)
        await self.engine.resume()

    async def drained(self, name: str, within_s: float) -> DrainEnd:
        """See `EngineView`. The process is empty when no request of it is under way."""
        self._check(name)
        end_s = self._now_s() + within_s
        while True:
            if not self.engine.is_draining:
                return DrainEnd.RESUMED
            if self.engine.is_drained:
                return DrainEnd.EMPTY
            if self._now_s() >= end_s:
                return DrainEnd.TIMED_OUT
            await asyncio.sleep(min(LOOK_EVERY_S, max(0.0, end_s - self._now_s())))

    def _check(self, name: str) -> None:
        if name != self.engine.name:
            raise KeyError(name)

    def _own(self, ledger: EngineFigures | None) -> EngineDocument:
        engine, size = self.engine, self.engine.size
        return engine_document(
            ledger or no_figures(engine.id),
            state=engine.state.value,
            reason=engine.reason,
            for_s=round(self._now_s() - self._since_s, 3),
            takes_new=engine.takes_new and not engine.is_draining,
            draining=engine.is_draining,
            capacity=None if size is None else Amount(*size),
            prefill=bounded(engine.prefill),
            in_flight=engine.in_flight,
            mounted=True,
        )


def _other(ledger: EngineFigures) -> EngineDocument:
    """The engine of another process; its state is that of the pool, unless that process has reported it."""
    state = "capped" if ledger.is_capped else "ready"
    return engine_document(
        ledger,
        state=state if ledger.takes_new else "gone",
        reason=None if ledger.takes_new else "its process takes no requests, or has ended",
        mounted=True,
    )
