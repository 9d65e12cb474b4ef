"""Fleet: the engines of one pool as one process sees them, from what discovery names to what the pool is offered.

Discovery never cuts a request: an engine that it names no more takes no new ones, and its connections are closed when
its last request has ended. When it comes back it is a new incarnation, as after a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from sidecar.engines.base import Engine
from sidecar.engines.watch import EngineCheck
from sidecar.fleet.discovery import EngineDiscovery
from sidecar.fleet.member import EngineMember
from sidecar.policy.fleet import MOST_ENGINES, EngineAddress, FleetPolicy
from sidecar.pools.engine_reader import warn_of_unbounded
from sidecar.pools.engines import EngineOffer
from sidecar.tasks import end

FIRST_LOOKS_WITHIN_S = 6.0
"""How long the start waits for the first look at each engine: a little more than one that accepts and never answers."""
MOST_NAMES = 4096
"""Names whose last incarnation is remembered: with pods that change their addresses they are ever new ones."""
MOST_NOTICES = 8

_log = logging.getLogger("sidecar.fleet")


class Fleet:
    """The engines of one pool, all of one kind, `engine`, for one event loop from `open` to `close`.

    `now_us` is the pool's clock. `on_state` is called in the event loop after the state of an engine may have changed,
    once for changes that come together, and `on_change` before it where `offers` has changed. `on_restart` is called
    with a member that is a later incarnation of an engine (it restarted, or discovery names it again), `on_crowded`
    with an engine id and the seconds for which that engine is to get no more requests than it runs. `on_preemptions` is
    called after each reading of an engine that counts its preemptions: its name, how many it has counted since this
    process began to read it, and the time.
    """

    def __init__(
        self,
        engine: type[Engine],
        policy: FleetPolicy,
        discovery: EngineDiscovery,
        now_us: Callable[[], int],
        *,
        check: EngineCheck = EngineCheck.ON,
        engine_key: str | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.policy, self.check = engine, policy, check
        self.discovery = discovery
        self.now_us = now_us
        self.on_change = on_change
        self.on_state: Callable[[], None] = lambda: None
        self.on_restart: Callable[[EngineMember], None] = lambda _: None
        self.on_crowded: Callable[[str, float], None] = lambda _, __: None
        self.on_preemptions: Callable[[str, int, int], None] = lambda _, __, ___: None
        self.is_starting = True
        self._engine_key = engine_key
        self._members: dict[str, EngineMember] = {}
        self._leaving: list[EngineMember] = []
        self._incarnations: dict[str, int] = {}
        self._refused: tuple[str, ...] = ()
        self._offered: list[EngineOffer] = []
        self._will_report = self._has_sized = False
        self._tasks: set[asyncio.Task[None]] = set()
        discovery.on_answer = self._apply

    def __repr__(self) -> str:
        return f"Fleet({', '.join(f'{member.id}: {member.state.value}' for member in self.members())})"

    async def open(self) -> None:
        """Finds the engines and looks at each once. It does not raise, and takes seconds at most."""
        await self.discovery.open()
        looks = [asyncio.ensure_future(member.looked()) for member in self._members.values()]
        if looks:
            _, late = await asyncio.wait(looks, timeout=FIRST_LOOKS_WITHIN_S)
            for look in late:
                look.cancel()
        self.is_starting = False
        self.report()

    async def close(self) -> None:
        """Ends discovery and all watching, and closes all connections. No member is left."""
        await self.discovery.close()
        members = self.members()
        self._members, self._leaving = {}, []
        await asyncio.gather(*(end(task) for task in self._tasks), *(member.close() for member in members))

    # -- what the pool and others see

    def members(self) -> Sequence[EngineMember]:
        """All engines by name, and then those that are gone and still serve requests."""
        return [*(self._members[name] for name in sorted(self._members)), *self._leaving]

    def member(self, engine_id: str) -> EngineMember | None:
        """The engine of a grant. None where that incarnation is over, or was never seen here."""
        name, _, _ = engine_id.rpartition("#")
        found = self._members.get(name)
        if found is not None and found.id == engine_id:
            return found
        return next((member for member in self._leaving if member.id == engine_id), None)

    def usable(self, *, is_client: bool) -> EngineMember | None:
        """The engine for a request that the pool does not place: the one with the fewest requests of this process.

        Where none is known to answer, a client's request tries one all the same: what is known may be wrong.
        """
        members = self._members.values()
        found = [member for member in members if member.is_up]
        rested = [member for member in found if member.takes_new]
        return min(
            rested or found or (members if is_client else ()),
            key=lambda member: (member.open_requests, member.name),
            default=None,
        )

    def offers(self) -> list[EngineOffer]:
        """The engines whose size is known, by name. One that takes no new requests is there for what it holds."""
        offers = (member.offer() for member in self.members())
        return [offer for offer in offers if offer is not None]

    def readiness(self) -> Sequence[str]:
        """Reasons why no request can be sent to any engine; empty where one can."""
        if any(member.is_up for member in self._members.values()):
            return ()
        if not self._members:
            return tuple(self.discovery.notices()) or ("no engine is known",)
        return (f"no engine can be used: {self._why()}",)

    def idleness(self) -> Sequence[str]:
        """Reasons why the pool admits nothing, although an engine answers; empty where it does."""
        if any(member.takes_new and member.size is not None for member in self._members.values()):
            return ()
        return (f"no engine takes new requests: {self._why()}",)

    def _why(self) -> str:
        return _shorten([f"{member.name}: {member.reason or member.state.value}" for member in self.members()], "; ")

    def notices(self) -> Sequence[str]:
        """Notices for the operator, one sentence each; of many engines in trouble, the first ones."""
        found = [notice for member in self.members() for notice in member.notices()]
        shown = found[:MOST_NOTICES]
        if len(found) > MOST_NOTICES:
            shown.append(f"{len(found) - MOST_NOTICES} more notices about engines: see GET /engines")
        return [*self.discovery.notices(), *self._refused, *shown]

    def document(self) -> Mapping[str, object]:
        """The fleet, for people and dashboards: JSON types only."""
        return {
            "engines": [member.document() for member in self.members()],
            "discovery_failures": self.discovery.failures,
        }

    # -- what others want

    def change(self, policy: FleetPolicy) -> None:
        """Another policy counts at once."""
        self.policy = policy
        for member in self._members.values():
            member.watch.change_health(policy.health)
        self.report()

    def drain(self, name: str) -> EngineMember | None:
        """The engine takes no new requests until it is resumed or restarts. None where there is no such engine.

        One that discovery names no more is drained by that, and is still there while it serves requests: a pod that
        ends is out of DNS before its preStop hook asks.
        """
        member = self._members.get(name) or next((left for left in self._leaving if left.name == name), None)
        if member is not None:
            member.drain()
        return member

    def resume(self, name: str) -> EngineMember | None:
        """Ends a drain. None where there is no such engine."""
        member = self._members.get(name)
        if member is not None:
            member.resume()
        return member

    def set_draining(self, name: str, drains: bool) -> None:  # as a pool calls it
        """Other replicas drain the engine, or use it again."""
        member = self._members.get(name)
        if member is not None and member.is_draining is not drains:
            (member.drain if drains else member.resume)()

    def adopt(self, name: str, incarnation: int, is_restart: bool) -> None:  # as a pool calls it
        """Raises an engine's incarnation to the store's. See `EngineMember.adopt`.

        One that is unknown here changes nothing: when it is found it has the number after its last one here, and then
        the store says whether other replicas have counted that before.
        """
        member = self._members.get(name)
        if member is not None:
            member.adopt(incarnation, is_restart=is_restart)
            self._incarnations[name] = max(self._incarnations[name], member.incarnation)

    def set_reached_elsewhere(self, names: Collection[str]) -> None:
        """Other replicas can use these engines."""
        for member in self._members.values():
            member.is_reached_elsewhere = member.name in names

    # -- for its members

    def next_incarnation(self, name: str) -> int:
        """A number that no incarnation of that engine had before."""
        found = self._incarnations.pop(name, 0) + 1
        self._incarnations[name] = found  # the last one in the dictionary's order
        for old in list(self._incarnations)[: len(self._incarnations) - MOST_NAMES]:
            if old not in self._members and all(member.name != old for member in self._leaving):
                del self._incarnations[old]
        return found

    def restarted(self, member: EngineMember) -> None:
        """The member is a new incarnation: what was known of the engine's prefix cache is over."""
        self._incarnations[member.name] = max(self._incarnations.get(member.name, 0), member.incarnation)
        self.on_restart(member)

    def may_eject_slow(self, member: EngineMember) -> bool:
        """True if a slow engine may go out of use: if no more than half are out then, or it is the only one."""
        out = sum(not other.is_up for other in self._members.values() if other is not member)
        return len(self._members) == 1 or 2 * (out + 1) <= len(self._members)

    def sized(self, member: EngineMember) -> None:
        """The member's size was read for the first time. The engines are of one kind, which is warned of once."""
        if member.size is not None and not self._has_sized:
            self._has_sized = True
            warn_of_unbounded(self.engine, member.size)

    # -- discovery

    def _apply(self) -> None:
        """Follows an answer of discovery. No request ends by it."""
        wanted, problems = self._find_wanted()
        for name, member in list(self._members.items()):
            if name not in wanted or wanted[name].url != member.address.url:
                del self._members[name]
                self._retire(member)
        for name, address in wanted.items():
            known = self._members.get(name)
            if known is None:
                self._add(address, problems)
            elif known.address != address:
                known.change_address(address)
        self._refused = tuple(problems)
        self.report()

    def _find_wanted(self) -> tuple[dict[str, EngineAddress], list[str]]:
        """The engines to have, by name: of too many first those that are there already, and then by name."""
        found = {engine.name: engine for engine in self.discovery.engines}
        most, problems = MOST_ENGINES, []
        if len(found) > most:
            order = sorted(found, key=lambda name: (name not in self._members, name))
            problems.append(f"there are {len(found)} engines, and a pool has {most} at most: {most} of them are used")
            found = {name: found[name] for name in order[:most]}
        return found, problems

    def _add(self, address: EngineAddress, problems: list[str]) -> None:
        try:
            member = EngineMember(address, self, self._engine_key)
        except ValueError as mistake:
            problems.append(f"engine {address.name} is left out: {mistake}")
            return
        self._members[address.name] = member
        if not self.is_starting:
            _log.info("engine %s (%s) is new", member.id, address.url, extra={"event": "engine_found"})
        member.open()
        if member.incarnation > 1:
            self.on_restart(member)

    def _retire(self, member: EngineMember) -> None:
        gone = "engine %s (%s) is gone: its %d requests are served to their end"
        _log.warning(gone, member.id, member.address.url, member.in_flight, extra={"event": "engine_gone"})
        self._leaving.append(member)
        member.leave()
        task = asyncio.get_running_loop().create_task(self._leave(member))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _leave(self, member: EngineMember) -> None:
        await member.stop_watching()
        await member.emptied()
        await member.proxy.close()
        with suppress(ValueError):
            self._leaving.remove(member)
        self.report()

    # -- reporting

    def report(self) -> None:
        """An offer, or the state of an engine, may have changed."""
        if not self._will_report:
            self._will_report = True
            asyncio.get_running_loop().call_soon(self._report_now)

    def _report_now(self) -> None:
        self._will_report = False
        offers = self.offers()
        if offers != self._offered:
            self._offered = offers
            self.on_change()
        self.on_state()


def _shorten(parts: Sequence[str], between: str) -> str:
    shown = between.join(parts[:3])
    return shown if len(parts) <= 3 else f"{shown}{between}and {len(parts) - 3} more"
