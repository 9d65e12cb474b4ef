"""The door: everything that all requests of one process share. Nothing in it belongs to a single request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from sidecar.asgi.background import Followed
from sidecar.asgi.observe.shadows import Shadows
from sidecar.asgi.pending_aborts import PendingAborts
from sidecar.asgi.rounds import Rounds
from sidecar.asgi.ruling import ruling
from sidecar.asgi.types import ASGIApp
from sidecar.engines.base import Engine
from sidecar.events import ObservedObserver, Observer, UnguardedObserver
from sidecar.policy.model import Mode, Policy, Unguarded
from sidecar.pools import Pool
from sidecar.tokens import Estimator

LONGEST_ROUND_S = 1.0
"""How often requests under way are looked after: how late a body's timeout or a departure may be noticed."""
SHORTEST_ROUND_S = 0.05
LEAVES_OPEN_S = 5.0
"""How long a door that refuses nobody goes on taking requests in when it drains: until load balancers have noticed."""
OBSERVES = "mode: observe: requests pass at once, the pool shows what enforcing would do"


class Door:
    """What a request needs to be admitted to an app and served by it.

    `engine_key` is the engine's own API key: what goes on to it carries that one in place of the tenant's. With
    `is_proxied` the app is a reverse proxy, and the engine is another process. `unguarded` applies where the policy
    does not say what happens on other paths; None is decided by the app, when its first request comes.
    """

    has_failed = False
    """Whether it could not be made: its app then says why, to every request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        policy: Policy,
        pool: Pool,
        dialect: Engine,
        estimator: Estimator,
        observer: Observer | None,
        observed: ObservedObserver | None = None,
        is_proxied: bool = False,
        engine_key: str | None = None,
        unguarded: Unguarded | None = Unguarded.GENERATING,
        unguarded_observer: UnguardedObserver | None = None,
    ) -> None:
        self.app = app
        self.engine_key = None if engine_key is None else engine_key.encode("ascii")
        self._is_proxied = is_proxied
        self.ruling = ruling(policy, dialect, estimator, self.engine_key, is_proxied=is_proxied)
        self.endpoints = self.ruling.endpoints
        self.pool = pool
        self.dialect = dialect
        self.estimator = estimator
        self.observer = observer
        self.observed = observed
        self.unguarded = unguarded
        self.unguarded_observer = unguarded_observer
        self.followed = Followed()
        self.shadows = Shadows()
        self.pending_aborts = PendingAborts(pool.now_us)
        self.rounds = Rounds(_round_s(policy), on_armed=self.pending_aborts.follow)
        self.is_draining = False

    @property
    def policy(self) -> Policy:
        """What new requests go by."""
        return self.ruling.policy

    @property
    def is_observing(self) -> bool:
        """Whether new requests pass, whatever the policy would do with them."""
        return self.ruling.policy.mode is Mode.OBSERVE

    def change_policy(self, policy: Policy) -> None:
        """Goes by another policy from the next request on; those that are in keep to the one they came under.

        `policy.replacing` says which can replace which. Raises, and nothing has changed, where this one cannot be used.
        """
        replacing = ruling(policy, self.dialect, self.estimator, self.engine_key, is_proxied=self._is_proxied)
        self.pool.change_policy(policy)
        self.ruling, self.endpoints = replacing, replacing.endpoints
        self.rounds.interval_s = _round_s(policy)
        if not self.is_observing:
            self.shadows.end_unreal()

    def drain(self) -> None:
        """Refuses every new request from now on; those that wait or run are served to their end.

        A door that observes refuses nobody: it only says that it is not ready.
        """
        self.is_draining = True

    async def drained(self) -> None:
        """Returns when no request is under way; of a door that observes, when it has been open for long enough.

        Its server then closes the port, and serves what runs to its end: as it would without a door.
        """
        if not self.is_observing:
            await self.rounds.emptied()
            await self.followed.emptied()
            return
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.rounds.emptied(), LEAVES_OPEN_S)

    @property
    def under_way(self) -> int:
        """How many requests are in, waiting or served, or run on in the background."""
        return len(self.rounds) + len(self.followed)

    def readiness(self) -> Sequence[str]:
        """Why this process should get no traffic; empty when it should."""
        return [*(["draining"] if self.is_draining else []), *self.pool.readiness()]

    def notices(self) -> Sequence[str]:
        """What is out of order though this process may get traffic."""
        return [*([OBSERVES] if self.is_observing else []), *self.pool.notices()]

    def state(self) -> Mapping[str, object]:
        """What the door is doing, for people and dashboards: JSON types only."""
        return {
            "policy": {"generation": self.policy.generation, "engine": self.policy.engine.name},
            "mode": self.policy.mode.value,
            "draining": self.is_draining,
            "under_way": self.under_way,
            "shadows": len(self.shadows),
            "aborting": self.pending_aborts.held()._asdict(),
            "background": len(self.followed),
            "pool": self.pool.state(),
        }


def _round_s(policy: Policy) -> float:
    """How often those that are under way have to be looked after, in seconds."""
    return max(SHORTEST_ROUND_S, min(LONGEST_ROUND_S, policy.body_timeout_s, policy.disconnect_grace_s))
