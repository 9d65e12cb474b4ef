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

from sidecar.admission.engine_pages import EnginePages
from sidecar.engines.base import Engine
from sidecar.engines.pages import Pages
from sidecar.engines.watch import EngineCheck, EngineWatch
from sidecar.fleet.member import MemberState
from sidecar.policy.choices import Mode
from sidecar.policy.fields import engine_name
from sidecar.policy.fleet import offered
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.pools.engine_reader import HELD_BACK_S, EngineReader, Size, warn_of_unbounded
from sidecar.pools.engines import EngineOffer, name_and_incarnation
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
